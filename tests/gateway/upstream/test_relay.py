"""The relay: unchanged body bytes, own framing, and an explicit end of every answer."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from backends.failures import SILENT, TRUNCATED
from backends.stream.held_reply import MAX_WHOLE
from gateway.api.api_error import ApiError
from gateway.observe.record import RequestOutcome, Stage
from policies.types import AttemptOutcome
from tests.support.builders import (
    ANSWER,
    DONE,
    ERROR,
    FINISH,
    PREAMBLE,
    TOKEN,
    USAGE,
    WHOLE,
)
from tests.support.relay_fixture import RESET, Relaying, error_event
from tests.support.upstream import LAST_CHUNK, chunk

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- framing


async def test_the_head_and_the_first_token_are_one_write() -> None:
    """With all buffered bytes: one packet, nothing for a proxy to act on in between."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to()
    (first,) = talk.wire.writes
    assert first.endswith(b"\r\n\r\n" + chunk(PREAMBLE + TOKEN))
    assert talk.wire.head[""] == "HTTP/1.1 200 OK"
    assert talk.wire.head["transfer-encoding"] == "chunked"
    assert talk.life.record.ttft == pytest.approx(monotonic() - talk.life.record.arrival, abs=1.0)


async def test_every_read_of_whole_events_is_written_at_once_as_one_chunk() -> None:
    """Unchanged, without a turn of the event loop."""
    talk = Relaying(TOKEN)
    await talk.to()
    for i, part in enumerate([b": x\n\n", TOKEN, FINISH, DONE], 1):
        talk.run.on_body(part)
        assert talk.wire.writes[i] == chunk(part)
    talk.run.on_end()
    assert talk.wire.writes[-1] == LAST_CHUNK
    assert (await talk.written()).keep_alive
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_an_event_is_written_when_complete() -> None:
    """Half an event is useless to a client, and could not be taken back."""
    talk = Relaying(TOKEN)
    await talk.to()
    for part in (TOKEN[:20], TOKEN[20:21], TOKEN[21:] + FINISH[:5], FINISH[5:] + DONE):
        talk.run.on_body(part)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK


async def test_a_whole_answer_keeps_its_content_length() -> None:
    """In several reads too."""
    talk = Relaying(WHOLE[:30], stream=False, **{"content-length": str(len(WHOLE)), "content-type": "application/json"})
    await talk.to()
    talk.run.on_body(WHOLE[30:])
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert (talk.wire.head["content-length"], talk.wire.body) == (str(len(WHOLE)), WHOLE)
    assert "transfer-encoding" not in talk.wire.head
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_a_buffered_whole_answer_gets_a_content_length() -> None:
    """For any framing of the backend: the gateway has the complete answer."""
    talk = Relaying(WHOLE, stream=False)
    await talk.to()
    assert talk.wire.writes == []
    talk.run.on_end()
    await talk.written()
    assert (talk.wire.head["content-length"], talk.wire.body) == (str(len(WHOLE)), WHOLE)
    assert len(talk.wire.writes) == 1


async def test_a_whole_answer_beyond_the_buffer_is_streamed() -> None:
    """In chunks, if the backend gave no length."""
    large = WHOLE + b" " * MAX_WHOLE
    talk = Relaying(large, stream=False)
    await talk.to()
    assert talk.wire.body == chunk(large)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(large) + LAST_CHUNK


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_1_0_client_gets_a_body_delimited_by_connection_close(stream: bool) -> None:
    """HTTP/1.0 has no chunks (RFC 9112 section 7.1)."""
    body = ANSWER if stream else WHOLE
    talk = Relaying(body, stream=stream)
    await talk.to(http10=True)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert (talk.wire.head["connection"], talk.wire.body) == ("close", body)
    assert "transfer-encoding" not in talk.wire.head


async def test_connection_close_is_answered_with_connection_close() -> None:
    """The connection is closed after the answer."""
    talk = Relaying(ANSWER)
    await talk.to(keep_alive=False)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert talk.wire.head["connection"] == "close"


async def test_an_answer_of_one_read_is_written_at_once() -> None:
    """Head, body and end in two writes, in the calls of the reads."""
    talk = Relaying(ANSWER)
    await talk.to()
    talk.run.on_end()
    assert len(talk.wire.writes) == 2
    await talk.written()
    assert talk.wire.body == chunk(ANSWER) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_an_answer_without_a_visible_token_is_written_at_its_end() -> None:
    """A finished answer without output is an answer."""
    talk = Relaying(PREAMBLE, FINISH, DONE)
    await talk.to()
    assert not talk.wire.writes
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(PREAMBLE + FINISH + DONE) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_relay_and_stream_stages_end_with_first_and_last_write() -> None:
    """`relay` ends with the write of the first token, `stream` with the last."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    found = talk.life.record
    assert set(found.stages) == {Stage.CONNECT, Stage.SEND, Stage.UPSTREAM, Stage.RELAY, Stage.STREAM}
    assert sum(found.stages.values()) == pytest.approx(found.total)
    assert found.status == 200


# --------------------------------------------------------------------------- usage


async def test_unrequested_usage_is_removed_from_a_stream() -> None:
    """The gateway still meters by the usage; all other bytes are unchanged."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to(strip=True)
    for part in (TOKEN, FINISH + USAGE[:25], USAGE[25:] + DONE):
        talk.run.on_body(part)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(PREAMBLE + TOKEN) + chunk(TOKEN) + chunk(FINISH) + chunk(DONE) + LAST_CHUNK
    assert talk.attempt.tap.usage.prompt == 7


async def test_removing_usage_keeps_a_buffered_rest() -> None:
    """Buffered bytes that were no usage are written with the last chunk."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(FINISH + b"data: [DONE]")
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body.endswith(chunk(b"data: [DONE]") + LAST_CHUNK)


# --------------------------------------------------------------------------- broken answers


@pytest.mark.parametrize("so_far", [TOKEN, TOKEN + TOKEN[:30], TOKEN + TOKEN[:-1], TOKEN.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("after", [False, True])
async def test_a_broken_stream_ends_with_an_error_event(so_far: bytes, after: bool) -> None:
    """On an event boundary, after any bytes; never inside a token."""
    talk = Relaying(TOKEN) if after else Relaying(TOKEN + so_far)
    await talk.to()
    if after:
        talk.run.on_body(so_far)
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert talk.wire.writes[-1] == chunk(error_event(RESET)) + LAST_CHUNK
    assert talk.wire.body.count(TOKEN[:30]) == 2
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, RESET.said)


async def test_a_broken_stream_without_usage_ends_on_an_event_boundary() -> None:
    """A buffered half event is dropped."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(TOKEN + TOKEN[:30])
    talk.run.on_failure(RESET)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK


async def test_an_end_of_body_without_finish_or_done_is_an_error() -> None:
    """A clean end of the body is no end of the answer."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(TRUNCATED)) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, TRUNCATED.said)


async def test_a_finish_reason_without_done_is_success() -> None:
    """Some servers send no [DONE]; some clients wait for it, and the gateway adds it."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(FINISH) + chunk(DONE) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


@pytest.mark.parametrize("tail", [ERROR + DONE, b'data: {"content":"nonsense\n\n'])
async def test_an_answer_broken_in_its_first_read_ends_with_an_error_event(tail: bytes) -> None:
    """After the received tokens; the backend's error or the gateway's, never with [DONE]."""
    talk = Relaying(TOKEN + tail)
    await talk.to()
    await talk.written()
    body = talk.wire.body
    assert body.startswith(chunk(TOKEN))
    assert b"nonsense" not in body
    assert (body.count(b'"error"'), body.count(DONE), body.endswith(LAST_CHUNK)) == (1, 0, True)
    assert talk.outcome[0] is RequestOutcome.UPSTREAM_BROKE


async def test_the_backends_error_event_ends_the_stream() -> None:
    """A single error event; a following [DONE] would claim success."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(ERROR + DONE)
    assert not (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(ERROR) + LAST_CHUNK
    assert talk.attempt.failure is not None
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, talk.attempt.failure.said)


async def test_a_broken_large_whole_answer_stays_incomplete() -> None:
    """JSON has no error event; a body shorter than its content-length shows the fault."""
    large = WHOLE + b" " * MAX_WHOLE
    talk = Relaying(large, stream=False, **{"content-length": str(len(large) + 1)})
    await talk.to()
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert (talk.wire.body, talk.wire.gone) == (large, True)
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, RESET.said)


async def test_a_stream_silent_beyond_the_idle_timeout_is_abandoned() -> None:
    """The attempt is cancelled, and the caller receives an error event."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.1)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(SILENT)) + LAST_CHUNK
    assert (talk.outcome, talk.fleet.endings) == (
        (RequestOutcome.UPSTREAM_BROKE, SILENT.said),
        [AttemptOutcome.BROKEN],
    )


async def test_an_idle_whole_answer_is_504() -> None:
    """No byte of it has reached the caller, and no other endpoint is left."""
    talk = Relaying(WHOLE[:10], stream=False)
    await talk.to(idle=0.05)
    await talk.written()
    assert isinstance(error := talk.running.exception(), ApiError)
    assert (error.status, talk.wire.writes) == (504, [])
    assert talk.fleet.endings == [AttemptOutcome.SILENT]


async def test_every_byte_restarts_the_idle_timeout() -> None:
    """A comment shows that the server is alive."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.4)
    start = monotonic()
    while monotonic() - start < 0.6:
        talk.run.on_body(b": x\n\n")
        await asyncio.sleep(0.01)
    assert not talk.race.answer.done.done()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert talk.outcome == (RequestOutcome.COMPLETED, "")
