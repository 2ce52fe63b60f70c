"""The demo's engines, in a process of their own: prints the addresses as one JSON line, then serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from backends.simulated.profiles import profile_named
from backends.simulated.simulated_server import SimulatedServer
from gateway.cli.demo.scene import CAST
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder


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
        runner.run(play())
