"""The caller's side of the wire: what a relay needs of a connection, beside what aiohttp does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from gateway.frontend import HIGH_WATER, SEND_BUFFER, ClientConnection, FrontServer, Written, reply, respond
from gateway.refusal import Refusal, bad_request
from tests.gateway.builders import Caller, calling, post
from tests.kit.simulated import eventually

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def connection_of(http: web.BaseRequest) -> ClientConnection:
    assert isinstance(http.protocol, ClientConnection)
    return http.protocol


@asynccontextmanager
async def serving(handler: Callable[[web.BaseRequest], Awaitable[Any]]) -> AsyncIterator[Caller]:
    """A connection to a server of one handler."""
    runner = web.ServerRunner(FrontServer(handler), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with calling(f"http://127.0.0.1:{runner.addresses[0][1]}") as caller:
        yield caller
    await runner.cleanup()


class Clock:
    """Answers requests, and remembers when each had arrived, and when it was begun."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes = takes
        self.seen: list[tuple[float, float]] = []

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = connection_of(http)
        self.seen.append((connection.begin(), monotonic()))
        await asyncio.sleep(self.takes)
        await http.read()
        connection.end()
        return respond(200, b"{}")


# --------------------------------------------------------------------------- arrival


async def test_a_request_arrives_with_its_first_byte() -> None:
    """What its sender and the network take for the rest of it counts against its budget."""
    clock = Clock()
    async with serving(clock) as caller:
        caller.writer.write(GET[:1])
        await asyncio.sleep(0.1)
        await caller.whole(GET[1:])
    ((arrived, begun),) = clock.seen
    assert begun - arrived >= 0.09


async def test_the_next_request_on_a_connection_arrives_with_its_own_first_byte() -> None:
    """Neither the pause before it nor the body of the one before is charged to it."""
    clock = Clock()
    async with serving(clock) as caller:
        for _ in range(2):
            caller.writer.write(post(b"x" * 10)[:-5])
            await asyncio.sleep(0.02)
            await caller.whole(b"x" * 5)
            await asyncio.sleep(0.2)
    assert len(clock.seen) == 2
    assert all(begun - arrived < 0.15 for arrived, begun in clock.seen)


async def test_a_pipelined_request_arrives_when_its_turn_comes() -> None:
    """It had to wait for nothing of ours but the answer before it, which the caller asked for first."""
    clock = Clock(takes=0.1)
    async with serving(clock) as caller:
        caller.writer.write(GET * 2)
        for _ in range(2):
            _, headers = await caller.head()
            await caller.reader.readexactly(int(headers["content-length"]))
    (_, first), (arrived, begun) = clock.seen
    assert arrived - first >= 0.09
    assert begun - arrived < 0.05


# --------------------------------------------------------------------------- back-pressure


async def test_a_reader_is_told_when_its_socket_fills_and_drains() -> None:
    """And what is held for it by then is bounded, here and in the kernel."""
    heard: list[str] = []

    class Reader:
        def client_full(self) -> None:
            heard.append("full")

        def client_drained(self) -> None:
            heard.append("drained")

    async def handler(http: web.BaseRequest) -> Written:
        connection = connection_of(http)
        assert connection.transport is not None
        connection.reader = Reader()
        written = 0
        while not connection.full:
            connection.transport.write(b"x" * 10_000)
            written += 10_000
        kernel = connection.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_SNDBUF)
        assert connection.transport.get_write_buffer_size() <= HIGH_WATER + 10_000
        assert kernel <= 2 * SEND_BUFFER
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await eventually(lambda: not connection.full)
        heard.append(str(written))
        return Written(False)

    async with serving(handler) as caller:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(GET)
        await eventually(lambda: len(heard) == 3)
        assert len(await caller.rest()) == int(heard[2])
    assert heard[:2] == ["full", "drained"]


async def test_what_a_handler_wrote_itself_is_the_whole_answer() -> None:
    """aiohttp adds nothing to it, and keeps the connection exactly as long as the handler says."""

    async def handler(http: web.BaseRequest) -> Written:
        assert http.transport is not None
        http.transport.write(OK)
        return Written(len(answers) < 3)

    answers: list[bytes] = []
    async with serving(handler) as caller:
        for _ in range(3):
            answers.append(b"")
            caller.writer.write(GET)
            answers[-1] = await caller.reader.readexactly(len(OK))
        assert await caller.rest() == b""
    assert answers == [OK] * 3


# --------------------------------------------------------------------------- ends


async def test_a_caller_that_leaves_cancels_its_handler() -> None:
    """At once, whatever it waits for: that is how an engine hears of it."""
    ends: list[str] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        ends.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        raise AssertionError

    async with serving(handler) as caller:
        caller.writer.write(GET)
        await eventually(lambda: ends)
        caller.writer.transport.abort()
        await eventually(lambda: len(ends) == 2)
    assert ends == ["begun", "cancelled"]


async def test_a_bug_of_ours_is_a_500_that_says_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Without its text, which may hold anything; that is for the log."""

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        raise KeyError("CANARY")

    with caplog.at_level(logging.ERROR, "firsttoken"):
        async with serving(handler) as caller:
            status, headers, body = await caller.whole(GET)
    assert (status, headers["connection"], headers["content-type"]) == (500, "close", "application/json")
    assert json.loads(body)["error"]["message"] == "The gateway failed; the fault is ours."
    assert "CANARY" in caplog.text


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", b"GET / HTTP/1.1\r\nx: \0\r\n\r\n"]
)
async def test_what_is_not_http_is_refused_in_our_envelope(raw: bytes) -> None:
    """400 on one line, and nothing of it reaches a handler."""

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    async with serving(handler) as caller:
        status, _, body = await caller.whole(raw)
        assert await caller.rest() == b""
    message = json.loads(body)["error"]["message"]
    assert status == 400
    assert message.startswith("The request is not valid HTTP: ")
    assert message.isprintable()


# --------------------------------------------------------------------------- responses


def test_an_answer_of_ours_is_json_and_names_no_library() -> None:
    """aiohttp's own server header tells its version."""
    response = respond(200, b"{}", {"x-one": "1"})
    assert (response.status, response.body, response.content_type) == (200, b"{}", "application/json")
    assert (response.headers["server"], response.headers["x-one"]) == ("firsttoken", "1")
    assert response.keep_alive is None


def test_a_refusal_closes_the_connection_only_where_it_says_so() -> None:
    """A mistake in a body costs no handshake; bytes that were not read do."""
    refusal = Refusal(413, "Too large.", headers={"x-one": "1"}, close=True)
    assert (reply(refusal).status, reply(refusal).headers["x-one"], reply(refusal).keep_alive) == (413, "1", False)
    assert reply(bad_request("No.")).keep_alive is None
    assert reply(bad_request("No.")).body == bad_request("No.").body()
