"""The relay with failing clients and upstreams, over real sockets."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

import pytest

from backends.stream.held_reply import MAX_WHOLE
from gateway.observe.record import Placed, RequestOutcome
from gateway.upstream import answer
from policies.types import AttemptOutcome
from tests.support.builders import (
    ANSWER,
    CHAT,
    DONE,
    FINISH,
    TOKEN,
    WHOLE,
    conversing,
    last,
    post,
)
from tests.support.relay_fixture import RESET, Relaying, error_event, stalled
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, GATE, HANG, LAST_CHUNK, STREAM_HEAD, Pause, Script, chunk, reply

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- the client


async def test_no_byte_is_written_to_a_closed_transport() -> None:
    """The handler has not noticed the disconnection yet."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.wire.abort()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN)


async def test_a_full_write_buffer_pauses_the_upstream() -> None:
    """Until the buffer has drained."""
    talk = Relaying(TOKEN)
    await talk.to()
    exchange = talk.connections.exchange
    talk.writer.on_write_paused()
    assert exchange.steps == ["pause"]
    talk.writer.on_write_resumed()
    assert exchange.steps == ["pause", "resume"]
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert exchange.steps == ["pause", "resume"]


async def test_a_caller_that_does_not_read_teaches_nothing_of_the_server() -> None:
    """The answer counts no more in the pace of its endpoint, and the forecast of its end is not judged."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.life.record.placed = Placed(total_p50=1.0, total_p90=2.0)
    before = talk.fleet.snapshot(monotonic()).loads["small/a"]
    talk.writer.on_write_paused()
    load = talk.fleet.snapshot(monotonic()).loads["small/a"]
    assert (before.context, load.context, load.in_flight) == (100, 0, 1)
    assert (talk.life.record.placed.total_p50, talk.life.record.placed.total_p90) == (None, None)
    talk.run.on_body(FINISH + DONE)
    talk.run.on_end()
    await talk.written()
    assert talk.fleet.snapshot(monotonic()).loads["small/a"].in_flight == 0


async def test_a_stalled_reader_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """After STALL seconds with a full buffer. The attempt is cancelled, and the Record has the reason."""
    monkeypatch.setattr(answer, "STALL", 0.2)
    plenty = chunk(TOKEN.replace(b"hi", b"x" * 60_000))
    async with stalled(*[plenty] * 500, HANG) as (gateway, _, upstream):
        await eventually(lambda: gateway.recorder.recent)
        await upstream.until(lambda seen: seen.hangups == 1)
    found = last(gateway)
    assert (found.end, found.error) == (RequestOutcome.CLIENT_GONE, "the client read nothing for 0.2 s")
    assert found.attempts[-1].ending is AttemptOutcome.CANCELLED


async def test_a_reader_that_catches_up_receives_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream was paused, not cancelled; a pause shorter than STALL costs nothing."""
    monkeypatch.setattr(answer, "STALL", 5.0)
    event = TOKEN.replace(b"hi", b"x" * 60_000)
    async with stalled(*[chunk(event)] * 100, chunk(ANSWER), LAST_CHUNK) as (gateway, caller, _):
        await eventually(lambda: any(c.writer.paused for c in gateway.data_port.server.connections))
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        body = b"".join(await caller.chunks())
    assert body == event * 100 + ANSWER
    assert last(gateway).end is RequestOutcome.COMPLETED


# --------------------------------------------------------------------------- over sockets


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_broken_stream_ends_with_an_error_event_in_http_1_0_and_1_1(version: str) -> None:
    """Then the connection is closed."""
    async with conversing([STREAM_HEAD + chunk(TOKEN), CLOSE]) as (_, caller, _):
        status, headers = await caller.ask(post({**CHAT, "stream": True}, version=version))
        rest = await caller.rest()
    assert (status, headers.get("transfer-encoding")) == (200, "chunked" if version == "1.1" else None)
    body = TOKEN + error_event(RESET)
    assert rest == (body if version == "1.0" else chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK)


async def test_a_connection_serves_many_answers() -> None:
    """Streams and whole answers in turn; a relay leaves no state on the connection."""
    streamed: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
    async with conversing(streamed, [reply(WHOLE)], streamed, [reply(WHOLE)]) as (gateway, caller, upstream):
        for _ in range(2):
            await caller.ask(post({**CHAT, "stream": True}))
            upstream.proceed()
            assert b"".join(await caller.chunks()) == ANSWER
            assert (await caller.whole(post(CHAT)))[2] == WHOLE
        assert len(gateway.data_port.server.connections) == 1
    assert [found.end for found in gateway.recorder.recent] == [RequestOutcome.COMPLETED] * 4


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


async def test_a_broken_whole_answer_is_502() -> None:
    """No byte of the answer has been written yet."""
    async with conversing([HEAD % len(WHOLE) + WHOLE[:40], Pause(0.05), CLOSE]) as (_, caller, _):
        status, _ = await caller.ask(post(CHAT))
        assert status == 502


async def test_a_broken_large_whole_answer_closes_the_connection() -> None:
    """After fewer bytes than its content-length."""
    large = WHOLE + b" " * MAX_WHOLE
    async with conversing([HEAD % (len(large) + 1) + large, Pause(0.05), CLOSE]) as (gateway, caller, _):
        _, headers = await caller.ask(post(CHAT))
        rest = b""
        with suppress(ConnectionResetError):
            rest = await caller.rest()
        assert len(rest) < int(headers["content-length"])
        await eventually(lambda: gateway.recorder.recent)
    assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE
