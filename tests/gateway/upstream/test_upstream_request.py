"""One attempt: held until its first token, passed on from there, and ended once."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import pytest

from backends import failures
from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind, HttpCall
from gateway.upstream.upstream_request import MAX_ERROR, MAX_HELD, UpstreamRequest
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
    RecordingExchange,
    RecordingFleet,
    RecordingListener,
    RecordingSink,
    run,
)
from tests.support.upstream import GATE, STREAM_HEAD, Upstream, chunk, turn_until

EMPTY_DELTA = b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'
QUOTING = b'data: {"error":{"message":"wrong key sk-backend","type":"server_error","code":500}}\n\n'
COMMENT = b": keep-alive\n\n"
RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")
REFUSED = Failure(FailureKind.CONNECT, "The backend refused the connection.")


class Attaches(RecordingListener):
    """Gives what has its first token to its reader, in the same call, as the dispatcher does."""

    def __init__(self, reader: RecordingSink) -> None:
        super().__init__()
        self.reader = reader

    def first_token(self, run: UpstreamRequest) -> None:
        super().first_token(run)
        self.reader.reads.append(run.take_buffered())
        run.body_sink = self.reader


class Stage:
    """An attempt, all who hear of it, and what came of it."""

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
        """Attempts that the fleet counts as open, and of these those without a token."""
        load = self.fleet.loads()["small/a"]
        return load.in_flight, load.prefilling


# --------------------------------------------------------------------------- up to the first token


def test_what_is_no_token_is_held() -> None:
    """A role, an empty delta, a comment, a usage event: nothing that anybody could see has come."""
    stage = Stage().reads(PREAMBLE, COMMENT, EMPTY_DELTA, USAGE)
    assert (stage.owner.firsts, stage.run.first_in, stage.load) == ([], None, (1, 1))
    assert stage.run.take_buffered() == PREAMBLE + COMMENT + EMPTY_DELTA + USAGE


def test_the_first_visible_output_commits_once() -> None:
    """Its owner hears of it in the same call, and the fleet that the engine's queue has moved."""
    stage = Stage().reads(PREAMBLE, TOKEN)
    assert (stage.owner.firsts, stage.load) == ([stage.run], (1, 0))
    assert stage.run.first_in is not None
    assert stage.run.opened <= stage.run.first_in <= monotonic()
    stage.reads(TOKEN, TOKEN)
    assert stage.owner.firsts == [stage.run]


def test_a_token_torn_over_reads_commits_when_it_is_complete() -> None:
    """Half an event is no token."""
    stage = Stage().reads(PREAMBLE + TOKEN[:30])
    assert stage.owner.firsts == []
    assert stage.reads(TOKEN[30:]).owner.firsts == [stage.run]
    assert stage.reader.reads == [PREAMBLE + TOKEN]


def test_what_was_held_goes_first_and_every_later_read_in_its_own_call() -> None:
    """As they came: a chunk is never put together with another, nor cut."""
    stage = Stage().reads(PREAMBLE, TOKEN, TOKEN[:20], TOKEN[20:], FINISH)
    assert stage.reader.reads == [PREAMBLE + TOKEN, TOKEN[:20], TOKEN[20:], FINISH]
    assert stage.run.take_buffered() == b""


def test_an_error_event_before_the_first_token_fails_over() -> None:
    """Inside a 200, too: nobody has seen anything yet."""
    stage = Stage().reads(PREAMBLE, ERROR)
    assert (stage.failure.kind, stage.owner.firsts) == (FailureKind.SERVER, [])
    assert (stage.fleet.endings, stage.load) == ([AttemptOutcome.FAILED], (0, 0))


def test_a_token_before_an_error_event_commits() -> None:
    """Even in one read: it is no longer ours to mend, and its receiver hears of it once."""
    stage = Stage().reads(TOKEN + ERROR)
    assert (stage.owner.firsts, stage.owner.failures) == ([stage.run], [])
    assert stage.reader.ends == [stage.run.tap.failure]


def test_an_answer_without_output_that_says_it_is_over_is_an_answer() -> None:
    """A model may have nothing to say; asking another would not be more honest."""
    stage = Stage().reads(PREAMBLE, FINISH, USAGE, DONE).ends()
    assert (stage.owner.firsts, stage.fleet.endings, stage.run.answered) == (
        [stage.run],
        [AttemptOutcome.COMPLETED],
        True,
    )


@pytest.mark.parametrize("parts", [(), (PREAMBLE,), (PREAMBLE, USAGE), (TOKEN[:30],)])
def test_a_reply_that_ends_before_its_first_token_has_failed(parts: tuple[bytes, ...]) -> None:
    """It did not say that it was over, so somebody else is asked."""
    stage = Stage().reads(*parts).ends()
    assert (stage.failure.kind, stage.fleet.endings) == (FailureKind.PROTOCOL, [AttemptOutcome.FAILED])


def test_an_answer_without_its_last_blank_line_is_found_at_the_end() -> None:
    """The specification drops it; OpenAI's own clients read it."""
    stage = Stage().reads(b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}')
    assert stage.owner.firsts == []
    assert stage.ends().owner.firsts == [stage.run]


def test_a_preamble_without_end_counts_as_an_answer() -> None:
    """What may be held is bounded; a stream of comments is passed on rather than collected."""
    parts = [COMMENT * 1000] * (MAX_HELD // (1000 * len(COMMENT)))
    stage = Stage().reads(*parts)
    assert stage.owner.firsts == []
    assert stage.reads(parts[0]).owner.firsts == [stage.run]


def test_an_answer_that_is_not_streamed_commits_at_its_end() -> None:
    """It is judged then; when it came is no time to first token, so the fleet learns nothing from it."""
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
    """OpenRouter documents errors inside a 200; proxies answer with pages."""
    stage = Stage(stream=stream).reads(body).ends()
    assert (stage.failure.kind, stage.owner.firsts) == (kind, [])


def test_an_answer_beside_an_error_is_an_answer() -> None:
    """A list of choices has been paid for."""
    stage = Stage(stream=False).reads(b'{"error":{"message":"m"},' + WHOLE[1:]).ends()
    assert stage.owner.firsts == [stage.run]


def test_a_compressed_answer_is_passed_on_unjudged() -> None:
    """Only its reader can decode it."""
    stage = Stage(stream=False)
    stage.run.on_head(200, {"content-encoding": "gzip"})
    assert stage.reads(b"\x1f\x8b").ends().owner.firsts == [stage.run]


def test_a_page_in_place_of_a_stream_fails_at_its_head() -> None:
    """No token will ever come."""
    stage = Stage(status=0)
    stage.run.on_head(200, {"content-type": "text/html; charset=utf-8"})
    assert stage.failure.kind is FailureKind.PROTOCOL


async def test_an_answer_that_stops_half_way_is_given_up() -> None:
    """Nobody has seen it: another endpoint is asked."""
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
def test_an_unknown_model_is_the_fault_of_whoever_named_it(
    callers: bool, status: int, kind: FailureKind, ending: AttemptOutcome
) -> None:
    """The configuration, or with a passthrough the caller."""
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
def test_an_error_reply_is_read_whole_and_means_what_its_dialect_says(
    status: int, ending: AttemptOutcome, kind: FailureKind
) -> None:
    """Overload is not illness, and a request's own mistake says nothing against the endpoint."""
    stage = Stage(status=status).reads(b'{"error":{"message":"no such ', b'thing"}}').ends()
    assert (stage.failure.kind, stage.fleet.endings, stage.owner.firsts) == (kind, [ending], [])
    assert stage.failure.message == "no such thing" or kind is not FailureKind.CLIENT


def test_an_error_reply_that_looks_like_a_stream_is_none() -> None:
    """The status is read first."""
    stage = Stage(status=500).reads(ANSWER).ends()
    assert (stage.owner.firsts, stage.failure.kind) == ([], FailureKind.SERVER)


def test_of_an_error_reply_only_so_much_is_kept() -> None:
    """Its meaning is at its beginning."""
    stage = Stage(status=400).reads(*[b"x" * 10_000] * 1000)
    assert stage.run.buffered_bytes < MAX_ERROR + 10_000
    assert stage.ends().failure.kind is FailureKind.CLIENT


def test_the_wait_that_a_provider_asks_for_reaches_the_fleet() -> None:
    """Retry-After blocks the endpoint, not only this request."""
    stage = Stage(status=429).ends()
    assert stage.fleet.reports[0].retry_after == 7.0
    assert stage.fleet.loads()["small/a"].blocked_until == pytest.approx(monotonic() + 7.0, abs=1.0)


@pytest.mark.parametrize(
    ("status", "failure", "reached"),
    [(0, REFUSED, False), (0, RESET, False), (200, RESET, True), (0, failures.TIMED_OUT, True), (200, REFUSED, True)],
)
def test_an_endpoint_was_reached_if_it_said_anything(status: int, failure: Failure, reached: bool) -> None:
    """Refusals and resets without a byte are what a dead server looks like."""
    stage = Stage(status=status)
    stage.run.on_failure(failure)
    assert (stage.failure, stage.fleet.endings) == (failure, [AttemptOutcome.FAILED])
    assert stage.fleet.reports[0].connected is reached


# --------------------------------------------------------------------------- after the commit


def test_a_stream_that_ends_without_saying_so_is_broken() -> None:
    """Its end of body is no end of answer; the receiver hears of the end and asks whether it was one."""
    stage = Stage().reads(TOKEN).ends()
    assert (stage.fleet.endings, stage.run.answered, stage.reader.ends) == ([AttemptOutcome.BROKEN], False, [None])


@pytest.mark.parametrize("last", [FINISH, DONE, FINISH + DONE])
def test_a_finish_reason_or_done_completes_a_stream(last: bytes) -> None:
    """Either is enough: some servers never send [DONE], some never a finish reason."""
    stage = Stage().reads(TOKEN).reads(last).ends()
    assert (stage.fleet.endings, stage.run.answered, stage.reader.ends) == ([AttemptOutcome.COMPLETED], True, [None])


def test_a_connection_that_dies_under_a_committed_stream_breaks_it() -> None:
    """No failover any more: the receiver says so to the caller."""
    stage = Stage().reads(TOKEN)
    stage.run.on_failure(RESET)
    assert (stage.fleet.endings, stage.reader.ends, stage.owner.failures) == ([AttemptOutcome.BROKEN], [RESET], [])


@pytest.mark.parametrize("reads", [(TOKEN, QUOTING), (TOKEN + QUOTING,)], ids=["behind a token", "with it"])
def test_our_key_in_a_backends_error_event_is_masked(reads: tuple[bytes, ...]) -> None:
    """Some quote it. All else goes on as it was said."""
    stage = Stage()
    for read in reads:
        stage.run.on_body(read)
    assert b"".join(stage.reader.reads) == TOKEN + QUOTING.replace(b"sk-backend", b"*" * 10)


def test_an_error_event_in_mid_stream_is_the_answers_end() -> None:
    """It is passed on, without the [DONE] that vLLM sends after it as if all were well."""
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
    """Whatever is done to it afterwards: the fleet is told of one ending, at one time."""
    stage = Stage()
    first(stage.run)
    ended_at = stage.run.ended_at
    for late in (UpstreamRequest.cancel, UpstreamRequest.stop_if_open, lambda r: r.stop(AttemptOutcome.SILENT)):
        late(stage.run)
    assert (stage.fleet.endings, stage.run.ending, stage.run.ended_at) == ([ending], ending, ended_at)
    assert stage.run.opened <= ended_at <= monotonic()
    assert (stage.run.over, stage.load) == (True, (0, 0))


async def test_cancelling_closes_the_connection_at_once() -> None:
    """So that the engine stops: it hears of it by the connection's end."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), GATE]) as upstream:
        stage = Stage(status=0)
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        stage.run.sent_on(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.run))
        await turn_until(lambda: stage.owner.firsts)
        stage.run.cancel()
        upstream.proceed()
        await upstream.until(lambda seen: seen.hangups == 1)
    assert (stage.fleet.endings, origin.active) == ([AttemptOutcome.CANCELLED], 0)


def test_pausing_reaches_the_exchange_while_it_runs() -> None:
    """And does nothing before the request is sent or after its end."""
    stage, exchange = Stage(), RecordingExchange()
    stage.run.pause()
    stage.run.sent_on(exchange)
    stage.run.pause()
    stage.run.resume()
    stage.reads(ANSWER).ends()
    stage.run.pause()
    stage.run.resume()
    assert exchange.steps == ["pause", "resume"]


# --------------------------------------------------------------------------- what it found out


async def test_connecting_and_sending_are_told_apart() -> None:
    """A reused connection costs no connecting; a new one's share is taken from between opened and sent."""
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
    """Prompt, cached and completion tokens as it counts them."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH, USAGE, DONE).ends()
    report = stage.fleet.reports[0]
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 4, 2)
    assert stage.run.output_tokens == 2


def test_without_usage_tokens_are_counted_as_they_pass() -> None:
    """Which is near enough to meter by."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH).ends()
    assert (stage.run.output_tokens, stage.fleet.reports[0].completion_tokens) == (3, None)


def test_the_engines_own_times_are_preferred_to_ours() -> None:
    """It does not see the network between us."""
    timed = b'data: {"choices":[],"usage":{"completion_tokens":3},"metrics":{"mean_itl_ms":12.5,"queue_time_ms":20,"time_to_first_token_ms":80}}\n\n'  # noqa: E501
    report = Stage().reads(TOKEN, TOKEN, FINISH, timed).ends().fleet.reports[0]
    assert (report.mean_itl, report.engine_ttft) == (0.0125, 0.1)


def test_tpot_is_the_time_between_the_first_and_the_last_token() -> None:
    """Over the tokens after the first; what follows the last token is no token's time."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN)
    first, last = stage.run.first_in, stage.run.last_token
    assert first is not None
    stage.reads(FINISH, COMMENT).ends()
    assert stage.run.tpot() == (last - first) / 2 == stage.fleet.reports[0].mean_itl


@pytest.mark.parametrize(("stream", "parts"), [(True, [TOKEN, FINISH]), (True, []), (False, [WHOLE])])
def test_under_two_tokens_or_in_a_whole_answer_there_is_no_tpot(stream: bool, parts: list[bytes]) -> None:
    """There is no gap to measure."""
    assert Stage(stream=stream).reads(*parts).run.tpot() is None
