"""Messages of a WebSocket are bounded as bodies are: in size, in time, and over all callers."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from tests.support.builders import Caller, calling, last
from tests.support.gateways import pool, running
from tests.support.responses_server import ResponsesServer
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

OFFER = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
LISTEN = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}


@asynccontextmanager
async def opened(**server: Any) -> AsyncIterator[tuple[Gateway, Caller]]:
    """A raw socket behind the handshake."""
    async with (
        ResponsesServer("s") as engine,
        running({"only": pool(engine.url, backend="openai")}, server={**LISTEN, **server}) as gateway,
        calling(gateway.url) as caller,
    ):
        assert (await caller.ask(OFFER))[0] == 101
        yield gateway, caller


def head(size: int) -> bytes:
    """Of a masked text frame."""
    return b"\x81\xff" + struct.pack(">Q", size) + b"\0\0\0\0"


async def test_a_large_message_that_stops_is_given_up() -> None:
    async with opened() as (gateway, caller):
        caller.writer.write(head(1_000_000) + b"x" * 200_000)
        await eventually(lambda: gateway.core.intake.body_bytes > 200_000)
        assert await asyncio.wait_for(gone(caller), 70)
        await eventually(lambda: gateway.core.intake.body_bytes == 0)


async def test_a_message_that_drips_is_given_up() -> None:
    """A byte a second is slower than a body may be."""
    async with opened() as (_, caller):
        caller.writer.write(head(1_000_000) + b"x" * 100_000)
        lost, began = asyncio.create_task(gone(caller)), asyncio.get_running_loop().time()
        while not lost.done():
            caller.writer.write(b"x")
            await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() - began < 90


async def test_messages_of_all_callers_together_are_bounded() -> None:
    async with opened(max_body_bytes="1MB") as (gateway, caller):
        caller.writer.write(head(3_000_000) + os.urandom(1) * 2_000_000)
        assert await gone(caller)
        await eventually(lambda: gateway.core.intake.body_bytes == 0)


async def gone(caller: Caller) -> bool:
    """Whether the connection ends, after pings at most."""
    try:
        while data := await caller.reader.read(1000):
            assert data[:1] == b"\x89"
    except ConnectionError:
        pass
    return True


async def test_a_caller_that_does_not_read_pauses_its_engine_and_is_disconnected() -> None:
    """Events wait in a buffer of bounded size, as over HTTP."""
    delta = b'data: {"type":"response.output_text.delta","delta":"%b"}\n\n' % (b"x" * 10_000)
    script = [STREAM_HEAD + chunk(delta), chunk(delta) * 3000 + LAST_CHUNK]
    async with (
        Upstream(script) as engine,
        running({"only": pool(engine.url, backend="openai")}) as gateway,
        calling(gateway.url) as caller,
    ):
        assert (await caller.ask(OFFER))[0] == 101
        asked = b'{"type":"response.create","model":"chat","input":"hi"}'
        caller.writer.write(b"\x81" + bytes((0x80 | len(asked),)) + b"\0\0\0\0" + asked)
        await eventually(lambda: gateway.recorder.live == 1)
        await asyncio.sleep(80)
        assert "read nothing" in (last(gateway).error or "")
