"""A simulated server and its callers, for tests over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from backends.server_profiles import PROFILES
from lab.servers.simulated_server import SimulatedServer
from tests.support.engine_builders import encode

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def serving(profile: str = "8b-h100", speed: float = 20.0, **changes: Any) -> AsyncIterator[SimulatedServer]:
    """A server, twenty times as fast as the simulated machine."""
    server = SimulatedServer(replace(PROFILES[profile], **changes), model="m", encode=encode, speed=speed)
    await server.start()
    yield server
    await server.stop()


async def post(server: SimulatedServer, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body, headers=headers) as reply,
    ):
        return reply.status, reply.headers, await reply.read()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, "max_tokens": 8, **more}


def events(raw: bytes) -> list[bytes]:
    return [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]


async def eventually(server: SimulatedServer, **state: int) -> None:
    """Wait until the engine shows `state`."""
    async with asyncio.timeout(60):
        while any(getattr(server.engine, name) != value for name, value in state.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
