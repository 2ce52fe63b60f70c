"""Times and tokens of one attempt."""

from __future__ import annotations

import asyncio

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import HttpCall
from gateway.upstream.attempt import WireAttempt, WireState
from gateway.upstream.attempt_figures import KEPT_GAPS, AttemptTimes
from policies.types import FOREVER
from tests.support.attempt_stage import Stage
from tests.support.builders import ANSWER, DONE, FINISH, TOKEN, USAGE, WHOLE
from tests.support.upstream import STREAM_HEAD, Upstream, chunk, turn_until

pytestmark = pytest.mark.virtual_time

COMMENT = b": keep-alive\n\n"


async def test_connecting_and_sending_are_timed_separately() -> None:
    """A reused connection has no connect time; a new connection's lies between opened and sent."""
    async with Upstream([STREAM_HEAD + chunk(ANSWER) + b"0\r\n\r\n"]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        seen: list[WireAttempt] = []
        for _ in range(2):
            stage = Stage(status=0)
            stage.wire.on_sent(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.sink))
            seen.append(stage.wire)
            await turn_until(lambda: seen[-1].state is WireState.OVER)
        await origin.close()
    fresh, reused = (each.times for each in seen)
    assert fresh.opened < fresh.connected <= (fresh.sent or 0)
    assert reused.opened == reused.connected <= (reused.sent or 0)


def test_the_engines_usage_is_reported() -> None:
    """Prompt, cached and completion tokens by the engine's count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH, USAGE, DONE).ends()
    report = stage.fleet.reports[0]
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 4, 2)
    assert stage.wire.output_tokens == 2


def test_without_usage_content_chunks_are_counted() -> None:
    """Near enough for metering."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH).ends()
    assert (stage.wire.output_tokens, stage.fleet.reports[0].completion_tokens) == (3, None)


def test_without_usage_an_event_with_more_text_than_a_token_counts_by_its_text() -> None:
    """Four bytes a token: an engine that writes eight tokens an event is metered by all of them."""
    several = TOKEN.replace(b"hi", b"x" * 32)
    assert several != TOKEN
    stage = Stage().reads(several, several, several).ends()
    assert stage.wire.output_tokens >= 2 * 8  # the form of the first event is learned


def test_the_engines_own_times_are_preferred() -> None:
    """Without the network in between."""
    timed = b'data: {"choices":[],"usage":{"completion_tokens":3},"metrics":{"mean_itl_ms":12.5,"queue_time_ms":20,"time_to_first_token_ms":80}}\n\n'  # noqa: E501
    report = Stage().reads(TOKEN, TOKEN, FINISH, timed).ends().fleet.reports[0]
    assert (report.mean_itl, report.engine_ttft) == (0.0125, 0.1)


def test_tpot_is_the_time_between_the_first_and_the_last_token() -> None:
    """Divided by the tokens after the first; later events do not count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN)
    first, last = stage.wire.times.first_in, stage.wire.times.last_token
    assert first is not None
    stage.reads(FINISH, COMMENT).ends()
    assert stage.wire.tpot() == (last - first) / 2 == stage.fleet.reports[0].mean_itl


@pytest.mark.parametrize(("stream", "parts"), [(True, [TOKEN, FINISH]), (True, []), (False, [WHOLE])])
def test_tpot_needs_a_stream_of_two_tokens(stream: bool, parts: list[bytes]) -> None:
    """Otherwise there is no gap to measure."""
    assert Stage(stream=stream).reads(*parts).wire.tpot() is None


# --------------------------------------------------------------------------- gaps between tokens


def gaps_of(gaps: list[float]) -> AttemptTimes:
    """Times of an answer whose tokens came with these gaps between them, as a read notes them."""
    times = AttemptTimes(0.0, 0.0)
    for gap in gaps:
        if gap > times.gap_floor:
            times.note_gap(gap)
    return times


def test_longest_and_p99_gap_are_exact_for_1600_tokens() -> None:
    """In any order; of up to 100 gaps the p99 is the longest."""
    gaps = [(each * 7919 % 1600) / 2000 for each in range(1600)]
    found = gaps_of(gaps).gaps(1601)
    assert (found.longest, found.p99) == (max(gaps), sorted(gaps, reverse=True)[15])
    assert gaps_of(gaps[:100]).gaps(101).p99 == max(gaps[:100])


def test_every_gap_above_a_second_is_counted() -> None:
    """Also those below the largest that are kept; a gap of a second is none."""
    found = gaps_of([5.0 + each for each in range(KEPT_GAPS)] + [1.1, 1.0, 0.2, 1.2]).gaps(50)
    assert found.over_1s == KEPT_GAPS + 2


def test_gaps_that_nobody_sees_are_not_kept() -> None:
    """Of 300 gaps two are of interest: the p99 is the third, and is told to be short."""
    found = gaps_of([0.009] * 298 + [0.5, 0.2]).gaps(301)
    assert found == (0.5, None, 0)
    assert gaps_of([0.009] * 198 + [0.5, 0.2]).gaps(201) == (0.5, 0.2, 0)
    assert gaps_of([0.009] * 9).gaps(10) == (None, None, 0)


def test_an_answer_of_one_read_has_no_gap() -> None:
    assert AttemptTimes(0.0, 0.0).gaps(5) == (None, None, 0)


def test_a_continuation_takes_over_the_gaps_of_the_answer_and_ends_its_silence() -> None:
    """The caller reads one answer."""
    before, after = gaps_of([0.4, 1.5]), AttemptTimes(0.0, 0.0)
    before.quiet_since = 10.0
    after.follow(before, 12.5)
    after.note_gap(0.3)
    assert after.gaps(50) == (2.5, 2.5, 2)


def test_a_silence_in_which_the_caller_did_not_read_is_no_gap() -> None:
    times = AttemptTimes(0.0, 0.0)
    times.note_silence(FOREVER, 12.5)
    assert times.gaps(5).longest is None


async def test_gaps_are_between_tokens_and_not_of_a_caller_that_does_not_read() -> None:
    """A comment is no token; the time in which the caller paused the reading is none of the engine's."""
    stage = Stage().reads(TOKEN)
    for seconds, data in ((0.3, COMMENT), (0.4, TOKEN), (0.1, TOKEN)):
        await asyncio.sleep(seconds)
        stage.reads(data)
    stage.wire.pause()
    await asyncio.sleep(9.0)
    stage.wire.resume()
    await asyncio.sleep(0.2)
    stage.reads(TOKEN)
    assert stage.wire.times.gaps(5).longest == pytest.approx(0.7, abs=0.01)
    assert stage.wire.times.long_gaps == 0
