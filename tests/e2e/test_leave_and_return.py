"""A server whose entry leaves and comes back while requests run there: by a reload, by the DNS, by an EndpointSlice,
with another model, with another name of its pool. Caps and limits are of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.parts.discovery.part import DiscoveryPart
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, Caller, calling, get, post
from tests.support.gateways import document, pool, started
from tests.support.kubernetes_api import api_server, endpoint, put_slice
from tests.support.served import serving
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

CAP = 4
STREAM = post({**CHAT, "stream": True})
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
REFUSED: Script = [reply(b"{}", "429 Too Many Requests", "content-type: application/json", "retry-after: 60")]
RELOAD = b"POST /reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
Move = Callable[[], Awaitable[None]]


class Server(Upstream):
    """Plays `SLOW`, or what the test sets, and counts the requests that it has at a time."""

    def __init__(self, script: Script = SLOW) -> None:
        super().__init__([STREAMED])
        self.play = script
        self.running = self.most = 0

    def script(self, received: Received) -> Script:
        return self.play

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += bool(script)
        self.most = max(self.most, self.running)
        try:
            await super()._play(script, reader, writer)
        finally:
            self.running -= bool(script)


def with_server(server: dict[str, Any], other: Upstream, name: str = "api", **more: Any) -> dict[str, Any]:
    routes = {"chat": {"tiers": [name, "other"], "ttft": "off"}}
    pools = {name: {**pool(), "concurrent_requests": CAP, **server}, "other": pool(other.url)}
    return document(pools, routes, **more)


@asynccontextmanager
async def by_reload(server: Server, other: Upstream, **changed: Any) -> AsyncIterator[tuple[Gateway, Move, Move]]:
    """Away is a configuration without the server, or with `changed` settings of its pool."""
    there = with_server({"endpoints": [server.url]}, other)
    away = with_server(
        {"endpoints": [server.url], **changed} if changed else {"endpoints": ["http://127.0.0.1:9"]}, other
    )
    async with started(Gateway(Config.model_validate(there))) as gateway:
        yield (
            gateway,
            lambda: gateway.apply_config(Config.model_validate(away)),
            lambda: gateway.apply_config(Config.model_validate(there)),
        )


@asynccontextmanager
async def by_another_model(server: Server, other: Upstream) -> AsyncIterator[tuple[Gateway, Move, Move]]:
    async with by_reload(server, other, model="another") as moves:
        yield moves


@asynccontextmanager
async def by_another_pool(server: Server, other: Upstream) -> AsyncIterator[tuple[Gateway, Move, Move]]:
    there, renamed = (with_server({"endpoints": [server.url]}, other, name) for name in ("api", "renamed"))
    async with started(Gateway(Config.model_validate(there))) as gateway:
        yield (
            gateway,
            lambda: gateway.apply_config(Config.model_validate(renamed)),
            lambda: gateway.apply_config(Config.model_validate(there)),
        )


@asynccontextmanager
async def by_dns(server: Server, other: Upstream) -> AsyncIterator[tuple[Gateway, Move, Move]]:
    addresses = ["127.0.0.1"]

    async def resolve(name: str) -> list[str]:
        return addresses

    async def answer(address: str) -> None:
        addresses[:] = [address]
        await eventually(lambda: {one.split("/")[1].split(":")[0] for one in ids(gateway)} == {address})

    port = server.url.rpartition(":")[2]
    endpoints = [{"url": f"http://engines.localhost:{port}", "resolve": "10ms"}]
    gateway = Gateway(Config.model_validate(with_server({"endpoints": endpoints}, other)))
    gateway.part(DiscoveryPart).found.dns.resolve = resolve
    async with started(gateway):
        yield gateway, lambda: answer("127.0.0.9"), lambda: answer("127.0.0.1")


@asynccontextmanager
async def by_readiness(server: Server, other: Upstream) -> AsyncIterator[tuple[Gateway, Move, Move]]:
    port = int(server.url.rpartition(":")[2])
    async with api_server() as kubernetes:

        async def become(ready: bool) -> None:
            put_slice(kubernetes, "one", endpoint("127.0.0.1", "a", ready=ready), port=port)
            await eventually(lambda: len(ids(gateway)) == ready)

        put_slice(kubernetes, "one", endpoint("127.0.0.1", "a", ready=True), port=port)
        endpoints = [{"kubernetes": {"service": "default/vllm", "port": "http"}}]
        settings = with_server({"endpoints": endpoints}, other, kubernetes={"api": kubernetes.url})
        async with started(Gateway(Config.model_validate(settings))) as gateway:
            yield gateway, lambda: become(False), lambda: become(True)


WAYS = [by_reload, by_dns, by_readiness, by_another_model, by_another_pool]


def ids(gateway: Gateway) -> list[str]:
    return [name for name in gateway.monitor.loads() if not name.startswith("other/")]


async def asked(stack: AsyncExitStack, gateway: Gateway) -> Caller:
    """A caller whose answer has begun."""
    caller = await stack.enter_async_context(calling(gateway.url))
    assert (await caller.ask(STREAM))[0] == 200
    return caller


async def shown(gateway: Gateway) -> list[dict[str, Any]]:
    return [
        one
        for one in json.loads((await get(gateway.admin_url, "/fleet"))[2])
        if not one["endpoint"]["id"].startswith("other/")
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize("way", WAYS)
async def test_no_way_of_leaving_takes_a_server_above_its_cap(way: Any) -> None:
    """Four streams run; then the entry leaves and comes back, twice, and eight more callers come each time."""
    async with AsyncExitStack() as stack:
        server, other = await stack.enter_async_context(Server()), await stack.enter_async_context(Upstream([STREAMED]))
        gateway, leave, come = await stack.enter_async_context(way(server, other))
        callers = [await asked(stack, gateway) for _ in range(CAP)]
        for _ in range(2):
            await leave()
            await asked(stack, gateway)
            await come()
            for _ in range(8):
                await asked(stack, gateway)
            [there] = await shown(gateway)
            assert there["load"]["in_flight"] == CAP
        assert (server.most, len(server.requests)) == (CAP, CAP)
        for caller in callers:
            server.proceed()
            assert b"[DONE]" in b"".join(await caller.chunks())
        await eventually(lambda: all(load.in_flight == 0 for load in gateway.monitor.loads().values()))
        await asked(stack, gateway)
        assert len(server.requests) == CAP + 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("way", WAYS)
async def test_no_way_of_leaving_forgets_a_providers_limit(way: Any) -> None:
    """Nobody asks a provider again that has said in how many seconds to do so."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(REFUSED))
        other = await stack.enter_async_context(Upstream([STREAMED]))
        gateway, leave, come = await stack.enter_async_context(way(server, other))
        await asked(stack, gateway)
        before = len(server.requests)
        for _ in range(2):
            await leave()
            await come()
            for _ in range(3):
                await asked(stack, gateway)
        assert len(server.requests) == before == 1
        [there] = await shown(gateway)
        assert 50 < there["limited_for_s"] <= 60


async def test_workers_keep_a_cap_over_a_reload_that_takes_the_server_away_and_back(tmp_path: Path) -> None:
    """Neither worker publishes that nothing runs, and each knows of what runs by the other's hand."""
    async with Server() as server, Upstream([STREAMED]) as other, AsyncExitStack() as stack:
        file = tmp_path / "f.yaml"
        text = (
            "server: {{listen: 127.0.0.1:0, admin: 127.0.0.1:0}}\n"
            "pools:\n  api: {{backend: compatible, model: served, concurrent_requests: 4, endpoints: [{}]}}\n"
            "  other: {{backend: compatible, model: served, endpoints: [{}]}}\n"
            "routes: {{chat: {{ttft: 'off', tiers: [api, other]}}}}\ntelemetry: {{access_log: 'off'}}\n"
        )
        file.write_text(text.format(server.url, other.url))
        async with serving(file, "--workers", "2") as served:
            for _ in range(CAP):
                caller = await stack.enter_async_context(calling(served.url))
                assert (await caller.ask(STREAM))[0] == 200
                await asyncio.sleep(0.2)  # the other worker has heard of it
            for url in ("http://127.0.0.1:9", server.url):
                file.write_text(text.format(url, other.url))
                async with calling(served.admin) as admin:
                    assert (await admin.whole(RELOAD))[0] == 200
            for _ in range(12):
                caller = await stack.enter_async_context(calling(served.url))
                assert (await caller.ask(STREAM))[0] == 200
            assert server.most == CAP
