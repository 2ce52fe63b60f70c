"""TTFT of a restarted engine, warmed up and cold: `cold_start.py [USERS]` prints p90 TTFT.

Three simulated engines behind a gateway, all over loopback sockets, and users in conversations under one of eight long
system prompts. An engine dies and restarts two seconds later. Printed is the p90 TTFT of its first 50 requests, beside
the p90 of all engines before. Without warm-up the gateway's own routing avoids the slow engine; round robin, which
forces its share, is measured with warm-up too. Takes a minute.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from random import Random
from statistics import quantiles
from time import monotonic
from typing import Any

import aiohttp

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import Record
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer

PROFILE = "8b-a100"
ENGINES = 3
FIRST = 50  # requests
BEGIN, STEADY, DOWN, LONGEST = 8.0, 12.0, 2.0, 30.0  # s
PROMPTS, WORDS = 8, 3000  # system prompts, and their length
TURNS, TURN_WORDS, ANSWER, THINK = 4, 80, 30, 3.0  # of a conversation; words, tokens and s of a turn, on average
ROUTES = {"routed": "predicted", "shared": "round_robin"}  # routes and their scorers

SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")


class Users:
    """All users, until cancelled."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int = 0) -> None:
        self.url = f"{url}/v1/chat/completions"
        self.session = session
        self.random = Random(seed)
        self.route = "routed"
        self.systems = [self.text(WORDS) for _ in range(PROMPTS)]
        self.popularity = [1 / (rank + 1) for rank in range(PROMPTS)]

    def text(self, words: int) -> str:
        return " ".join(f"{self.random.choice(SYLLABLES)}{self.random.choice(SYLLABLES)}" for _ in range(words))

    async def talk_forever(self) -> None:
        await asyncio.sleep(self.random.uniform(0, THINK))
        while True:
            (system,) = self.random.choices(self.systems, self.popularity)
            messages = [{"role": "system", "content": system}]
            for _ in range(1 + int(self.random.expovariate(1 / (TURNS - 1)))):
                messages.append({"role": "user", "content": self.text(TURN_WORDS)})
                messages.append({"role": "assistant", "content": await self.ask(messages)})
                await asyncio.sleep(self.random.expovariate(1 / THINK))

    async def ask(self, messages: list[dict[str, str]]) -> str:
        body = {"model": self.route, "messages": messages, "max_tokens": ANSWER, "stream": True}
        async with self.session.post(self.url, json=body) as reply:
            await reply.read()
        return self.text(ANSWER)


def p90(records: Iterable[Record]) -> float:
    """Milliseconds to the first token."""
    return quantiles([record.ttft * 1e3 for record in records if record.ttft is not None], n=10)[-1]


def of(records: Iterable[Record], endpoint: str, since: float) -> list[Record]:
    return [r for r in records if r.arrival >= since and r.ttft is not None and r.attempts[-1].endpoint == endpoint]


async def restart(server: SimulatedServer, records: list[Record]) -> list[Record]:
    """The engine's first requests, of all finished ones."""
    endpoint = f"engines/{server.url.removeprefix('http://')}"
    await server.kill()
    await asyncio.sleep(DOWN)
    await server.start()
    back = monotonic()
    async with asyncio.timeout(LONGEST):
        while len(of(records, endpoint, back)) < FIRST:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return of(records, endpoint, back)[:FIRST]


async def measure(users: int) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            SimulatedServer(PROFILES[PROFILE], model="served", encode=encoder("o200k_base").encode, seed=seed)
            for seed in range(ENGINES)
        ]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        gateway = Gateway(Config.model_validate(gateway_config([server.url for server in servers])))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        everybody = Users(gateway.url, session)
        tasks = [asyncio.create_task(everybody.talk_forever()) for _ in range(users)]
        try:
            await compare(gateway, servers, everybody)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def compare(gateway: Gateway, servers: list[SimulatedServer], users: Users) -> None:
    records = list[Record]()
    gateway.recorder.sinks.append(records.append)
    await asyncio.sleep(BEGIN)
    begun = monotonic()
    await asyncio.sleep(STEADY)
    before = [record for record in records if record.arrival >= begun]
    steady = p90(before)
    print(f"steady state, {len(before)} requests: p90 TTFT {steady:.0f} ms", flush=True)
    for number, (route, warmed_up) in enumerate((("routed", True), ("shared", True), ("shared", False))):
        users.route = route
        if not warmed_up:
            await gateway.cache_warming.close()
        found = p90(await restart(servers[number], records))
        kind = f"{'warmed up' if warmed_up else 'cold'}, {ROUTES[route]}"
        print(
            f"first {FIRST} requests of a restarted engine, {kind}: {found:.0f} ms, {found / steady:.2f}x", flush=True
        )


def gateway_config(urls: list[str]) -> dict[str, Any]:
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": {"engines": {"backend": "simulated", "model": "served", "endpoints": urls}},
        "routes": {name: {"tiers": ["engines"], "scorer": scorer} for name, scorer in ROUTES.items()},
        "telemetry": {"access_log": "off"},
    }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 120))
