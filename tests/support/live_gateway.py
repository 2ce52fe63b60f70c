"""Runs `firsttoken serve` over real sockets, with traffic that produces every series of the dashboards.

| route  | traffic |
|--------|---------|
| chat   | prompts that share prefixes, short and long; some callers disconnect, some do not stream |
| code   | a caller's budget that cannot be met: shed; a total budget |
| raced  | engines that are sometimes silent: hedges that win, lose and fail |
| hosted | an API that sometimes refuses, and is tried again after its retry-after |
| flaky  | an engine that fails half of the time, and a closed port: fallbacks, a state other than up |
| deep   | a server that reasons before it answers |
| gone   | no endpoint at all: unavailable |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from tests.support.builders import ANSWER
from tests.support.gateways import document, pool
from tests.support.served import Served, serving
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Upstream, chunk

CLOSED_PORT = "http://127.0.0.1:1"  # a closed port
KEY, SMALL_KEY = "a-key-for-all", "a-key-with-a-small-quota"
PRICE = {"input": 0.6, "output": 0.8}
ROUTES: dict[str, Any] = {
    "chat": {
        "tiers": ["large", "small"],
        "ttft": {"budget": "800ms", "target": 0.95},
        "tpot": {"budget": "60ms"},
        "gap": {"budget": "1s"},
    },
    "code": {"workload": "autocomplete", "tiers": ["small", "large"], "ttft": {"budget": "250ms"}},
    "raced": {"tiers": ["raced"], "ttft": {"budget": "700ms"}, "hedge": {"max_extra": "100%"}},
    "hosted": {"tiers": ["api"], "ttft": {"budget": "3s"}, "on_miss": "queue"},
    "flaky": {"tiers": ["flaky", "small"], "ttft": {"budget": "2s"}},
    "deep": {"tiers": ["deep"], "ttft": {"budget": "1s", "of": "answer"}},
    "gone": {"tiers": ["gone"], "ttft": {"budget": "2s"}},
}
WORDS = "latency budget route token prefix engine queue prompt stream cache model answer tier window".split()


@asynccontextmanager
async def live_gateway(folder: Path) -> AsyncIterator[Served]:
    """A gateway process with callers, until the block ends."""
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(engines(1, "70b-4xh100"))
        small = await stack.enter_async_context(engines(2))
        raced = await stack.enter_async_context(engines(2))
        flaky = await stack.enter_async_context(engines(1))
        api = await stack.enter_async_context(engines(1, "api"))
        thought = b'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}\n\n'
        thoughtful = [STREAM_HEAD + chunk(thought), Pause(0.05), chunk(ANSWER) + LAST_CHUNK]
        deep = await stack.enter_async_context(Upstream(thoughtful))
        for engine in raced:
            engine.faults.stall_share, engine.faults.stall_seconds = 0.3, 5.0
        flaky[0].faults.status, flaky[0].faults.status_share = 500, 0.5
        api[0].faults.status, api[0].faults.status_share, api[0].faults.retry_after = 429, 0.6, 0.3
        pools = {
            "large": engine_pool(*large, price=PRICE),
            "small": engine_pool(*small, price=PRICE),
            "raced": engine_pool(*raced),
            "api": pool(api[0].url, price=PRICE),
            "flaky": {**engine_pool(*flaky), "endpoints": [flaky[0].url, CLOSED_PORT]},
            "deep": pool(deep.url),
            "gone": pool(CLOSED_PORT),
        }
        config = folder / "firsttoken.yaml"
        config.write_text(json.dumps(document(pools, ROUTES, **_options(folder))), "utf-8")  # JSON is YAML
        gateway = await stack.enter_async_context(serving(config))
        while not gateway.url:  # warnings about its configuration come first
            gateway = Served(gateway.process, await gateway.line())
            assert gateway.first_line, "the gateway has ended"
        callers = [asyncio.create_task(call) for call in _callers(gateway, await _session(stack))]
        try:
            yield gateway
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)


def _options(folder: Path) -> dict[str, Any]:
    """Configuration of further metrics: keys, an unavailable Redis and collector, an access log."""
    return {
        "keys": [
            {"name": "all", "sha256": sha256(KEY.encode()).hexdigest()},
            {"name": "few", "sha256": sha256(SMALL_KEY.encode()).hexdigest(), "requests_per_minute": 2},
        ],
        "state": {"redis": "redis://127.0.0.1:1/0"},
        "telemetry": {"otlp": CLOSED_PORT, "access_log": str(folder / "access.log")},
        "defaults": {"scrape": "100ms"},
    }


async def _session(stack: AsyncExitStack) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=30)
    return await stack.enter_async_context(
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    )


def _callers(gateway: Served, session: aiohttp.ClientSession) -> list[Any]:
    url = f"{gateway.url}/v1/chat/completions"

    async def ask(
        route: str, words: int, *, key: str = KEY, patience: float = 30.0, prefix: str = "", **more: Any
    ) -> None:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        content = f"{prefix} " + " ".join(Random(prefix).choices(WORDS, k=words))
        body = {"model": route, "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 6}
        try:
            async with asyncio.timeout(patience), session.post(url, json={**body, **more}, headers=headers) as reply:
                await reply.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def repeat(pause: float, route: str, words: int, **more: Any) -> None:
        """Repeats a kind of request; every other prompt equals the previous."""
        for number in count():
            await ask(route, words, prefix=f"{route} {words} {number // 2}", **more)
            await asyncio.sleep(pause)

    return [
        repeat(0.05, "chat", 300),
        repeat(0.1, "chat", 300, max_tokens=40),
        repeat(0.3, "chat", 5000),
        repeat(0.3, "chat", 50, stream=False),
        repeat(0.3, "chat", 2000, patience=0.02),
        repeat(0.2, "chat", 20, key=SMALL_KEY),
        repeat(0.2, "chat", 20, max_tokens=-1),
        repeat(0.2, "code", 100, stream=False),
        repeat(0.2, "code", 100),
        repeat(0.2, "code", 3000, headers={"x-slo-ttft-ms": "1"}),
        *(repeat(0.05, "raced", 100 + i) for i in range(3)),
        repeat(0.7, "hosted", 30),  # rarely: at twenty a minute the limit of the API would be learned and respected
        repeat(0.1, "flaky", 100),
        repeat(0.3, "deep", 20),
        repeat(0.5, "gone", 20),
    ]
