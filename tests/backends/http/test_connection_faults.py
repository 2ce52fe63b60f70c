"""One connection and a misbehaving server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from backends.interface import FailureKind
from tests.support.scripted_connection import POST, ask, played
from tests.support.upstream import (
    CLOSE,
    GATE,
    HANG,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    Act,
    Listener,
    Script,
    chunk,
    chunked,
    reply,
    turn_until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

# --------------------------------------------------------------------------- broken connections


@pytest.mark.parametrize("act", [RESET, CLOSE])
async def test_a_connection_lost_at_any_byte_is_one_failure(act: Act) -> None:
    """RST or FIN after each offset of a chunked reply: exactly one failure, at once."""
    raw = chunked(b"hello", b"world")
    scripts: list[Script] = [[raw[:cut], act] for cut in range(len(raw))]
    async with played(*scripts) as (origin, _):
        for cut in range(len(raw)):
            listener = await ask(origin)
            failure = listener.done.result()
            assert failure is not None
            assert failure.kind is FailureKind.RESET
            assert listener.calls.count("failure") == 1
            assert b"helloworld".startswith(listener.body), cut
        assert (origin.idle, origin.stale_retries) == (0, 0)


@pytest.mark.parametrize("act", [RESET, CLOSE])
async def test_a_body_short_of_its_length_is_a_failure(act: Act) -> None:
    """Never a silent truncation."""
    async with played([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", act]) as (origin, _):
        failure = (await ask(origin)).done.result()
        assert failure is not None
        assert failure.message == "The backend closed the connection before its reply was complete."


async def test_a_reset_does_not_complete_a_reply_delimited_by_close() -> None:
    """Only FIN does."""
    async with played([b"HTTP/1.1 200 OK\r\n\r\nto the", RESET]) as (origin, _):
        failure = (await ask(origin)).done.result()
        assert failure is not None
        assert failure.kind is FailureKind.RESET


# --------------------------------------------------------------------------- cancel, pause, resume


async def test_cancel_closes_the_connection_and_silences_the_sink() -> None:
    """The server notices during generation; a second cancel has no effect."""
    async with played([STREAM_HEAD + chunk(b"a"), HANG]) as (origin, upstream):
        listener = Listener()
        exchange = await origin.open(POST, listener)
        await turn_until(lambda: listener.reads)
        exchange.cancel()
        exchange.cancel()
        await upstream.until(lambda up: up.hangups == 1)
        assert (listener.calls, origin.active) == (["head", "body"], 0)


async def test_cancel_before_any_reply_closes_the_connection() -> None:
    """A cancelled hedge must not continue its prefill."""
    async with played([HANG]) as (origin, upstream):
        exchange = await origin.open(POST, Listener())
        await upstream.until(lambda up: len(up.requests) == 1)
        exchange.cancel()
        await upstream.until(lambda up: up.hangups == 1)


async def test_a_sink_may_cancel_in_a_callback() -> None:
    """At the head, or in the middle of a read: the rest of the read is dropped."""

    class Fickle(Listener):
        def on_head(self, status: int, headers: Mapping[str, str]) -> None:
            super().on_head(status, headers)
            exchange.cancel()

    async with played([chunked(b"a"), HANG]) as (origin, upstream):
        listener = Fickle()
        exchange = await origin.open(POST, listener)
        await upstream.until(lambda up: up.hangups == 1)
        assert listener.calls == ["head"]


async def test_cancel_after_the_end_leaves_the_reused_connection() -> None:
    """The connection has a new owner."""
    async with played([reply(b"one")], [reply(b"two")]) as (origin, upstream):
        listener = Listener()
        exchange = await origin.open(POST, listener)
        await listener.ended()
        exchange.cancel()
        exchange.pause()
        assert (await ask(origin)).body == b"two"
        assert upstream.connections == 1


async def test_pause_applies_backpressure_until_resume() -> None:
    """While paused, no byte is read."""
    block = b"x" * (1 << 16)
    async with played([STREAM_HEAD, GATE, *[chunk(block)] * 256, LAST_CHUNK]) as (origin, upstream):
        listener = Listener()
        exchange = await origin.open(POST, listener)
        await turn_until(lambda: listener.calls)
        exchange.pause()
        exchange.pause()
        upstream.proceed()
        for _ in range(50):
            await asyncio.sleep(0)
        assert (listener.reads, listener.done.done()) == ([], False)
        exchange.resume()
        exchange.resume()
        assert (await listener.ended(), listener.body) == (None, block * 256)


async def test_a_reply_that_ends_while_paused_leaves_a_reading_connection() -> None:
    """No other call would resume the next exchange."""

    class Slow(Listener):
        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            exchange.pause()

    async with played([reply(b"one")], [reply(b"two")]) as (origin, upstream):
        listener = Slow()
        exchange = await origin.open(POST, listener)
        await listener.ended()
        assert (await ask(origin)).body == b"two"
        assert upstream.connections == 1


async def test_a_sink_may_start_a_request_in_on_end() -> None:
    """The connection is free before `on_end`."""
    second = Listener()

    class Eager(Listener):
        def on_end(self) -> None:
            super().on_end()
            assert origin.start(POST, second) is not None

    async with played([reply(b"one")], [reply(b"two")]) as (origin, _):
        await ask(origin)
        first = Eager()
        await origin.open(POST, first)
        assert (await second.ended(), second.body) == (None, b"two")
