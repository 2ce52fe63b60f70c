"""The demo's child processes. Both end with standard input, however the parent ended.

`engines`: prints the addresses of all simulated servers as one JSON line, then serves. `callers URL`: conversations on
every route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from backends.simulated.profiles import profile_named
from backends.simulated.simulated_server import SimulatedServer
from gateway.cli.demo.scene import CALLERS, CAST, TrafficSpec
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder

WORDS = """
    latency budget route token prefix engine queue prompt stream cache model answer tier window batch step
    the a of to in and is for with that it on as by from at this have can will when more less first last
""".split()


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=count))


@dataclass
class LoadGenerator:
    """All callers of a route."""

    base_url: str
    callers: TrafficSpec
    session: aiohttp.ClientSession
    rng: random.Random
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.system = words(self.callers.system_words, self.rng)

    async def arrive_forever(self) -> None:
        """Poisson arrivals, with bursts."""
        loop, callers = asyncio.get_running_loop(), self.callers
        start = loop.time()
        while True:
            in_burst = (loop.time() - start) % callers.burst_every > callers.burst_every - callers.burst_for
            rate = callers.rate * (callers.burst if in_burst else 1.0)
            await asyncio.sleep(self.rng.expovariate(rate))
            task = asyncio.create_task(self.converse())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def converse(self) -> None:
        """A conversation; a refusal ends the conversation."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        for turn in range(self.callers.turns):
            count = self.callers.new_words + (self.callers.opening_words if turn == 0 else 0)
            messages.append({"role": "user", "content": words(count, self.rng)})
            answer = await self.ask(messages)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(self.rng.expovariate(1.0) * self.callers.pause)

    async def ask(self, messages: list[dict[str, Any]]) -> str | None:
        callers = self.callers
        body = {"model": callers.route, "messages": messages, "stream": True, "max_tokens": callers.max_tokens}
        try:
            async with self.session.post(f"{self.base_url}/chat/completions", json=body) as reply:
                text = await reply.text()
                return words(callers.max_tokens // 2, self.rng) if reply.status == 200 and text else None
        except aiohttp.ClientError:
            return None


async def crowd(base_url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        arriving = [
            asyncio.create_task(LoadGenerator(base_url, callers, session, random.Random(i)).arrive_forever())
            for i, callers in enumerate(CALLERS)
        ]
        await asyncio.to_thread(sys.stdin.read)
        for task in arriving:
            task.cancel()


async def play() -> None:
    """Serves until standard input ends, however the parent ended."""
    encode = encoder("o200k_base").encode
    servers: dict[str, list[SimulatedServer]] = {}
    for cast in CAST:
        for seed in range(cast.count):
            server = SimulatedServer(profile_named(cast.profile), model=cast.model, encode=encode, seed=seed)
            await server.start()
            servers.setdefault(cast.pool, []).append(server)
    urls = {pool: [server.url for server in group] for pool, group in servers.items()}
    print(json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for group in servers.values():
        for server in group:
            await server.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(play() if sys.argv[1] == "engines" else crowd(sys.argv[2]))
