"""A small gateway with simulated engines and callers, in one event loop, on which an incident is played.

Engines of 8b-l4 compute 4 tokens of prompt a millisecond, and have 50,000 tokens of KV cache. Callers are two keys.
Nothing here knows the cause of a slow answer: the gateway alone finds it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Any

import aiohttp

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import Record
from gateway.tokenize.tokenizers import encoder
from lab.demo.scene import WORDS
from lab.servers.simulated_server import SimulatedServer

MODEL = "llama-3.1-8b"
SYSTEM_WORDS, QUESTION_WORDS = 700, 150
OURS, THEIRS = "team-a", "team-b"  # callers
WARM_UP = 12  # conversations before the incident
ANSWER = 8  # tokens
PAUSE = 0.3  # s, mean time between two calm requests
RECORDED = 50  # waits for a Record, of 10 ms


@dataclass(frozen=True, slots=True)
class IncidentFleet:
    """Engines and route of an incident. `route`: beside tiers and TTFT budget."""

    engines: int = 2
    profile: str = "8b-l4"
    ttft: str = "1s"
    route: dict[str, Any] = field(default_factory=dict)
    pool: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class IncidentStage:
    """`stall` blocks the event loop for so many seconds. `victims`: ids of the requests that the incident slows."""

    gateway: Gateway
    servers: Sequence[SimulatedServer]
    session: aiohttp.ClientSession
    random: Random
    stall: Callable[[float], None]
    victims: list[str] = field(default_factory=list)
    system: str = ""

    def words(self, count: int) -> str:
        return " ".join(self.random.choices(WORDS, k=count))

    def question(self, words: int = QUESTION_WORDS) -> list[dict[str, str]]:
        """A new conversation with the route's own system prompt."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.words(words)}]

    async def ask(
        self,
        messages: list[dict[str, str]],
        *,
        key: str = OURS,
        victim: bool = False,
        session: str = "",
        tokens: int = ANSWER,
    ) -> str:
        """The request id; the answer is read to its end."""
        headers = {"authorization": f"Bearer {key}"} | ({"x-session-id": session} if session else {})
        body = {"model": "chat", "messages": messages, "stream": True, "max_tokens": tokens, "min_tokens": tokens}
        async with self.session.post("/v1/chat/completions", json=body, headers=headers) as reply:
            request_id = reply.headers["x-request-id"]
            await reply.read()
        if victim:
            self.victims.append(request_id)
        return request_id

    async def calm(self, conversations: int = WARM_UP) -> None:
        """Conversations of two turns, one after the other."""
        for _ in range(conversations):
            messages = self.question()
            await self.ask(messages)
            await self.pause()
            messages += [{"role": "assistant", "content": self.words(ANSWER)}]
            await self.ask([*messages, {"role": "user", "content": self.words(QUESTION_WORDS // 3)}])
            await self.pause()

    async def pause(self, mean: float = PAUSE) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean))

    async def record(self, request_id: str) -> Record | None:
        """The Record of a request, which comes a moment after its answer."""
        for _ in range(RECORDED):
            found = next((each for each in self.gateway.recorder.recent if each.request_id == request_id), None)
            if found is not None:
                return found
            await asyncio.sleep(0.01)
        return None


def incident_config(fleet: IncidentFleet, urls: Sequence[str], port: int, admin_port: int) -> dict[str, Any]:
    """The configuration as plain data."""
    kind = {"backend": "compatible", "api_key": "demo"} if fleet.profile == "api" else {"backend": "simulated"}
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"},
        "pools": {"engines": {**kind, "model": MODEL, "endpoints": list(urls), **fleet.pool}},
        "routes": {"chat": {"tiers": ["engines"], "ttft": {"budget": fleet.ttft}, "tpot": "off", **fleet.route}},
        "keys": [{"name": name, "sha256": sha256(name.encode()).hexdigest()} for name in (OURS, THEIRS)],
        "defaults": fleet.defaults,
        "telemetry": {"access_log": "off"},
    }


@asynccontextmanager
async def incident_stage(
    fleet: IncidentFleet, seed: int, stall: Callable[[float], None], port: int = 0, admin_port: int = 0
) -> AsyncIterator[IncidentStage]:
    async with AsyncExitStack() as stack:
        servers = []
        for number in range(fleet.engines):
            encode = encoder("o200k_base").encode
            server = SimulatedServer(PROFILES[fleet.profile], model=MODEL, encode=encode, seed=seed * 100 + number)
            await server.start()
            stack.push_async_callback(server.stop)
            servers.append(server)
        document = incident_config(fleet, [server.url for server in servers], port, admin_port)
        gateway = Gateway(Config.model_validate(json.loads(json.dumps(document))))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None)}
        session = aiohttp.ClientSession(gateway.url, connector=aiohttp.TCPConnector(limit=0), **options)
        stage = IncidentStage(gateway, servers, await stack.enter_async_context(session), Random(seed), stall)
        stage.system = stage.words(SYSTEM_WORDS)
        yield stage
