"""The least proxy in Python relays whole answers, so that its cost is that of the same work as the gateway's."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import engine, floor
from benchmarks.client import connect, request

HOST = "127.0.0.1"


@pytest.mark.parametrize("server", floor.SERVERS)
async def test_the_floor_relays_whole_answers_and_streams_over_a_kept_connection(server: str) -> None:
    loop = asyncio.get_running_loop()
    engines = [await loop.create_server(engine.Connection, HOST, 0) for _ in range(2)]
    urls = [f"http://{HOST}:{each.sockets[0].getsockname()[1]}" for each in engines]
    async with await loop.create_server(floor.SERVERS[server](floor.Engines(urls)), HOST, 0) as proxy:
        caller = await connect(proxy.sockets[0].getsockname()[1])
        for shape in ("whole", "stream-3-0", "whole", "stream-2-0"):
            await caller.ask(request(shape, ["word " * 20_000]))
        caller.disconnect()
    for each in engines:
        each.close()
