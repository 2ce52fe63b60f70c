"""Callers' connections: time limits, body framing, and shutdown."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.app import Gateway
from gateway.downstream.limits import Timeouts
from tests.support.builders import CHAT, WHOLE, calling, conversing, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import reply

pytestmark = pytest.mark.virtual_time

BODY = json.dumps({"model": "chat", "max_tokens": 200, "stream": True, "messages": [{"role": "user", "content": "x"}]})
REQUEST = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}".encode()


def set_timeouts(gateway: Gateway, **timeouts: float) -> None:
    """Sets time limits for later connections."""
    assert gateway.data_port.server is not None
    gateway.data_port.server.bounds.timeouts = Timeouts(**timeouts)


def port(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def test_an_incomplete_head_closes_the_connection_after_its_timeout() -> None:
    """Slow senders must not hold connections for ever; idle connections between requests stay open."""
    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        set_timeouts(gateway, head=0.1)
        idle, _ = await asyncio.open_connection("127.0.0.1", port(gateway))
        slow, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        async with asyncio.timeout(5):
            assert await slow.read() == b""
        assert not idle.at_eof()


async def test_a_long_answer_does_not_trigger_the_head_timeout() -> None:
    """The head's timer stops when the head is complete."""
    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        set_timeouts(gateway, head=0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_draining_gateway_finishes_its_streams_and_closes_their_connections() -> None:
    """Running streams complete and their connections close; new connections are refused."""
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


# --------------------------------------------------------------------------- request bodies


def chunked(*parts: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        + framed
        + b"0\r\n\r\n"
    )


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_chunked_body_is_bounded_while_it_arrives(at_once: bool) -> None:
    """413 and a closed connection, for a body with its head or chunk by chunk."""
    body = json.dumps({**CHAT, "padding": "x" * 5000}).encode()
    raw = chunked(*(body[i : i + 500] for i in range(0, len(body), 500)))
    async with conversing([reply(WHOLE)], defaults={"max_body": "1KB"}) as (_, caller, upstream):
        if not at_once:
            caller.writer.write(raw[:200])
            await asyncio.sleep(0.05)
            raw = raw[200:]
        status, headers, answer = await caller.whole(raw)
        assert await caller.rest() == b""
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(answer)["error"]["message"] == "The body is larger than 1000 bytes."
    assert upstream.requests == []


async def test_a_chunked_body_is_reassembled() -> None:
    """Any chunk sizes; the forwarded body has a content-length."""
    body = json.dumps(CHAT).encode()
    async with conversing([reply(WHOLE)]) as (_, caller, upstream):
        status, _, _ = await caller.whole(chunked(*(body[i : i + 7] for i in range(0, len(body), 7))))
    assert (status, json.loads(upstream.requests[0].body)["messages"]) == (200, CHAT["messages"])


async def test_expect_100_continue_is_answered() -> None:
    """RFC 9110 section 10.1.1. A caller with an already sent body receives no 100."""
    body = json.dumps(CHAT).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-Continue\r\ncontent-length: %d\r\n\r\n"
    )
    async with conversing([reply(WHOLE)]) as (_, caller, _):
        assert (await caller.ask(head % len(body)))[0] == 100
        assert (await caller.whole(body))[0] == 200
        assert (await caller.whole(head % len(body) + body))[0] == 200


async def test_an_incomplete_body_is_408_after_its_timeout() -> None:
    """A slow sender holds a connection for a bounded time."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        set_timeouts(gateway, body=0.05)
        async with calling(gateway.url) as caller:
            status, headers, answer = await caller.whole(post(CHAT)[:-5])
            assert (status, headers["connection"]) == (408, "close")
            message = "The body stopped for 0.05 s, came slower than 8 KiB/s, or has an invalid chunk."
            assert json.loads(answer)["error"]["message"] == message


async def test_a_disconnect_within_the_body_leaves_no_record() -> None:
    """An incomplete request is neither a request nor an error."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        async with calling(gateway.url) as caller:
            caller.writer.write(post(CHAT)[:-5])
            await eventually(lambda: gateway.data_port.server and gateway.data_port.server.connections)
        await eventually(lambda: gateway.data_port.server and not gateway.data_port.server.connections)
        assert (gateway.recorder.live, len(gateway.recorder.recent)) == (0, 0)
