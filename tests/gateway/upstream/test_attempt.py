"""One attempt: buffered until the first token, passed on from there, and ended once."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import pytest

from backends import failures
from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind, HttpCall
from backends.stream.held_reply import MAX_ERROR, MAX_HELD
from gateway.upstream.attempt import BrokenOff, Milestone, WireState
from policies.types import AttemptOutcome, PoolEstimate
from tests.support.attempt_stage import REFUSED, RESET, Stage
from tests.support.builders import (
    ANSWER,
    DONE,
    ERROR,
    FINISH,
    PREAMBLE,
    TOKEN,
    USAGE,
    WHOLE,
    RecordingExchange,
    candidate,
)
from tests.support.upstream import GATE, STREAM_HEAD, Upstream, chunk, turn_until

pytestmark = pytest.mark.virtual_time

EMPTY_DELTA = b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'
QUOTING = b'data: {"error":{"message":"wrong key sk-backend","type":"server_error","code":500}}\n\n'
COMMENT = b": keep-alive\n\n"

# --------------------------------------------------------------------------- up to the first token


def test_bytes_before_the_first_token_are_buffered() -> None:
    """A role, an empty delta, a comment, a usage event: no visible output."""
    stage = Stage().reads(PREAMBLE, COMMENT, EMPTY_DELTA, USAGE)
    assert (stage.firsts, stage.wire.times.first_in, stage.load) == ([], None, (1, 1))
    assert stage.wire.held.take() == PREAMBLE + COMMENT + EMPTY_DELTA + USAGE


def test_the_first_visible_output_commits_once() -> None:
    """Within the read; the fleet is told after it."""
    stage = Stage().reads(PREAMBLE, TOKEN)
    assert (stage.firsts, stage.load) == ([Milestone.FIRST_TOKEN], (1, 0))
    assert stage.wire.times.first_in is not None
    assert stage.wire.times.opened <= stage.wire.times.first_in <= monotonic()
    stage.reads(TOKEN, TOKEN)
    assert stage.firsts == [Milestone.FIRST_TOKEN]


def test_a_token_split_over_reads_commits_when_complete() -> None:
    """Half an event is no token."""
    stage = Stage().reads(PREAMBLE + TOKEN[:30])
    assert stage.firsts == []
    assert stage.reads(TOKEN[30:]).firsts == [Milestone.FIRST_TOKEN]
    assert stage.sink.answer.reads == [PREAMBLE + TOKEN]


def test_buffered_bytes_go_first_and_every_later_read_at_once() -> None:
    """Reads are neither joined nor split."""
    stage = Stage().reads(PREAMBLE, TOKEN, TOKEN[:20], TOKEN[20:], FINISH)
    assert stage.sink.answer.reads == [PREAMBLE + TOKEN, TOKEN[:20], TOKEN[20:], FINISH]
    assert stage.wire.held.take() == b""


def test_an_error_event_before_the_first_token_is_a_failure() -> None:
    """Inside a 200 too: no byte has reached the caller."""
    stage = Stage().reads(PREAMBLE, ERROR)
    assert (stage.failure.kind, stage.firsts) == (FailureKind.SERVER, [])
    assert (stage.fleet.endings, stage.load) == ([AttemptOutcome.FAILED], (0, 0))


def test_a_token_before_an_error_event_commits() -> None:
    """In a single read too. The answer breaks once."""
    stage = Stage().reads(TOKEN + ERROR)
    assert (stage.firsts, stage.sink.failures) == ([Milestone.FIRST_TOKEN], [])
    assert stage.sink.breaks == [stage.wire.tap.failure]


def test_a_finished_answer_without_output_is_an_answer() -> None:
    """A model may have nothing to say; another attempt would not be more correct."""
    stage = Stage().reads(PREAMBLE, FINISH, USAGE, DONE).ends()
    assert (stage.firsts, stage.fleet.endings, stage.wire.answered) == (
        [Milestone.FIRST_TOKEN],
        [AttemptOutcome.COMPLETED],
        True,
    )


@pytest.mark.parametrize("parts", [(), (PREAMBLE,), (PREAMBLE, USAGE), (TOKEN[:30],)])
def test_a_reply_that_ends_before_its_first_token_has_failed(parts: tuple[bytes, ...]) -> None:
    """Without a finish reason or [DONE] the reply is incomplete."""
    stage = Stage().reads(*parts).ends()
    assert (stage.failure.kind, stage.fleet.endings) == (FailureKind.PROTOCOL, [AttemptOutcome.FAILED])


def test_an_event_without_its_final_blank_line_counts_at_the_end() -> None:
    """The SSE specification drops such an event; OpenAI's own clients read the event."""
    stage = Stage().reads(b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}')
    assert stage.firsts == []
    assert stage.ends().firsts == [Milestone.FIRST_TOKEN]


def test_a_preamble_beyond_the_buffer_limit_commits() -> None:
    """The buffer is bounded; an endless stream of comments is passed on."""
    parts = [COMMENT * 1000] * (MAX_HELD // (1000 * len(COMMENT)))
    stage = Stage().reads(*parts)
    assert stage.firsts == []
    assert stage.reads(parts[0]).firsts == [Milestone.FIRST_TOKEN]


def test_a_whole_answer_commits_at_its_end() -> None:
    """Its arrival is no TTFT, so the fleet learns no first token; it is judged and written whole."""
    stage = Stage(stream=False).reads(WHOLE[:10])
    assert (stage.firsts, stage.load) == ([], (1, 1))
    stage.reads(WHOLE[10:]).ends()
    assert stage.firsts == [Milestone.WHOLE]
    assert (stage.fleet.endings, stage.wire.answered, stage.wire.output_tokens) == ([AttemptOutcome.COMPLETED], True, 2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"Provider returned error","code":502}}', FailureKind.SERVER),
        (b'{"error":{"message":"slow down","code":429},"choices":[]}', FailureKind.QUEUE_LIMIT),
        (b"<html>please log in</html>", FailureKind.PROTOCOL),
        (b"[1]", FailureKind.PROTOCOL),
        (WHOLE[:-1], FailureKind.PROTOCOL),
        (b"", FailureKind.PROTOCOL),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_200_that_is_no_answer_has_failed(stream: bool, body: bytes, kind: FailureKind) -> None:
    """OpenRouter documents errors inside a 200; proxies answer with HTML pages."""
    stage = Stage(stream=stream).reads(body).ends()
    assert (stage.failure.kind, stage.firsts) == (kind, [])


def test_a_body_with_choices_and_error_is_an_answer() -> None:
    """A list of choices has been paid for."""
    stage = Stage(stream=False).reads(b'{"error":{"message":"m"},' + WHOLE[1:]).ends()
    assert stage.firsts == [Milestone.WHOLE]


def test_a_compressed_answer_is_decompressed_and_judged() -> None:
    """A 200 may hold an error, compressed or not; its length is not the caller's."""
    packed = gzip.compress(WHOLE)
    stage = Stage(stream=False, headers={"content-encoding": "gzip", "content-length": str(len(packed))})
    assert stage.reads(packed[:20], packed[20:]).ends().firsts == [Milestone.WHOLE]
    assert (stage.wire.held.take(), stage.wire.output_tokens, stage.wire.content_length) == (WHOLE, 2, None)
    failed = Stage(stream=False, headers={"content-encoding": "gzip"})
    assert (
        failed.reads(gzip.compress(b'{"error":{"message":"m","code":502}}')).ends().failure.kind is FailureKind.SERVER
    )


def test_a_compressed_stream_is_decompressed_read_by_read() -> None:
    """Without the framing of the compressed bytes."""
    packed = gzip.compress(ANSWER)
    stage = Stage(headers={"content-encoding": "gzip"}).reads(*[packed[i : i + 9] for i in range(0, len(packed), 9)])
    assert (stage.ends().passed, stage.fleet.endings) == (ANSWER, [AttemptOutcome.COMPLETED])


@pytest.mark.parametrize(("stream", "failure"), [(True, failures.NOT_EVENTS), (False, failures.NOT_JSON)])
def test_an_answer_of_an_unknown_coding_fails_at_its_head(stream: bool, failure: Failure) -> None:
    """It cannot be judged."""
    assert Stage(stream=stream, headers={"content-encoding": "br"}).failure is failure


@pytest.mark.parametrize("committed", [False, True])
def test_malformed_compressed_bytes_end_the_attempt(committed: bool) -> None:
    """Before the commit and after."""
    head = gzip.compress(TOKEN, compresslevel=0)[:-8] if committed else b""
    stage = Stage(headers={"content-encoding": "gzip"}).reads(head, b"\xff" * 64)
    assert len(stage.sink.breaks) == committed
    assert len(stage.sink.failures) == (not committed)
    assert stage.wire.state is WireState.OVER


def test_an_html_reply_to_a_stream_fails_at_its_head() -> None:
    """No token can follow."""
    stage = Stage(status=0)
    stage.sink.on_head(200, {"content-type": "text/html; charset=utf-8"})
    assert stage.failure.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    ("callers", "status", "kind", "ending"),
    [
        (False, 502, FailureKind.MISCONFIGURED, AttemptOutcome.MISCONFIGURED),
        (True, 404, FailureKind.CLIENT, AttemptOutcome.REFUSED),
    ],
)
def test_an_unknown_model_is_the_fault_of_the_configuration_or_a_passthrough_caller(
    callers: bool, status: int, kind: FailureKind, ending: AttemptOutcome
) -> None:
    """The party that chose the name."""
    for body in (b'{"error":{"message":"m","type":"NotFoundError","param":"model","code":404}}', b"<html>"):
        stage = Stage(status=404)
        stage.wire.request = replace(stage.wire.request, model_is_callers=callers)
        stage.reads(body).ends()
        assert (stage.failure.status, stage.failure.kind, stage.fleet.endings) == (status, kind, [ending])


# --------------------------------------------------------------------------- errors instead of an answer


@pytest.mark.parametrize(
    ("status", "ending", "kind"),
    [
        (400, AttemptOutcome.REFUSED, FailureKind.CLIENT),
        (422, AttemptOutcome.REFUSED, FailureKind.CLIENT),
        (401, AttemptOutcome.MISCONFIGURED, FailureKind.AUTH),
        (402, AttemptOutcome.QUOTA, FailureKind.QUOTA),
        (404, AttemptOutcome.MISCONFIGURED, FailureKind.MISCONFIGURED),
        (429, AttemptOutcome.RATE_LIMITED, FailureKind.QUEUE_LIMIT),
        (503, AttemptOutcome.RATE_LIMITED, FailureKind.OVERLOADED),
        (500, AttemptOutcome.FAILED, FailureKind.SERVER),
        (504, AttemptOutcome.FAILED, FailureKind.TIMEOUT),
    ],
)
def test_an_error_reply_is_read_whole_and_mapped_by_status(
    status: int, ending: AttemptOutcome, kind: FailureKind
) -> None:
    """Overload is no ill health, and a request's own error says nothing against the endpoint."""
    stage = Stage(status=status).reads(b'{"error":{"message":"no such ', b'thing"}}').ends()
    assert (stage.failure.kind, stage.fleet.endings, stage.firsts) == (kind, [ending], [])
    assert stage.failure.message == "no such thing" or kind is not FailureKind.CLIENT


def test_a_stream_in_an_error_reply_is_no_answer() -> None:
    """The status counts first."""
    stage = Stage(status=500).reads(ANSWER).ends()
    assert (stage.firsts, stage.failure.kind) == ([], FailureKind.SERVER)


def test_the_kept_body_of_an_error_reply_is_bounded() -> None:
    """The error is at the beginning: nothing is read beyond."""
    stage = Stage(status=400).reads(*[b"x" * 10_000] * (MAX_ERROR // 10_000))
    assert stage.sink.failures == []
    assert stage.reads(b"x" * 10_000).failure.kind is FailureKind.CLIENT


def test_retry_after_blocks_the_endpoint() -> None:
    """For all requests, not only this one."""
    stage = Stage(status=429).ends()
    assert stage.fleet.reports[0].retry_after == 7.0
    assert stage.fleet.loads()["small/a"].limits.blocked_until == pytest.approx(monotonic() + 7.0, abs=1.0)


@pytest.mark.parametrize(
    ("status", "failure", "reached"),
    [(0, REFUSED, False), (0, RESET, False), (200, RESET, True), (0, failures.TIMED_OUT, True), (200, REFUSED, True)],
)
def test_an_endpoint_counts_as_reached_unless_refused_or_reset_before_the_first_byte(
    status: int, failure: Failure, reached: bool
) -> None:
    """Refusals and resets without a byte are signs of a dead server."""
    stage = Stage(status=status)
    stage.sink.on_failure(failure)
    assert (stage.failure, stage.fleet.endings) == (failure, [AttemptOutcome.FAILED])
    assert stage.fleet.reports[0].connected is reached


# --------------------------------------------------------------------------- after the commit


def test_an_end_of_body_without_finish_or_done_is_broken() -> None:
    """A clean end of the body is no end of the answer."""
    stage = Stage().reads(TOKEN).ends()
    assert (stage.fleet.endings, stage.wire.answered) == ([AttemptOutcome.BROKEN], False)
    assert stage.sink.breaks == [failures.TRUNCATED]


@pytest.mark.parametrize("last", [FINISH, DONE, FINISH + DONE])
def test_a_finish_reason_or_done_completes_a_stream(last: bytes) -> None:
    """Some servers never send [DONE], some never a finish reason."""
    stage = Stage().reads(TOKEN).reads(last).ends()
    assert (stage.fleet.endings, stage.wire.answered, stage.ended) == ([AttemptOutcome.COMPLETED], True, True)


def test_a_connection_lost_after_the_commit_breaks_the_stream() -> None:
    """No failure before the first token is told."""
    stage = Stage().reads(TOKEN)
    stage.sink.on_failure(RESET)
    assert (stage.fleet.endings, stage.sink.breaks, stage.sink.failures) == ([AttemptOutcome.BROKEN], [RESET], [])


@pytest.mark.parametrize("reads", [(TOKEN, QUOTING), (TOKEN + QUOTING,)], ids=["behind a token", "with it"])
def test_the_backend_key_in_an_error_event_is_masked(reads: tuple[bytes, ...]) -> None:
    """Some backends quote keys. Other bytes are unchanged."""
    stage = Stage()
    stage.reads(*reads)
    broken = stage.sink.events[-1]
    assert isinstance(broken, BrokenOff)
    assert stage.passed + broken.error_event == TOKEN + QUOTING.replace(b"sk-backend", b"*" * 10)


def test_an_error_event_after_the_commit_ends_the_stream() -> None:
    """Without the [DONE] that vLLM sends after the error."""
    stage = Stage().reads(TOKEN).reads(ERROR + DONE)
    assert (stage.passed, stage.sink.breaks) == (TOKEN, [stage.wire.tap.failure])
    assert stage.sink.events[-1] == BrokenOff(stage.wire.tap.failure or RESET, ERROR)
    assert (stage.fleet.endings, stage.wire.state) == ([AttemptOutcome.BROKEN], WireState.OVER)


# --------------------------------------------------------------------------- one end


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        (lambda s: s.reads(ANSWER).ends(), AttemptOutcome.COMPLETED),
        (lambda s: s.reads(TOKEN).ends(), AttemptOutcome.BROKEN),
        (lambda s: s.reads(TOKEN).sink.on_failure(RESET), AttemptOutcome.BROKEN),
        (lambda s: s.sink.on_failure(RESET), AttemptOutcome.FAILED),
        (lambda s: s.reads(ERROR), AttemptOutcome.FAILED),
        (lambda s: s.wire.stop(AttemptOutcome.CANCELLED), AttemptOutcome.CANCELLED),
        (lambda s: s.wire.stop(AttemptOutcome.SILENT), AttemptOutcome.SILENT),
    ],
)
def test_an_attempt_ends_once(first: Callable[[Stage], object], ending: AttemptOutcome) -> None:
    """The fleet receives one outcome, at one time, after any later calls."""
    stage = Stage()
    first(stage)
    ended_at, told = stage.wire.times.ended, list(stage.sink.events)
    for late in (AttemptOutcome.CANCELLED, AttemptOutcome.SILENT, AttemptOutcome.BROKEN):
        stage.wire.stop(late, RESET)
    assert (stage.fleet.endings, stage.wire.outcome, stage.wire.times.ended) == ([ending], ending, ended_at)
    assert stage.sink.events == told
    assert stage.wire.times.opened <= ended_at <= monotonic()
    assert (stage.wire.state, stage.load) == (WireState.OVER, (0, 0))


def test_the_fleet_learns_of_a_first_token_in_whose_call_the_attempt_ends() -> None:
    """An answer that cannot be begun is stopped by the race, before the fleet is told of the first token."""
    stage = Stage()
    stage.fleet.on_sent("earlier", candidate(), PoolEstimate(100), stage.wire.times.opened - 1, True)
    assert not stage.fleet.view.overtaken("earlier")
    assert stage.wire.on_body(TOKEN) is Milestone.FIRST_TOKEN
    stage.wire.fail(failures.NOT_JSON)
    assert stage.fleet.view.overtaken("earlier")
    assert stage.fleet.endings == [AttemptOutcome.FAILED]


async def test_cancelling_closes_the_connection_at_once() -> None:
    """The closed connection stops the engine."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), GATE]) as upstream:
        stage = Stage(status=0)
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        stage.wire.on_sent(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.sink))
        await turn_until(lambda: stage.firsts)
        stage.wire.stop(AttemptOutcome.CANCELLED)
        upstream.proceed()
        await upstream.until(lambda seen: seen.hangups == 1)
    assert (stage.fleet.endings, origin.active) == ([AttemptOutcome.CANCELLED], 0)


def test_pause_and_resume_reach_a_running_exchange() -> None:
    """No effect before sending or after the end."""
    stage, exchange = Stage(), RecordingExchange()
    stage.wire.pause()
    stage.wire.on_sent(exchange)
    stage.wire.pause()
    stage.wire.resume()
    stage.reads(ANSWER).ends()
    stage.wire.pause()
    stage.wire.resume()
    assert exchange.steps == ["pause", "resume"]
