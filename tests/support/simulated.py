"""Simulated engines for tests: real sockets, real time, a vLLM on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from backends.server_profiles import PROFILES
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer


@asynccontextmanager
async def engines(count: int = 1, profile: str = "8b-h100", **more: Any) -> AsyncIterator[list[SimulatedServer]]:
    """Start `count` servers of a profile; `model` defaults to the model of `engine_pool`."""
    async with AsyncExitStack() as stack:
        servers = []
        for seed in range(count):
            options = {"model": "served", "encode": encoder("o200k_base").encode, "seed": seed, **more}
            server = SimulatedServer(PROFILES[profile], **options)
            await server.start()
            stack.push_async_callback(server.stop)
            servers.append(server)
        yield servers


def engine_pool(*servers: SimulatedServer, **more: Any) -> dict[str, Any]:
    return {"backend": "simulated", "model": "served", "endpoints": [server.url for server in servers], **more}


async def eventually(condition: Any, within: float = 30.0) -> None:
    """Wait until `condition()` holds: for an event, not for a time. Looks less often the longer it takes: in virtual
    time each look of a long wait costs as much as a request."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 - the awaited state belongs to another object and has no notification
            await asyncio.sleep(max(0.002, (loop.time() - began) / 50))
