"""Bytes to the client: the body as it came, the framing ours, and never an end in silence."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from gateway.observe.record import RequestOutcome, Stage
from gateway.upstream.relay import SILENT, TRUNCATED
from gateway.upstream.upstream_request import MAX_WHOLE
from policies.types import AttemptOutcome
from tests.gateway.builders import (
    ANSWER,
    DONE,
    ERROR,
    FINISH,
    PREAMBLE,
    TOKEN,
    USAGE,
    WHOLE,
)
from tests.gateway.upstream.relaying import RESET, Relaying, error_event
from tests.support.upstream import LAST_CHUNK, chunk

# --------------------------------------------------------------------------- framing


async def test_the_head_goes_out_with_the_first_token_in_one_write() -> None:
    """And with all that was held before it: one packet, nothing for a proxy to act on in between."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to()
    (first,) = talk.wire.writes
    assert first.endswith(b"\r\n\r\n" + chunk(PREAMBLE + TOKEN))
    assert talk.wire.head[""] == "HTTP/1.1 200 OK"
    assert talk.wire.head["transfer-encoding"] == "chunked"
    assert talk.life.record.ttft == pytest.approx(monotonic() - talk.life.record.arrival, abs=1.0)


async def test_every_read_of_whole_events_is_one_chunk_in_its_own_call() -> None:
    """Verbatim; nothing waits for the loop to turn."""
    talk = Relaying(TOKEN)
    await talk.to()
    for i, part in enumerate([b": x\n\n", TOKEN, FINISH, DONE], 1):
        talk.run.on_body(part)
        assert talk.wire.writes[i] == chunk(part)
    talk.run.on_end()
    assert talk.wire.writes[-1] == LAST_CHUNK
    assert (await talk.written()).keep_alive
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_an_event_is_written_when_it_is_whole() -> None:
    """Half an event is of no use, and could not be taken back."""
    talk = Relaying(TOKEN)
    await talk.to()
    for part in (TOKEN[:20], TOKEN[20:21], TOKEN[21:] + FINISH[:5], FINISH[5:] + DONE):
        talk.run.on_body(part)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK


async def test_a_whole_answer_keeps_its_length() -> None:
    """It may come in several reads all the same."""
    talk = Relaying(WHOLE[:30], stream=False, **{"content-length": str(len(WHOLE)), "content-type": "application/json"})
    await talk.to()
    talk.run.on_body(WHOLE[30:])
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert (talk.wire.head["content-length"], talk.wire.body) == (str(len(WHOLE)), WHOLE)
    assert "transfer-encoding" not in talk.wire.head
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_a_whole_answer_is_written_at_its_end_with_its_length() -> None:
    """However the backend framed it: the gateway has all of it by then."""
    talk = Relaying(WHOLE, stream=False)
    await talk.to()
    assert talk.wire.writes == []
    talk.run.on_end()
    await talk.written()
    assert (talk.wire.head["content-length"], talk.wire.body) == (str(len(WHOLE)), WHOLE)
    assert len(talk.wire.writes) == 1


async def test_a_whole_answer_too_large_to_be_held_is_passed_on() -> None:
    """In chunks, if the backend gave no length."""
    large = WHOLE + b" " * MAX_WHOLE
    talk = Relaying(large, stream=False)
    await talk.to()
    assert talk.wire.body == chunk(large)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(large) + LAST_CHUNK


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(stream: bool) -> None:
    """It knows no chunks (RFC 9112 section 7.1)."""
    body = ANSWER if stream else WHOLE
    talk = Relaying(body, stream=stream)
    await talk.to(http10=True)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert (talk.wire.head["connection"], talk.wire.body) == ("close", body)
    assert "transfer-encoding" not in talk.wire.head


async def test_a_client_that_wants_no_more_is_told_that_the_connection_closes() -> None:
    """`connection: close` is answered with it."""
    talk = Relaying(ANSWER)
    await talk.to(keep_alive=False)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert talk.wire.head["connection"] == "close"


async def test_an_answer_of_one_read_goes_out_whole() -> None:
    """Head, body and end in two writes, all in the calls in which they came."""
    talk = Relaying(ANSWER)
    await talk.to()
    talk.run.on_end()
    assert len(talk.wire.writes) == 2
    await talk.written()
    assert talk.wire.body == chunk(ANSWER) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_an_answer_without_a_visible_token_goes_out_at_its_end() -> None:
    """It said that it is over: that is an answer too."""
    talk = Relaying(PREAMBLE, FINISH, DONE)
    await talk.to()
    assert not talk.wire.writes
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(PREAMBLE + FINISH + DONE) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_stages_follow_the_first_and_the_last_byte_out() -> None:
    """`relay` up to the first token's write, `stream` up to the end."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    found = talk.life.record
    assert set(found.stages) == {Stage.RELAY, Stage.STREAM}
    assert sum(found.stages.values()) == pytest.approx(found.total)
    assert found.status == 200


# --------------------------------------------------------------------------- usage


async def test_usage_is_stripped_from_a_stream_whose_caller_did_not_ask() -> None:
    """The gateway meters by it all the same; every other byte passes as it came."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to(strip=True)
    for part in (TOKEN, FINISH + USAGE[:25], USAGE[25:] + DONE):
        talk.run.on_body(part)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(PREAMBLE + TOKEN) + chunk(TOKEN) + chunk(FINISH) + chunk(DONE) + LAST_CHUNK
    assert talk.run.reported().prompt_tokens == 7


async def test_a_stripped_stream_loses_nothing_at_its_end() -> None:
    """What the stripper held back, and was no usage, goes out with the last chunk."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(FINISH + b"data: [DONE]")
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body.endswith(chunk(b"data: [DONE]") + LAST_CHUNK)


# --------------------------------------------------------------------------- ends that are none


@pytest.mark.parametrize("so_far", [TOKEN, TOKEN + TOKEN[:30], TOKEN + TOKEN[:-1], TOKEN.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("after", [False, True])
async def test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own(so_far: bytes, after: bool) -> None:
    """On an event boundary, wherever the bytes so far end; never inside somebody's token."""
    talk = Relaying(TOKEN) if after else Relaying(TOKEN + so_far)
    await talk.to()
    if after:
        talk.run.on_body(so_far)
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert talk.wire.writes[-1] == chunk(error_event(RESET)) + LAST_CHUNK
    assert talk.wire.body.count(TOKEN[:30]) == 2
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, RESET.message)


async def test_a_stripped_stream_that_is_cut_ends_on_a_boundary_too() -> None:
    """The half event that was held back is dropped: nobody could have used it."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(TOKEN + TOKEN[:30])
    talk.run.on_failure(RESET)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK


async def test_a_stream_that_ends_without_saying_so_is_an_error() -> None:
    """A clean end of body is no end of answer."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(TRUNCATED)) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, TRUNCATED.message)


async def test_a_finish_reason_without_done_is_success() -> None:
    """Not every server sends [DONE], and what it did not send is not made up."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(FINISH) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


@pytest.mark.parametrize("tail", [ERROR + DONE, b"data: {nonsense\n\n"])
async def test_an_answer_that_breaks_in_its_first_read_says_so(tail: bytes) -> None:
    """After what came of it, in its own words or in ours; never with a [DONE]."""
    talk = Relaying(TOKEN + tail)
    await talk.to()
    await talk.written()
    body = talk.wire.body
    assert body.startswith(chunk(TOKEN))
    assert b"nonsense" not in body
    assert (body.count(b'"error"'), body.count(DONE), body.endswith(LAST_CHUNK)) == (1, 0, True)
    assert talk.outcome[0] is RequestOutcome.UPSTREAM_BROKE


async def test_the_backends_own_error_event_is_the_explicit_end() -> None:
    """One is enough; the [DONE] that some send after it would say that all was well."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(ERROR + DONE)
    assert not (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(ERROR) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, "the backend's own error: server")


async def test_a_large_whole_answer_that_is_cut_stays_unfinished() -> None:
    """JSON has no error event: a body shorter than its length is the only honest sign left."""
    large = WHOLE + b" " * MAX_WHOLE
    talk = Relaying(large, stream=False, **{"content-length": str(len(large) + 1)})
    await talk.to()
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert (talk.wire.body, talk.wire.gone) == (large, True)
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, RESET.message)


async def test_silence_in_mid_stream_is_given_up() -> None:
    """The engine is let go, and the caller told."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.1)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(SILENT)) + LAST_CHUNK
    assert (talk.outcome, talk.fleet.endings) == (
        (RequestOutcome.UPSTREAM_BROKE, SILENT.message),
        [AttemptOutcome.CANCELLED],
    )


async def test_every_byte_puts_the_silence_off() -> None:
    """Also one that is no token: a comment says that somebody is there."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.4)
    start = monotonic()
    while monotonic() - start < 0.6:
        talk.run.on_body(b": x\n\n")
        await asyncio.sleep(0.01)
    assert not talk.relay.done.done()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert talk.outcome == (RequestOutcome.COMPLETED, "")
