"""A gateway to which everything happens that a dashboard shows: `firsttoken serve`, over real sockets, in real time.

| route  | what happens to it |
|--------|--------------------|
| chat   | prompts that share prefixes, short and long; some callers leave, some do not stream |
| code   | a caller's budget that nothing can meet: shed; a total budget |
| raced  | engines that fall silent now and then: hedges that win, lose and fail |
| hosted | an API that refuses now and then, and is asked again when it said |
| flaky  | an engine that fails half of the time, and one that nobody listens for: fallbacks, a state that is not up |
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

from tests.support.gateways import document, pool
from tests.support.served import Served, serving
from tests.support.simulated import engine_pool, engines

NOBODY = "http://127.0.0.1:1"  # no port that anything listens on
KEY, SMALL_KEY = "a-key-for-all", "a-key-with-a-small-quota"
PRICE = {"input": 0.6, "output": 0.8}
ROUTES: dict[str, Any] = {
    "chat": {"tiers": ["large", "small"], "ttft": {"budget": "800ms", "target": 0.95}, "tpot": {"budget": "60ms"}},
    "code": {"workload": "autocomplete", "tiers": ["small", "large"], "ttft": {"budget": "250ms"}},
    "raced": {"tiers": ["raced"], "ttft": {"budget": "700ms"}, "hedge": {"max_extra": "100%"}},
    "hosted": {"tiers": ["api"], "ttft": {"budget": "3s"}, "on_miss": "queue"},
    "flaky": {"tiers": ["flaky", "small"], "ttft": {"budget": "2s"}},
    "gone": {"tiers": ["gone"], "ttft": {"budget": "2s"}},
}
WORDS = "latency budget route token prefix engine queue prompt stream cache model answer tier window".split()


@asynccontextmanager
async def played(folder: Path) -> AsyncIterator[Served]:
    """The gateway, in a process of its own, with its callers, until the block ends."""
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(engines(1, "70b-4xh100"))
        small = await stack.enter_async_context(engines(2))
        raced = await stack.enter_async_context(engines(2))
        flaky = await stack.enter_async_context(engines(1))
        api = await stack.enter_async_context(engines(1, "api"))
        for engine in raced:
            engine.faults.stall_share, engine.faults.stall_seconds = 0.3, 5.0
        flaky[0].faults.status, flaky[0].faults.status_share = 500, 0.5
        api[0].faults.status, api[0].faults.status_share, api[0].faults.retry_after = 429, 0.6, 0.3
        pools = {
            "large": engine_pool(*large, price=PRICE),
            "small": engine_pool(*small, price=PRICE),
            "raced": engine_pool(*raced),
            "api": pool(api[0].url, price=PRICE),
            "flaky": {**engine_pool(*flaky), "endpoints": [flaky[0].url, NOBODY]},
            "gone": pool(NOBODY),
        }
        config = folder / "firsttoken.yaml"
        config.write_text(json.dumps(document(pools, ROUTES, **_more(folder))), "utf-8")  # JSON is YAML
        gateway = await stack.enter_async_context(serving(config))
        while not gateway.url:  # what it has to say of its configuration comes before
            gateway = Served(gateway.process, await gateway.line())
            assert gateway.said, "the gateway has ended"
        callers = [asyncio.create_task(call) for call in _callers(gateway, await _session(stack))]
        try:
            yield gateway
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)


def _more(folder: Path) -> dict[str, Any]:
    """What the metrics of other parts need: keys, a Redis and a collector that are away, a log."""
    return {
        "keys": [
            {"name": "all", "sha256": sha256(KEY.encode()).hexdigest()},
            {"name": "few", "sha256": sha256(SMALL_KEY.encode()).hexdigest(), "requests_per_minute": 2},
        ],
        "state": {"redis": "redis://127.0.0.1:1/0"},
        "telemetry": {"otlp": NOBODY, "access_log": str(folder / "access.log")},
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
        route: str, words: int, *, key: str = KEY, patience: float = 30.0, say: str = "", **more: Any
    ) -> None:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        content = f"{say} " + " ".join(Random(say).choices(WORDS, k=words))
        body = {"model": route, "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 6}
        try:
            async with asyncio.timeout(patience), session.post(url, json={**body, **more}, headers=headers) as reply:
                await reply.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def again(pause: float, route: str, words: int, **more: Any) -> None:
        """The same kind of request, over and over; every other one begins as one before it did."""
        for number in count():
            await ask(route, words, say=f"{route} {words} {number // 2}", **more)
            await asyncio.sleep(pause)

    return [
        again(0.05, "chat", 300),
        again(0.1, "chat", 300, max_tokens=40),
        again(0.3, "chat", 5000),
        again(0.3, "chat", 50, stream=False),
        again(0.3, "chat", 2000, patience=0.02),
        again(0.2, "chat", 20, key=SMALL_KEY),
        again(0.2, "chat", 20, max_tokens=-1),
        again(0.2, "code", 100, stream=False),
        again(0.2, "code", 100),
        again(0.2, "code", 3000, headers={"x-slo-ttft-ms": "1"}),
        *(again(0.05, "raced", 100 + i) for i in range(3)),
        again(0.7, "hosted", 30),  # seldom: an API that takes twenty a minute has a limit that is learned, and kept to
        again(0.1, "flaky", 100),
        again(0.5, "gone", 20),
    ]
