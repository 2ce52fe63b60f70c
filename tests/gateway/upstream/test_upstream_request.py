"""One attempt: buffered until the first token, passed on from there, and ended once."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import pytest

from backends import failures
from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind, HttpCall
from gateway.upstream.upstream_request import MAX_ERROR, MAX_HELD, UpstreamRequest
from policies.types import AttemptOutcome, PoolEstimate
from tests.gateway.builders import (
    ANSWER,
    DONE,
    ERROR,
    FINISH,
    PREAMBLE,
    TOKEN,
    USAGE,
    WHOLE,
    RecordingExchange,
    RecordingFleet,
    RecordingListener,
    RecordingSink,
    candidate,
    run,
)
from tests.support.upstream import GATE, STREAM_HEAD, Upstream, chunk, turn_until

pytestmark = pytest.mark.source  # RecordingFleet inherits from a compiled class

EMPTY_DELTA = b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'
QUOTING = b'data: {"error":{"message":"wrong key sk-backend","type":"server_error","code":500}}\n\n'
COMMENT = b": keep-alive\n\n"
RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")
REFUSED = Failure(FailureKind.CONNECT, "The backend refused the connection.")


class Attaches(RecordingListener):
    """Attaches a body sink in the call of the first token, like the dispatcher."""

    def __init__(self, reader: RecordingSink) -> None:
        super().__init__()
        self.reader = reader

    def first_token(self, run: UpstreamRequest) -> None:
        super().first_token(run)
        self.reader.reads.append(run.take_buffered())
        run.body_sink = self.reader


class Stage:
    """An attempt with its fleet, listener and body sink."""

    def __init__(self, *, stream: bool = True, status: int = 200) -> None:
        self.fleet, self.reader = RecordingFleet(), RecordingSink()
        self.owner = Attaches(self.reader)
        self.run = run(self.fleet, self.owner, stream=stream)
        if status:
            self.run.on_head(status, {"content-type": "text/event-stream", "retry-after": "7"})

    def reads(self, *parts: bytes) -> Stage:
        for part in parts:
            self.run.on_body(part)
        return self

    def ends(self) -> Stage:
        self.run.on_end()
        return self

    @property
    def failure(self) -> Failure:
        (failure,) = self.owner.failures
        return failure

    @property
    def load(self) -> tuple[int, int]:
        """Attempts in flight in the fleet, and attempts without a token; at the time of sending, as a whole answer
        counts as prefilling for its expected prefill time alone."""
        load = self.fleet.snapshot(self.run.opened).loads["small/a"]
        return load.in_flight, load.prefilling


# --------------------------------------------------------------------------- up to the first token


def test_bytes_before_the_first_token_are_buffered() -> None:
    """A role, an empty delta, a comment, a usage event: no visible output."""
    stage = Stage().reads(PREAMBLE, COMMENT, EMPTY_DELTA, USAGE)
    assert (stage.owner.firsts, stage.run.first_in, stage.load) == ([], None, (1, 1))
    assert stage.run.take_buffered() == PREAMBLE + COMMENT + EMPTY_DELTA + USAGE


def test_the_first_visible_output_commits_once() -> None:
    """The listener and the fleet are called within the read."""
    stage = Stage().reads(PREAMBLE, TOKEN)
    assert (stage.owner.firsts, stage.load) == ([stage.run], (1, 0))
    assert stage.run.first_in is not None
    assert stage.run.opened <= stage.run.first_in <= monotonic()
    stage.reads(TOKEN, TOKEN)
    assert stage.owner.firsts == [stage.run]


def test_a_token_split_over_reads_commits_when_complete() -> None:
    """Half an event is no token."""
    stage = Stage().reads(PREAMBLE + TOKEN[:30])
    assert stage.owner.firsts == []
    assert stage.reads(TOKEN[30:]).owner.firsts == [stage.run]
    assert stage.reader.reads == [PREAMBLE + TOKEN]


def test_buffered_bytes_go_first_and_every_later_read_at_once() -> None:
    """Reads are neither joined nor split."""
    stage = Stage().reads(PREAMBLE, TOKEN, TOKEN[:20], TOKEN[20:], FINISH)
    assert stage.reader.reads == [PREAMBLE + TOKEN, TOKEN[:20], TOKEN[20:], FINISH]
    assert stage.run.take_buffered() == b""


def test_an_error_event_before_the_first_token_is_a_failure() -> None:
    """Inside a 200 too: no byte has reached the caller."""
    stage = Stage().reads(PREAMBLE, ERROR)
    assert (stage.failure.kind, stage.owner.firsts) == (FailureKind.SERVER, [])
    assert (stage.fleet.endings, stage.load) == ([AttemptOutcome.FAILED], (0, 0))


def test_a_token_before_an_error_event_commits() -> None:
    """In a single read too. The sink receives one end."""
    stage = Stage().reads(TOKEN + ERROR)
    assert (stage.owner.firsts, stage.owner.failures) == ([stage.run], [])
    assert stage.reader.ends == [stage.run.tap.failure]


def test_a_finished_answer_without_output_is_an_answer() -> None:
    """A model may have nothing to say; another attempt would not be more correct."""
    stage = Stage().reads(PREAMBLE, FINISH, USAGE, DONE).ends()
    assert (stage.owner.firsts, stage.fleet.endings, stage.run.answered) == (
        [stage.run],
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
    assert stage.owner.firsts == []
    assert stage.ends().owner.firsts == [stage.run]


def test_a_preamble_beyond_the_buffer_limit_commits() -> None:
    """The buffer is bounded; an endless stream of comments is passed on."""
    parts = [COMMENT * 1000] * (MAX_HELD // (1000 * len(COMMENT)))
    stage = Stage().reads(*parts)
    assert stage.owner.firsts == []
    assert stage.reads(parts[0]).owner.firsts == [stage.run]


def test_a_whole_answer_commits_at_its_end() -> None:
    """Its arrival is no TTFT, so the fleet learns no first token."""
    stage = Stage(stream=False).reads(WHOLE[:10])
    assert (stage.owner.firsts, stage.load) == ([], (1, 1))
    stage.reads(WHOLE[10:]).ends()
    assert stage.owner.firsts == [stage.run]
    assert (stage.fleet.endings, stage.run.answered, stage.run.output_tokens) == ([AttemptOutcome.COMPLETED], True, 2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"Provider returned error","code":502}}', FailureKind.SERVER),
        (b'{"error":{"message":"slow down","code":429},"choices":[]}', FailureKind.RATE_LIMITED),
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
    assert (stage.failure.kind, stage.owner.firsts) == (kind, [])


def test_a_body_with_choices_and_error_is_an_answer() -> None:
    """A list of choices has been paid for."""
    stage = Stage(stream=False).reads(b'{"error":{"message":"m"},' + WHOLE[1:]).ends()
    assert stage.owner.firsts == [stage.run]


def test_a_compressed_answer_is_passed_on_uninspected() -> None:
    """Only the caller can decode the body."""
    stage = Stage(stream=False)
    stage.run.on_head(200, {"content-encoding": "gzip"})
    assert stage.reads(b"\x1f\x8b").ends().owner.firsts == [stage.run]


def test_an_html_reply_to_a_stream_fails_at_its_head() -> None:
    """No token can follow."""
    stage = Stage(status=0)
    stage.run.on_head(200, {"content-type": "text/html; charset=utf-8"})
    assert stage.failure.kind is FailureKind.PROTOCOL


async def test_an_idle_whole_answer_fails() -> None:
    """No byte has reached the caller, so another endpoint is tried."""
    stage = Stage(stream=False)
    stage.run.idle = 0.05
    stage.reads(WHOLE[:10])
    await turn_until(lambda: stage.owner.failures)
    assert stage.failure.kind is FailureKind.TIMEOUT


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
        stage.run.model_is_callers = callers
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
        (429, AttemptOutcome.RATE_LIMITED, FailureKind.RATE_LIMITED),
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
    assert (stage.failure.kind, stage.fleet.endings, stage.owner.firsts) == (kind, [ending], [])
    assert stage.failure.message == "no such thing" or kind is not FailureKind.CLIENT


def test_a_stream_in_an_error_reply_is_no_answer() -> None:
    """The status counts first."""
    stage = Stage(status=500).reads(ANSWER).ends()
    assert (stage.owner.firsts, stage.failure.kind) == ([], FailureKind.SERVER)


def test_the_kept_body_of_an_error_reply_is_bounded() -> None:
    """The error is at the beginning."""
    stage = Stage(status=400).reads(*[b"x" * 10_000] * 1000)
    assert stage.run.buffered_bytes < MAX_ERROR + 10_000
    assert stage.ends().failure.kind is FailureKind.CLIENT


def test_retry_after_blocks_the_endpoint() -> None:
    """For all requests, not only this one."""
    stage = Stage(status=429).ends()
    assert stage.fleet.reports[0].retry_after == 7.0
    assert stage.fleet.loads()["small/a"].blocked_until == pytest.approx(monotonic() + 7.0, abs=1.0)


@pytest.mark.parametrize(
    ("status", "failure", "reached"),
    [(0, REFUSED, False), (0, RESET, False), (200, RESET, True), (0, failures.TIMED_OUT, True), (200, REFUSED, True)],
)
def test_an_endpoint_counts_as_reached_unless_refused_or_reset_before_the_first_byte(
    status: int, failure: Failure, reached: bool
) -> None:
    """Refusals and resets without a byte are signs of a dead server."""
    stage = Stage(status=status)
    stage.run.on_failure(failure)
    assert (stage.failure, stage.fleet.endings) == (failure, [AttemptOutcome.FAILED])
    assert stage.fleet.reports[0].connected is reached


# --------------------------------------------------------------------------- after the commit


def test_an_end_of_body_without_finish_or_done_is_broken() -> None:
    """The sink is called at the end and reads the outcome."""
    stage = Stage().reads(TOKEN).ends()
    assert (stage.fleet.endings, stage.run.answered, stage.reader.ends) == ([AttemptOutcome.BROKEN], False, [None])


@pytest.mark.parametrize("last", [FINISH, DONE, FINISH + DONE])
def test_a_finish_reason_or_done_completes_a_stream(last: bytes) -> None:
    """Some servers never send [DONE], some never a finish reason."""
    stage = Stage().reads(TOKEN).reads(last).ends()
    assert (stage.fleet.endings, stage.run.answered, stage.reader.ends) == ([AttemptOutcome.COMPLETED], True, [None])


def test_a_connection_lost_after_the_commit_breaks_the_stream() -> None:
    """The sink receives the failure, the dispatcher none."""
    stage = Stage().reads(TOKEN)
    stage.run.on_failure(RESET)
    assert (stage.fleet.endings, stage.reader.ends, stage.owner.failures) == ([AttemptOutcome.BROKEN], [RESET], [])


@pytest.mark.parametrize("reads", [(TOKEN, QUOTING), (TOKEN + QUOTING,)], ids=["behind a token", "with it"])
def test_the_backend_key_in_an_error_event_is_masked(reads: tuple[bytes, ...]) -> None:
    """Some backends quote keys. Other bytes are unchanged."""
    stage = Stage()
    for read in reads:
        stage.run.on_body(read)
    assert b"".join(stage.reader.reads) == TOKEN + QUOTING.replace(b"sk-backend", b"*" * 10)


def test_an_error_event_after_the_commit_ends_the_stream() -> None:
    """Without the [DONE] that vLLM sends after the error."""
    stage = Stage().reads(TOKEN).reads(ERROR + DONE)
    assert (b"".join(stage.reader.reads), stage.reader.ends) == (TOKEN + ERROR, [stage.run.tap.failure])
    assert (stage.fleet.endings, stage.run.over) == ([AttemptOutcome.BROKEN], True)


# --------------------------------------------------------------------------- one end


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        (lambda r: (r.on_body(ANSWER), r.on_end()), AttemptOutcome.COMPLETED),
        (lambda r: (r.on_body(TOKEN), r.on_end()), AttemptOutcome.BROKEN),
        (lambda r: (r.on_body(TOKEN), r.on_failure(RESET)), AttemptOutcome.BROKEN),
        (lambda r: r.on_failure(RESET), AttemptOutcome.FAILED),
        (lambda r: r.on_body(ERROR), AttemptOutcome.FAILED),
        (lambda r: r.cancel(), AttemptOutcome.CANCELLED),
        (lambda r: r.stop(AttemptOutcome.SILENT), AttemptOutcome.SILENT),
        (lambda r: r.stop_if_open(), AttemptOutcome.CANCELLED),
    ],
)
def test_an_attempt_ends_once(first: Callable[[UpstreamRequest], object], ending: AttemptOutcome) -> None:
    """The fleet receives one outcome, at one time, after any later calls."""
    stage = Stage()
    first(stage.run)
    ended_at = stage.run.ended_at
    for late in (UpstreamRequest.cancel, UpstreamRequest.stop_if_open, lambda r: r.stop(AttemptOutcome.SILENT)):
        late(stage.run)
    assert (stage.fleet.endings, stage.run.ending, stage.run.ended_at) == ([ending], ending, ended_at)
    assert stage.run.opened <= ended_at <= monotonic()
    assert (stage.run.over, stage.load) == (True, (0, 0))


def test_the_fleet_learns_of_a_first_token_in_whose_call_the_attempt_ends() -> None:
    """A continuation that diverges at once is stopped by the relay, before the fleet is told of the first token."""
    stage = Stage()
    stage.owner.first_token = lambda run: run.stop(AttemptOutcome.BROKEN)  # type: ignore[method-assign]
    stage.fleet.on_sent("earlier", candidate(), PoolEstimate(100), stage.run.opened - 1, True)
    assert not stage.fleet.overtaken("earlier")
    stage.reads(TOKEN)
    assert stage.fleet.overtaken("earlier")
    assert stage.fleet.endings == [AttemptOutcome.BROKEN]


async def test_cancelling_closes_the_connection_at_once() -> None:
    """The closed connection stops the engine."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), GATE]) as upstream:
        stage = Stage(status=0)
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        stage.run.sent_on(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.run))
        await turn_until(lambda: stage.owner.firsts)
        stage.run.cancel()
        upstream.proceed()
        await upstream.until(lambda seen: seen.hangups == 1)
    assert (stage.fleet.endings, origin.active) == ([AttemptOutcome.CANCELLED], 0)


def test_pause_and_resume_reach_a_running_exchange() -> None:
    """No effect before sending or after the end."""
    stage, exchange = Stage(), RecordingExchange()
    stage.run.pause()
    stage.run.sent_on(exchange)
    stage.run.pause()
    stage.run.resume()
    stage.reads(ANSWER).ends()
    stage.run.pause()
    stage.run.resume()
    assert exchange.steps == ["pause", "resume"]


# --------------------------------------------------------------------------- measurements


async def test_connecting_and_sending_are_timed_separately() -> None:
    """A reused connection has no connect time; a new connection's lies between opened and sent."""
    async with Upstream([STREAM_HEAD + chunk(ANSWER) + b"0\r\n\r\n"]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        seen: list[UpstreamRequest] = []
        for _ in range(2):
            stage = Stage(status=0)
            stage.run.sent_on(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.run))
            seen.append(stage.run)
            await turn_until(lambda: seen[-1].over)
        await origin.close()
    fresh, reused = seen
    assert fresh.opened < fresh.connected <= fresh.sent
    assert reused.opened == reused.connected <= reused.sent


def test_the_engines_usage_is_reported() -> None:
    """Prompt, cached and completion tokens by the engine's count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH, USAGE, DONE).ends()
    report = stage.fleet.reports[0]
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 4, 2)
    assert stage.run.output_tokens == 2


def test_without_usage_content_chunks_are_counted() -> None:
    """Near enough for metering."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH).ends()
    assert (stage.run.output_tokens, stage.fleet.reports[0].completion_tokens) == (3, None)


def test_the_engines_own_times_are_preferred() -> None:
    """Without the network in between."""
    timed = b'data: {"choices":[],"usage":{"completion_tokens":3},"metrics":{"mean_itl_ms":12.5,"queue_time_ms":20,"time_to_first_token_ms":80}}\n\n'  # noqa: E501
    report = Stage().reads(TOKEN, TOKEN, FINISH, timed).ends().fleet.reports[0]
    assert (report.mean_itl, report.engine_ttft) == (0.0125, 0.1)


def test_tpot_is_the_time_between_the_first_and_the_last_token() -> None:
    """Divided by the tokens after the first; later events do not count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN)
    first, last = stage.run.first_in, stage.run.last_token
    assert first is not None
    stage.reads(FINISH, COMMENT).ends()
    assert stage.run.tpot() == (last - first) / 2 == stage.fleet.reports[0].mean_itl


@pytest.mark.parametrize(("stream", "parts"), [(True, [TOKEN, FINISH]), (True, []), (False, [WHOLE])])
def test_tpot_needs_a_stream_of_two_tokens(stream: bool, parts: list[bytes]) -> None:
    """Otherwise there is no gap to measure."""
    assert Stage(stream=stream).reads(*parts).run.tpot() is None
