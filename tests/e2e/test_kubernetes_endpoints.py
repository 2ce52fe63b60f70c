"""Ready pods of a service are endpoints: they join and leave while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, calling, post
from tests.support.gateways import document, pool
from tests.support.kubernetes_api import FakeApiServer, api_server, endpoint, put_slice
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time

STREAM = post({**CHAT, "stream": True})
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]


@asynccontextmanager
async def gateway_over(server: FakeApiServer, port: str, **more: Any) -> AsyncIterator[Gateway]:
    """Gateway with the pods of the service `default/vllm`."""
    pods = {"kubernetes": {"service": "default/vllm", "port": "http"}}
    routes = {"chat": {"tiers": ["only"], "scorer": "round_robin"}}
    kubernetes = {"api": server.url}
    settings = document({"only": {**pool(), "endpoints": pods}}, routes, kubernetes=kubernetes, **more)
    gateway = Gateway(Config.model_validate(settings))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def ask(gateway: Gateway) -> int:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(STREAM)
        if status == 200:
            await caller.chunks()
    return status


async def test_a_pod_that_becomes_ready_is_asked_within_two_seconds_and_one_that_leaves_is_asked_no_more() -> None:
    """A stream in progress is finished by the pod that leaves."""
    async with Upstream(SLOW) as leaves, api_server() as server:
        port = leaves.url.rpartition(":")[2]
        put_slice(server, "one", endpoint("127.0.0.1", "uid-leaves"), port=int(port))
        async with (
            Upstream([STREAMED], host="127.0.0.2", port=int(port)) as comes,
            gateway_over(server, port) as gateway,
            calling(gateway.url) as caller,
        ):
            assert gateway.monitor.loads().keys() == {f"only/127.0.0.1:{port}/uid-leav"}
            assert (await caller.ask(STREAM))[0] == 200
            changed = monotonic()
            going = endpoint("127.0.0.1", "uid-leaves", ready=False, serving=True, terminating=True)
            put_slice(server, "one", going, endpoint("127.0.0.2", "uid-comes"), port=int(port))
            await eventually(lambda: gateway.monitor.loads().keys() == {f"only/127.0.0.2:{port}/uid-come"})
            for _ in range(4):
                assert await ask(gateway) == 200
            assert monotonic() - changed < 1.0
            assert len(comes.requests) >= 4
            leaves.proceed()
            assert b"".join(await caller.chunks()).endswith(DONE)
            assert sum(each.method == "POST" for each in leaves.requests) == 1


async def test_a_service_without_pods_is_refused_until_one_is_ready() -> None:
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = pod.url.rpartition(":")[2]
        async with gateway_over(server, port) as gateway:
            assert await ask(gateway) == 503
            put_slice(server, "one", endpoint("127.0.0.1", "a"), port=int(port))
            await eventually(lambda: gateway.monitor.loads())
            assert await ask(gateway) == 200


async def test_an_api_server_that_goes_away_takes_no_endpoint() -> None:
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = pod.url.rpartition(":")[2]
        put_slice(server, "one", endpoint("127.0.0.1", "a"), port=int(port))
        async with gateway_over(server, port) as gateway:
            server.status = 503
            server.cut()
            for _ in range(4):
                assert await ask(gateway) == 200


async def test_a_pod_that_is_gone_leaves_no_metric() -> None:
    """Every pod is another endpoint: series of all that ever were would grow for ever."""
    async with api_server() as server:
        port = "9"
        put_slice(server, "one", endpoint("127.0.0.1", "first"), port=int(port))
        async with gateway_over(server, port) as gateway:
            ejections = gateway.monitor.ejections
            for uid in ("first", "second", "third"):
                put_slice(server, "one", endpoint("127.0.0.1", uid), port=int(port))
                id = f"only/127.0.0.1:{port}/{uid}"
                await eventually(lambda id=id: id in gateway.monitor.loads())
                while not [labels for labels in ejections.of if labels[1] == id]:
                    await ask(gateway)
                    await asyncio.sleep(0.1)
            assert {labels[1] for labels in ejections.of} == {id}
