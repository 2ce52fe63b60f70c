"""Ends of an answer that a race decides: complete on an open connection, late, stopped, not to be translated."""

from __future__ import annotations

import json
from time import monotonic

import pytest

from backends.failures import LATE, NOT_ASSEMBLED, STOPPED
from gateway.api.api_error import ApiError
from gateway.observe.part_notes import SHORTCOMING
from gateway.observe.record import RequestOutcome
from gateway.upstream.routed_request import WHOLE_ANSWER
from policies.attempts.patience import first_token_limit
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import ANSWER, CHAT, DONE, FINISH, TOKEN, WHOLE, calling, last, post
from tests.support.gateways import pool, running
from tests.support.relay_fixture import RESET, Relaying, error_event
from tests.support.simulated import eventually
from tests.support.upstream import HANG, LAST_CHUNK, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time


async def test_an_answer_complete_on_an_open_connection_is_ended_after_idle() -> None:
    """Some servers send [DONE] and no end of the body. The caller has all, and may ask again."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.1)
    talk.run.on_body(FINISH + DONE)
    assert (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.COMPLETED, "")
    assert (talk.fleet.endings, talk.connections.exchange.steps) == ([AttemptOutcome.COMPLETED], ["cancel"])


@pytest.mark.parametrize("after", [(), (TOKEN, TOKEN[:30])])
async def test_an_answer_past_the_limit_of_its_route_ends_with_an_error_event(after: tuple[bytes, ...]) -> None:
    """Though it writes. The engine is stopped, and is not to blame."""
    talk = Relaying(TOKEN)
    await talk.to(total={"budget": "50ms", "limit": "100ms"})
    for part in after:
        talk.run.on_body(part)
    assert not (await talk.written()).keep_alive
    assert talk.wire.body.endswith(chunk(error_event(LATE)) + LAST_CHUNK)
    assert talk.outcome == (RequestOutcome.UPSTREAM_BROKE, LATE.said)
    assert talk.fleet.endings == [AttemptOutcome.CANCELLED]


async def test_a_gateway_that_stops_ends_the_answer_with_an_error_event() -> None:
    """The Record says that the gateway has cut it."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.race.on_shutdown()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(STOPPED)) + LAST_CHUNK
    assert talk.outcome == (RequestOutcome.CUT, STOPPED.said)
    assert talk.fleet.endings == [AttemptOutcome.CANCELLED]


async def test_a_caller_that_does_not_read_is_no_silence_of_the_server() -> None:
    """Nothing is read from the server meanwhile; the time without a byte counts from when the caller reads again."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.1)
    talk.writer.on_write_paused()
    await eventually(lambda: monotonic() > talk.attempt.times.last_byte + 0.25)
    assert not talk.race.answer.done.done()
    talk.writer.on_write_resumed()
    talk.run.on_body(FINISH + DONE)
    talk.run.on_end()
    await talk.written()
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_reads_after_the_end_change_nothing() -> None:
    """The record of a request has one end."""
    talk = Relaying(ANSWER)
    await talk.to()
    talk.run.on_end()
    await talk.written()
    before = talk.wire.body
    talk.race.on_shutdown()
    assert (talk.wire.body, talk.outcome) == (before, (RequestOutcome.COMPLETED, ""))


async def test_a_whole_answer_that_cannot_be_translated_is_a_failure_of_its_attempt() -> None:
    """The server has violated its own dialect: the fleet does not learn from such an answer, and another endpoint is
    asked."""
    odd = [reply(b'{"choices":[5]}')]
    async with Upstream(odd) as first, Upstream([reply(WHOLE)]) as second:
        pools = {"one": pool(first.url), "two": pool(second.url)}
        async with running(pools) as gateway, calling(gateway.url) as caller:
            status, _, _ = await caller.whole(post({**CHAT, "max_tokens": 5}, path="/v1/messages"))
            record = last(gateway)
    assert (status, record.endpoint.pool) == (200, "two")
    assert [each.ending for each in record.attempts] == [AttemptOutcome.FAILED, AttemptOutcome.COMPLETED]


async def test_a_hanging_answer_of_a_second_pool_is_not_awaited_for_a_caller_that_left() -> None:
    """Both attempts of an escalation are over: the kept one completed, the other cancelled."""
    short = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"length"}]}'
    async with Upstream([reply(short)]) as first, Upstream([HANG]) as second:
        pools = {"one": pool(first.url), "two": pool(second.url)}
        routes = {"chat": {"tiers": ["one", "two"], "escalate": ["length"]}}
        async with running(pools, routes) as gateway:
            async with calling(gateway.url) as caller:
                caller.writer.write(post(CHAT))
                await second.until(lambda seen: len(seen.requests) == 1)
            await second.until(lambda seen: seen.hangups == 1)
    record = last(gateway)
    assert (record.end, SHORTCOMING.of(record)) == (RequestOutcome.CLIENT_GONE, "length")
    assert [each.ending for each in record.attempts] == [AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED]


# --------------------------------------------------------------------------- put together from a stream


CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"served","choices":[%b]%b}\n\n'
PART = CHUNK % (b'{"index":0,"delta":{"role":"assistant","content":"hi"},"finish_reason":null}', b"")
STOP = CHUNK % (b'{"index":0,"delta":{},"finish_reason":"stop"}', b"")
COUNTS = CHUNK % (b"", b',"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}')


async def assembling(*reads: bytes) -> Relaying:
    """A whole answer that is asked for as a stream, as its route has a promise to keep."""
    talk = Relaying(*reads, stream=False)
    await talk.to(upstream_stream="auto", total={"budget": "60s", "limit": "off"})
    assert talk.attempt.assembled
    return talk


def again(talk: Relaying, *reads: bytes) -> None:
    """The server's reply to the second attempt."""
    assert len(talk.race.attempts) == 2
    talk.connections.sink.on_head(200, talk.headers)
    for data in reads:
        talk.connections.sink.on_body(data)
    talk.connections.sink.on_end()


def again_whole(talk: Relaying) -> None:
    """The same, asked for as a whole answer."""
    assert not talk.race.attempts[2].request.stream
    talk.connections.sink.on_head(200, {"content-type": "application/json"})
    talk.connections.sink.on_body(WHOLE)
    talk.connections.sink.on_end()


async def test_a_gateway_that_stops_leaves_time_for_the_end_of_an_assembled_answer() -> None:
    """As for every request of which nothing is written: it is cancelled after the grace, and not before."""
    talk = await assembling(PART)
    assert talk.writer.flow_control is talk.race  # which the server tells of the stop
    talk.race.on_shutdown()
    talk.run.on_body(STOP + COUNTS + DONE)
    talk.run.on_end()
    await talk.written()
    assert json.loads(talk.wire.body)["choices"][0]["message"]["content"] == "hi"
    assert talk.outcome == (RequestOutcome.COMPLETED, "")


async def test_an_assembled_answer_is_written_whole_at_its_end() -> None:
    talk = await assembling(PART, PART, STOP, COUNTS, DONE)
    assert talk.wire.writes == []
    talk.run.on_end()
    await talk.written()
    assert json.loads(talk.wire.body)["choices"][0]["message"]["content"] == "hihi"
    assert talk.wire.head["content-length"] == str(len(talk.wire.body))
    assert talk.wire.head["content-type"] == "application/json"


@pytest.mark.parametrize("how", ["reset", "truncated"])
async def test_an_unwritten_answer_that_breaks_after_its_first_token_is_hidden(how: str) -> None:
    """Nothing of it has reached the caller: another attempt answers, and its text alone is written."""
    talk = await assembling(PART)
    assert talk.race.winner is talk.attempt
    if how == "reset":
        talk.run.on_failure(RESET)
    else:
        talk.run.on_end()
    if how == "reset":
        again(talk, PART, STOP, COUNTS, DONE)
    else:  # an endpoint whose streams lack their end is asked for a whole answer
        again_whole(talk)
    await talk.written()
    assert json.loads(talk.wire.body)["choices"][0]["message"]["content"] == "hi"
    assert talk.outcome == (RequestOutcome.COMPLETED, "")
    assert [(each.number, each.ending) for each in talk.life.record.attempts] == [
        (1, AttemptOutcome.BROKEN),
        (2, AttemptOutcome.COMPLETED),
    ]


async def test_an_unwritten_answer_that_breaks_every_time_is_the_callers_error() -> None:
    """With a status, for nothing was written."""
    talk = await assembling(PART)
    talk.run.on_failure(RESET)
    talk.connections.sink.on_head(200, talk.headers)
    talk.connections.sink.on_body(PART)
    talk.connections.sink.on_failure(RESET)
    await talk.written()
    assert isinstance(error := talk.running.exception(), ApiError)
    assert (error.status, talk.wire.writes) == (502, [])


async def test_a_stream_that_cannot_be_put_together_is_asked_for_again_as_a_whole() -> None:
    """At once, of the same endpoint, which is not to blame: the gateway is."""
    talk = await assembling(PART, CHUNK % (b'{"index":7,"delta":{"content":"x"}}', b""))
    assert talk.race._failure is NOT_ASSEMBLED
    assert [each.request.stream for each in talk.race.attempts.values()] == [True, False]
    assert talk.race.attempts[2].attempt.kind is AttemptKind.WHOLE
    limits = talk.race._machine._limits
    assert first_token_limit(limits, talk.race.attempts[2].attempt.candidate) == WHOLE_ANSWER
    again_whole(talk)
    await talk.written()
    assert talk.wire.body == WHOLE
