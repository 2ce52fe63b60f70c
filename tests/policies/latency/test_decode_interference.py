"""Expected TPOT misses and TPOT pressure: the price of a prefill for the answers in progress."""

from __future__ import annotations

from itertools import pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency.tpot import (
    ALONE_MULTIPLE,
    FIRST_SHARE,
    MAX_SHARE,
    MIN_SHARE,
    REST_MULTIPLE,
    STALL_GRID,
    TARGET_MISS_RATE,
    TIME_CONSTANT,
    DecodeInterference,
    DecodingAnswer,
    RestTpot,
    expected_tpot_misses,
    reopens_in,
)
from policies.types import FOREVER, Load

PACE = 0.02  # s per token without any prefill
REST = RestTpot(PACE, PACE, PACE)


def decoding(
    *answers: tuple[float | None, float, int], expected: float = 100.0, pace: float = PACE
) -> DecodeInterference:
    """Answers as of 100 s, each with TPOT budget (s), age (s) and number of tokens."""
    stall = DecodeInterference()
    for key, (budgeted, age, tokens) in enumerate(answers):
        answer = DecodingAnswer(budgeted, expected, context=1000)
        stall.on_first_token(key, answer, 100.0 - age)
        answer.tokens = tokens
    stall.update(RestTpot(pace, pace, pace), 100.0)
    return stall


def misses_after(stall: DecodeInterference, seconds: float) -> float:
    return expected_tpot_misses(
        Load(expected_tpot_misses=stall.expected_tpot_misses, stalled=stall.unaccounted_s), seconds
    )


# --------------------------------------------------------------------------- expected misses


def test_an_answer_ahead_of_its_tpot_budget_bears_an_equal_stall() -> None:
    """50 tokens at 0.05 s are 2.5 s. Decoded in 1.6 s, the answer is 0.9 s ahead; TPOT is an average."""
    stall = decoding((0.05, 1.6, 50))
    assert misses_after(stall, 0.8) == 0.0
    assert misses_after(stall, 1.6) > 0.0


def test_an_answer_behind_its_tpot_budget_may_catch_up() -> None:
    """0.6 s behind, with 0.03 s gained per token: 20 of the 100 expected tokens are needed."""
    stall = decoding((0.05, 2.3, 50))
    assert misses_after(stall, 0.8) == pytest.approx(1 - exp(-20 / 100))


def test_a_stall_costs_an_answer_only_its_remaining_probability() -> None:
    """0.3 s behind, and then 0.7 s: 10 tokens to catch up, and then 23.3."""
    stall = decoding((0.05, 2.8, 50))
    assert misses_after(stall, 0.4) == pytest.approx(exp(-0.1) - exp(-0.7 / 0.03 / 100))


def test_a_short_answer_is_likelier_to_miss() -> None:
    """The answer ends before it has caught up."""
    answer = (0.05, 2.5, 50)
    assert misses_after(decoding(answer, expected=10), 0.4) > misses_after(decoding(answer, expected=100), 0.4) > 0.0


def test_an_answer_without_a_tpot_budget_cannot_miss() -> None:
    """Nor does the answer count for TPOT pressure."""
    stall = decoding((None, 10.0, 5))
    assert (misses_after(stall, 6.0), stall.tpot_pressure(REST)) == (0.0, 0.0)


@pytest.mark.parametrize("age", [10.0, 2.5, 0.0])
def test_a_promise_lost_at_rest_has_no_expected_misses(age: float) -> None:
    """At any progress of the answer: no prefill is the cause."""
    slow = decoding((0.05, age, 50), pace=0.05)
    assert misses_after(slow, 6.0) == 0.0


def test_expected_misses_fade_out_towards_a_lost_promise() -> None:
    """No step: as the slack at rest shrinks from a fifth of the budget to nothing, so does what the promise counts."""
    misses = [misses_after(decoding((0.05, 2.5, 50), pace=0.05 * share), 1.0) for share in (0.8, 0.85, 0.9, 0.95, 1.0)]
    assert misses == sorted(misses, reverse=True)
    assert max(more - less for more, less in pairwise(misses)) < 0.4 * misses[0]
    assert misses[-1] == 0.0


def test_a_prefill_since_the_last_update_is_subtracted() -> None:
    """The second of two prefills is priced from the state after the first."""
    stall = decoding((0.05, 2.5, 50))
    first, both = misses_after(stall, 0.4), misses_after(stall, 0.8)
    stall.on_prefill(0.4, 100.0)
    assert stall.unaccounted_s == pytest.approx(0.4)
    assert misses_after(stall, 0.4) == pytest.approx(both - first)
    stall.update(REST, 100.0)
    assert stall.unaccounted_s == 0.0


def test_an_engine_without_decoding_answers_has_no_expected_misses() -> None:
    """From the end of the last answer on, without an update."""
    stall = decoding((0.05, 2.5, 50), (0.05, 2.5, 50))
    stall.on_ended(0)
    assert misses_after(stall, 0.4) > 0.0
    stall.on_ended(1)
    assert misses_after(stall, 0.4) == 0.0


answers = st.tuples(st.sampled_from([None, 0.025, 0.05]), st.floats(0, 50), st.integers(1, 2000))


@given(st.lists(answers, max_size=6), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(1, 1000))
def test_expected_misses_grow_with_the_stall_and_never_exceed_the_answers(
    found: list[tuple[float | None, float, int]], seconds: float, more: float, before: float, expected: float
) -> None:
    """After any earlier prefill."""
    stall = decoding(*found, expected=expected)
    stall.on_prefill(before, 100.0)
    little, much = misses_after(stall, seconds), misses_after(stall, seconds + more)
    budgeted = sum(pace is not None for pace, _, _ in found)
    assert -1e-9 <= little <= much + 1e-9
    assert much <= budgeted + 1e-9


def test_expected_misses_are_interpolated_between_grid_points() -> None:
    """Beyond the last point, constant."""
    load = Load(expected_tpot_misses=tuple(float(i + 1) for i in range(len(STALL_GRID))))
    assert expected_tpot_misses(load, STALL_GRID[0] / 2) == pytest.approx(0.5)
    assert expected_tpot_misses(load, (STALL_GRID[2] + STALL_GRID[3]) / 2) == pytest.approx(3.5)
    assert expected_tpot_misses(load, 100.0) == len(STALL_GRID)
    assert expected_tpot_misses(Load(), 1.0) == 0.0


# --------------------------------------------------------------------------- TPOT pressure


def stretch(
    stall: DecodeInterference, answer: DecodingAnswer, token: float, seconds: float, since: float = 0.0
) -> None:
    """Decodes at `token` seconds a token, with five updates a second."""
    steps = round(seconds / 0.2)
    begun = answer.tokens
    for step in range(1, steps + 1):
        answer.tokens = begun + round(step * 0.2 / token)
        stall.update(REST, since + step * 0.2)


def began(pace: float | None = 0.05) -> tuple[DecodeInterference, DecodingAnswer]:
    stall, answer = DecodeInterference(), DecodingAnswer(pace, 100.0, 1000)
    stall.on_first_token("a", answer, 0.0)
    return stall, answer


@pytest.mark.parametrize("token", [0.025, 0.05, 0.1])
def test_tpot_pressure_is_recent_tpot_over_the_usable_budget(token: float) -> None:
    """The usable budget is a learned share, a little below the TPOT budget."""
    stall, answer = began()
    stretch(stall, answer, token, 60)
    assert stall.tpot_pressure(REST) == pytest.approx(token / 0.05 / stall.tpot_share, rel=0.02)


def test_tpot_pressure_is_of_the_tightest_budget() -> None:
    """All answers get tokens from the same steps."""
    stall, answer = began(0.05)
    stretch(stall, answer, 0.04, 60)
    alone = stall.tpot_pressure(REST)
    stall.on_first_token("b", DecodingAnswer(0.04, 100.0, 1000), 60.0)
    stall.on_first_token("c", DecodingAnswer(0.04, 100.0, 1000), 60.0)
    assert stall.tpot_pressure(REST) == pytest.approx(1.25 * alone)
    stall.on_ended("b")
    assert stall.tpot_pressure(REST) == pytest.approx(1.25 * alone)
    stall.on_ended("c")
    assert stall.tpot_pressure(REST) == alone


def at_limit(*budgets: float, alone: float, now: float) -> float:
    """Seconds per token that answers with these budgets bear."""
    stall = DecodeInterference()
    for key, budget in enumerate(budgets):
        stall.on_first_token(key, DecodingAnswer(budget, 100.0, 1000), 0.0)
    return stall.tpot_limit(RestTpot(alone, now))


def test_a_lost_promise_is_measured_against_the_engine_at_rest() -> None:
    """Beside the answers in progress: decoding alone never closes the engine, prefills still may."""
    assert at_limit(0.05, alone=0.05, now=0.07) == pytest.approx(REST_MULTIPLE * 0.07)
    assert at_limit(0.05, alone=0.5, now=0.7) == pytest.approx(REST_MULTIPLE * 0.7)


def test_a_promise_that_can_be_kept_limits_to_its_usable_share() -> None:
    """However many answers decode, and never below the pace of an answer alone."""
    assert at_limit(0.05, alone=0.03, now=0.06) == FIRST_SHARE * 0.05
    assert at_limit(0.05, alone=0.039, now=0.06) == pytest.approx(ALONE_MULTIPLE * 0.039)


@given(st.floats(0.01, 0.2), st.floats(1.0, 4.0))
def test_the_limit_has_no_step(alone: float, batch: float) -> None:
    """A predictor that is wrong by a hundredth moves the limit by at most a twentieth of its full range."""
    limit, slower = (at_limit(0.05, alone=alone * factor, now=alone * batch * factor) for factor in (1.0, 1.01))
    assert limit >= ALONE_MULTIPLE * alone
    assert -1e-9 <= slower - limit <= 0.06 * REST_MULTIPLE * alone * batch


@pytest.mark.parametrize("tiny", [1e-6, 5e-324, 0.0])
def test_a_tiny_budget_hides_no_other(tiny: float) -> None:
    """A caller who asks for the impossible neither closes the engine nor opens it at the expense of others."""
    assert at_limit(0.05, tiny, alone=PACE, now=PACE) == at_limit(0.05, alone=PACE, now=PACE)


def test_tokens_are_counted_as_the_engine_counts_them() -> None:
    """A server that sends several tokens per chunk is faster than its chunks show. Short answers do not count."""
    stall, answer = began(0.05)
    for number in range(60):
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000, tokens=50), 0.0)
        stall.on_ended(number, tokens=200)
    for number, (counted, tokens) in enumerate([(15, 1500), (50, None), (50, 200)]):
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000, tokens=counted), 0.0)
        stall.on_ended(number, tokens=tokens)
    stretch(stall, answer, 0.2, 60)
    assert stall.tpot_pressure(REST) == pytest.approx(1 / stall.tpot_share, rel=0.02)


def test_the_first_answer_tells_all_about_the_tokens_of_an_event() -> None:
    """Later answers move the mean, the latest by an eighth at least; without one an event is a token."""
    stall, seen = began(0.05)[0], [1.0]
    for number, tokens in enumerate((400, 200)):
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000, tokens=50), 0.0)
        stall.on_ended(number, tokens=tokens)
        seen.append(stall.tokens_per_event)
    assert seen == [1.0, 8.0, 6.0]


def test_one_absurd_report_of_tokens_hides_no_pace_for_long() -> None:
    """10**12 tokens in an answer of 50 chunks: after forty answers a chunk is a token again, or nearly."""
    stall, answer = began(0.05)
    for number in range(40):
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000, tokens=50), 0.0)
        stall.on_ended(number, tokens=50 if number else 10**12)
    stretch(stall, answer, 0.05, 60)
    assert stall.tpot_pressure(REST) == pytest.approx(1 / stall.tpot_share, rel=0.15)


@pytest.mark.parametrize("budget", [1e-6, 5e-324, 0.0])
def test_an_engine_of_unknown_pace_bears_a_tiny_budget(budget: float) -> None:
    """An answer alone takes no time, as far as is known: the pressure is a number all the same."""
    stall = decoding((budget, 1.0, 50))
    assert 0 < stall.tpot_pressure(RestTpot(0.0, 0.0)) < FOREVER


def test_tpot_pressure_decays_within_a_few_time_constants() -> None:
    """Three time constants leave a twentieth of the old value."""
    stall, answer = began()
    stretch(stall, answer, 0.1, 60)
    stretch(stall, answer, 0.025, 3 * TIME_CONSTANT, since=60.0)
    assert stall.tpot_pressure(REST) == pytest.approx(0.5 / stall.tpot_share, rel=0.1)


def test_an_engine_receives_no_prefill_until_its_answers_have_caught_up() -> None:
    """Longer with a prefill in dispatch. An engine at half the limit bears TIME_CONSTANT seconds of prefill."""
    assert (reopens_in(1.0, 0.0), reopens_in(0.5, TIME_CONSTANT)) == (0.0, 0.0)
    assert reopens_in(1.2, 0.0) == pytest.approx(0.2 * TIME_CONSTANT)
    assert reopens_in(1.2, 1.0) == pytest.approx(1.2 + 0.2 * TIME_CONSTANT)


# --------------------------------------------------------------------------- usable share of the budget


def settled(sensitive: float, answers: int = 40_000) -> tuple[DecodeInterference, float]:
    """Answers miss the more often, the higher the limit is; returns the miss rate of the latter half."""
    stall, random, missed = DecodeInterference(), Random(1), 0
    for number in range(answers):
        misses = random.random() < sensitive * max(stall.tpot_share - 0.5, 0.0)
        missed += misses and number >= answers // 2
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000), 0.0)
        stall.on_ended(number, 0.06 if misses else 0.04)
    return stall, missed / (answers // 2)


@pytest.mark.parametrize("sensitive", [0.1, 0.3, 0.8])
def test_the_usable_share_settles_at_the_target_miss_rate(sensitive: float) -> None:
    """1 in 50: a fleet without any miss prefills too little."""
    _, missed = settled(sensitive)
    assert missed == pytest.approx(TARGET_MISS_RATE, rel=0.15)


@pytest.mark.parametrize(("tpot", "limit"), [(0.01, MAX_SHARE), (0.9, MIN_SHARE)])
def test_the_usable_share_is_bounded(tpot: float, limit: float) -> None:
    """For any TPOT of answers: no engine is closed for good, and the budget always counts."""
    stall = DecodeInterference()
    for number in range(1000):
        stall.on_first_token(number, DecodingAnswer(0.05, 100.0, 1000), 0.0)
        stall.on_ended(number, tpot)
    assert stall.tpot_share == limit


@pytest.mark.parametrize(("pace", "tpot"), [(None, 9.0), (0.05, None)])
def test_answers_without_a_budget_or_a_tpot_teach_nothing(pace: float | None, tpot: float | None) -> None:
    """An answer of one token has no TPOT."""
    stall = DecodeInterference()
    stall.on_first_token("a", DecodingAnswer(pace, 100.0, 1000), 0.0)
    stall.on_ended("a", tpot)
    assert stall.tpot_share == FIRST_SHARE


def test_a_lost_promise_teaches_nothing() -> None:
    """The share that other answers use stays as it is."""
    stall = decoding((0.05, 1.0, 50), pace=0.05)
    stall.on_ended(0, 0.2)
    assert stall.tpot_share == FIRST_SHARE


# --------------------------------------------------------------------------- bookkeeping


def test_the_context_counts_answers_in_progress() -> None:
    """Ends of finished or unknown answers change nothing."""
    stall = decoding((0.05, 1.0, 50), (None, 1.0, 50))
    assert stall.context == 2000
    for key in (0, 0, "nobody"):
        stall.on_ended(key)
    assert (stall.context, len(stall.answers)) == (1000, 1)


def test_prefill_utilization_is_the_recent_share_of_time_spent_on_prefills() -> None:
    """0.1 s in every 0.2 s are 50%; the value decays, and never exceeds 100%."""
    stall = DecodeInterference()
    for step in range(500):
        stall.on_prefill(0.1, step * 0.2)
    assert stall.prefill_utilization(100.0) == pytest.approx(0.5, rel=0.03)
    assert stall.prefill_utilization(100.0 + 3 * TIME_CONSTANT) < 0.03
    stall.on_prefill(1000.0, 200.0)
    assert stall.prefill_utilization(200.0) == 1.0
