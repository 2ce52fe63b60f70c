"""The demo's scene: which engines, which policy, which callers. Numbers to play with live here.

As a program, one of the demo's child processes, which end with standard input, however the parent ended. `engines`:
prints the addresses of all simulated servers as one JSON line, then serves. `callers URL`: conversations on every
route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import aiohttp

from backends.server_profiles import PROFILES
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Simulated servers of a pool."""

    pool: str
    profile: str
    model: str
    count: int
    input: float  # USD per million tokens
    output: float


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """Traffic of a route. Conversations arrive at `rate` per second and take `turns` turns.

    Token counts are approximate: one word each. `pause`: seconds of a caller's think time between turns.
    Every `burst_every` seconds the rate is multiplied by `burst` for `burst_for` seconds.
    """

    route: str
    rate: float
    turns: int
    system_words: int
    new_words: int
    max_tokens: int
    pause: float
    opening_words: int = 0  # of the first turn, beside `new_words`: a document, a repository
    burst: float = 1.0
    burst_every: float = 30.0
    burst_for: float = 6.0


CAST = (
    EngineSpec("small", "8b-h100", "qwen3-8b", 2, 0.05, 0.2),
    EngineSpec("large", "70b-4xh100", "llama-3.3-70b", 1, 0.6, 0.8),
    EngineSpec("api", "api", "gpt-4.1-mini", 1, 0.4, 1.6),
)

CALLERS = (
    TrafficSpec("chat", 1.5, 4, 400, 120, 100, 2.0, burst=3.0),
    TrafficSpec("agent", 0.3, 5, 600, 500, 40, 0.5, opening_words=9000, burst=4.0, burst_every=20.0),
    TrafficSpec("code", 4.0, 1, 200, 900, 24, 0.0),
)

ROUTES: dict[str, Any] = {
    "chat": {
        "workload": "chat",
        "ttft": {"budget": "300ms", "target": 0.9},
        "tpot": {"budget": "60ms"},
        "gap": {"budget": "1s"},
        "tiers": ["large", "small", "api"],
        "on_miss": "best_effort",
    },
    "agent": {
        "workload": "agent",
        "ttft": {"budget": "2s", "target": 0.9},
        "tiers": ["large", "small"],
        "on_miss": "best_effort",
    },
    "code": {
        "workload": "autocomplete",
        "ttft": {"budget": "250ms", "target": 0.9},
        "tiers": ["small", "large"],
        "on_miss": "shed",
    },
}

WORDS = """
    latency budget route token prefix engine queue prompt stream cache model answer tier window batch step
    the a of to in and is for with that it on as by from at this have can will when more less first last
""".split()


def document(urls: Mapping[str, list[str]], port: int, admin_port: int) -> dict[str, Any]:
    """The demo's configuration as plain data. `urls`: by pool."""
    pools: dict[str, Any] = {}
    for cast in CAST:
        pools[cast.pool] = {
            "backend": "simulated",
            "model": cast.model,
            "endpoints": urls[cast.pool],
            "price": {"input": cast.input, "output": cast.output},
        }
    pools["api"] |= {"backend": "compatible", "api_key": "demo"}
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"},
        "pools": pools,
        "routes": ROUTES,
        "telemetry": {"access_log": "off"},
    }


async def engines() -> None:
    encode = encoder("o200k_base").encode
    servers: dict[str, list[SimulatedServer]] = {}
    for cast in CAST:
        for seed in range(cast.count):
            server = SimulatedServer(PROFILES[cast.profile], model=cast.model, encode=encode, seed=seed)
            await server.start()
            servers.setdefault(cast.pool, []).append(server)
    urls = {pool: [server.url for server in group] for pool, group in servers.items()}
    print(json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for group in servers.values():
        for server in group:
            await server.stop()


async def callers(base_url: str) -> None:
    options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
    async with aiohttp.ClientSession(base_url, **options) as session:
        traffic = asyncio.gather(*(_arrive(session, spec, random.Random(i)) for i, spec in enumerate(CALLERS)))
        await asyncio.to_thread(sys.stdin.read)
        traffic.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await traffic


async def _arrive(session: aiohttp.ClientSession, spec: TrafficSpec, rng: random.Random) -> None:
    """Poisson arrivals of conversations, with bursts."""
    system, start = _words(spec.system_words, rng), monotonic()
    async with asyncio.TaskGroup() as conversations:
        while True:
            in_burst = (monotonic() - start) % spec.burst_every > spec.burst_every - spec.burst_for
            await asyncio.sleep(rng.expovariate(spec.rate * (spec.burst if in_burst else 1.0)))
            conversations.create_task(_converse(session, spec, system, rng))


async def _converse(session: aiohttp.ClientSession, spec: TrafficSpec, system: str, rng: random.Random) -> None:
    """Ends after a refusal. The answer in the history is made up: as long as the real one may be."""
    messages = [{"role": "system", "content": system}]
    for turn in range(spec.turns):
        count = spec.new_words + (spec.opening_words if turn == 0 else 0)
        messages.append({"role": "user", "content": _words(count, rng)})
        body = {"model": spec.route, "messages": messages, "stream": True, "max_tokens": spec.max_tokens}
        try:
            async with session.post("/v1/chat/completions", json=body) as reply:
                if not await reply.text() or reply.status != 200:
                    return
        except aiohttp.ClientError:
            return
        messages.append({"role": "assistant", "content": _words(spec.max_tokens // 2, rng)})
        await asyncio.sleep(rng.expovariate(1.0) * spec.pause)


def _words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=count))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(engines() if sys.argv[1] == "engines" else callers(sys.argv[2]))
