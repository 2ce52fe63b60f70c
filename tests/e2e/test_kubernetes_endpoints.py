"""Ready pods of a service are endpoints: they join and leave while requests run."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from time import monotonic

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.runtime import Runtime
from tests.support.builders import DONE, STREAMED, calling, stream_status
from tests.support.gateways import pool, running
from tests.support.kubernetes_api import FakeApiServer, api_server, endpoint, put_slice
from tests.support.leaving_host import STREAM, finished, two_hosts
from tests.support.simulated import eventually
from tests.support.upstream import Upstream

pytestmark = pytest.mark.virtual_time


def gateway_over(server: FakeApiServer) -> AbstractAsyncContextManager[Gateway]:
    """Gateway with the pods of the service `default/vllm`."""
    pods = {"kubernetes": {"service": "default/vllm", "port": "http"}}
    routes = {"chat": {"tiers": ["only"], "scorer": "round_robin"}}
    return running({"only": {**pool(), "endpoints": pods}}, routes, kubernetes={"api": server.url})


async def test_a_pod_that_becomes_ready_is_asked_within_two_seconds_and_one_that_leaves_is_asked_no_more() -> None:
    """A stream in progress is finished by the pod that leaves."""
    async with two_hosts() as (leaves, comes, port), api_server() as server:
        put_slice(server, "one", endpoint("127.0.0.1", "uid-leaves"), port=port)
        async with gateway_over(server) as gateway, calling(gateway.url) as caller:
            assert gateway.monitor.loads().keys() == {f"only/127.0.0.1:{port}/uid-leav"}
            assert (await caller.ask(STREAM))[0] == 200
            changed = monotonic()
            going = endpoint("127.0.0.1", "uid-leaves", ready=False, serving=True, terminating=True)
            put_slice(server, "one", going, endpoint("127.0.0.2", "uid-comes"), port=port)
            await eventually(lambda: gateway.monitor.loads().keys() == {f"only/127.0.0.2:{port}/uid-come"})
            for _ in range(4):
                assert await stream_status(gateway) == 200
            assert monotonic() - changed < 2.0
            assert len(comes.requests) >= 4
            assert (await finished(leaves, caller)).endswith(DONE)
            assert sum(each.method == "POST" for each in leaves.requests) == 1


async def test_an_endpoint_that_makes_no_url_stops_neither_the_start_nor_later_changes() -> None:
    """Whoever may write a slice of one service takes no endpoint from anybody else."""
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = int(pod.url.rpartition(":")[2])
        put_slice(server, "bad", endpoint("127.0.0.1", "x"), port=99_999)
        async with gateway_over(server) as gateway:
            put_slice(server, "none", endpoint("127.0.0.1", "y"), port=0)
            put_slice(server, "good", endpoint("127.0.0.1", "a"), port=port)
            await eventually(lambda: gateway.monitor.loads())
            assert gateway.monitor.loads().keys() == {f"only/127.0.0.1:{port}/a"}
            assert await stream_status(gateway) == 200


async def test_a_service_without_pods_is_refused_until_one_is_ready() -> None:
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = pod.url.rpartition(":")[2]
        async with gateway_over(server) as gateway:
            assert await stream_status(gateway) == 503
            put_slice(server, "one", endpoint("127.0.0.1", "a"), port=int(port))
            await eventually(lambda: gateway.monitor.loads())
            assert await stream_status(gateway) == 200


async def test_an_api_server_that_goes_away_takes_no_endpoint() -> None:
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = pod.url.rpartition(":")[2]
        put_slice(server, "one", endpoint("127.0.0.1", "a"), port=int(port))
        async with gateway_over(server) as gateway:
            server.status = 503
            server.cut()
            for _ in range(4):
                assert await stream_status(gateway) == 200


async def test_a_pod_that_is_gone_leaves_no_metric() -> None:
    """Every pod is another endpoint: series of all that ever were would grow for ever."""
    async with api_server() as server:
        port = "9"
        put_slice(server, "one", endpoint("127.0.0.1", "first"), port=int(port))
        async with gateway_over(server) as gateway:
            ejections = gateway.monitor.ejections
            for uid in ("first", "second", "third"):
                put_slice(server, "one", endpoint("127.0.0.1", uid), port=int(port))
                id = f"only/127.0.0.1:{port}/{uid}"
                await eventually(lambda id=id: id in gateway.monitor.loads())
                while not [labels for labels in ejections.of if labels[1] == id]:
                    await stream_status(gateway)
                    await asyncio.sleep(0.1)
            assert {labels[1] for labels in ejections.of} == {id}


async def test_found_endpoints_that_could_not_be_applied_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another event of the API server."""
    async with Upstream([STREAMED]) as pod, api_server() as server:
        port = pod.url.rpartition(":")[2]
        async with gateway_over(server) as gateway:
            failures, build = [OSError("no memory"), OSError("no memory")], gateway.core._build_runtime

            def built(wanted: Config) -> Runtime:
                if failures:
                    raise failures.pop()
                return build(wanted)

            monkeypatch.setattr(gateway.core, "_build_runtime", built)
            put_slice(server, "one", endpoint("127.0.0.1", "a"), port=int(port))
            await eventually(lambda: gateway.monitor.loads(), within=60)
            assert not failures
            assert await stream_status(gateway) == 200
