"""Callers' connections: how long they may hesitate, and how they end."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway import frontend
from gateway.app import Gateway
from tests.kit.gateways import running
from tests.kit.simulated import engine_pool, engines, eventually

BODY = json.dumps({"model": "chat", "max_tokens": 200, "stream": True, "messages": [{"role": "user", "content": "x"}]})
REQUEST = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}".encode()


def port(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def test_a_head_that_does_not_arrive_whole_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow senders must not hold connections for ever; an idle one between requests is left alone."""
    monkeypatch.setattr(frontend, "HEADER_TIMEOUT", 0.1)
    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        idle, _ = await asyncio.open_connection("127.0.0.1", port(gateway))
        slow, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        async with asyncio.timeout(5):
            assert await slow.read() == b""
        assert not idle.at_eof()


async def test_a_long_answer_is_not_taken_for_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a head stops when the head is there."""
    monkeypatch.setattr(frontend, "HEADER_TIMEOUT", 0.05)
    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_draining_gateway_finishes_its_streams_and_ends_their_connections() -> None:
    """What runs is completed; the next answer on a kept connection says that it is the last; nobody new gets in."""
    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
        writer.write(REQUEST)
        await reader.readuntil(b"data: ")
        stopping = asyncio.create_task(gateway.stop(grace=10))
        await eventually(lambda: gateway.proxy.draining)
        await asyncio.sleep(0.1)
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection("127.0.0.1", port(gateway))
        rest = await reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await stopping
