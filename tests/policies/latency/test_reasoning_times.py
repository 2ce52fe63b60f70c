"""Times of reasoning before the answer, learned by route, pool and effort; the answer's first token as the sum."""

from __future__ import annotations

from math import exp
from random import Random
from statistics import NormalDist

import pytest

from policies.latency.answer_lengths import (
    KNOWN_ANSWERS,
    NO_REASONING,
    REASONING_AGE,
    AnswerLengths,
    ReasoningTimes,
    reasoning_forecast,
)
from policies.types import QUANTILES, Forecast
from tests.support.decision_fleet import RATIOS, preset

ROUTE = preset("chat", {"name": "deep", "tiers": ["thinker", "direct"], "ttft": {"of": "answer"}})


def expected(lengths: AnswerLengths, effort: str, now: float = 2.0, pool: str = "thinker") -> Forecast:
    return lengths.expected_reasoning(ROUTE, effort, now)[pool]


def test_a_quantile_is_one_of_the_observed_times() -> None:
    """The (n+1)q-th of n. Without an answer, no reasoning is expected."""
    assert reasoning_forecast([], []) is NO_REASONING
    found = reasoning_forecast([float(seconds) for seconds in range(19)], [])
    assert [found.quantile(share) for share in (0.05, 0.5, 0.9, 0.95)] == [0.0, 9.0, 17.0, 18.0]


def test_old_and_many_times_are_forgotten() -> None:
    """A pool left for its reasoning is tried again; the latest 64 answers count."""
    times = ReasoningTimes()
    times.observe(50.0, 0.0)
    assert times.recent(REASONING_AGE + 1) == []
    for _ in range(64):
        times.observe(1.0, 1.0)
    assert times.recent(1.0) == [1.0] * 64


def test_reasoning_is_expected_for_each_pool_of_a_route() -> None:
    """Each route and pool has times of its own."""
    lengths = AnswerLengths()
    lengths.observe_reasoning("deep", "thinker", "", 4.0, now=1.0)
    lengths.observe_reasoning("other", "direct", "", 9.0, now=1.0)
    assert (expected(lengths, "").p90, expected(lengths, "", pool="direct").p90) == (4.0, 0.0)


def test_a_new_effort_starts_from_all_and_is_known_after_a_few_answers() -> None:
    """Each answer replaces a share of what other efforts took; other efforts are told nothing by it once known."""
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.observe_reasoning("deep", "thinker", "low", 1.0, now=1.0)
    assert expected(lengths, "high").p90 == 1.0
    for answers in range(1, KNOWN_ANSWERS + 1):
        lengths.observe_reasoning("deep", "thinker", "high", 20.0, now=1.0)
        assert expected(lengths, "high").p90 == 20.0
        assert expected(lengths, "high").quantile(0.05) == (1.0 if answers < KNOWN_ANSWERS else 20.0)
    assert expected(lengths, "low").quantile(0.98) == 1.0


def test_a_sum_has_the_median_of_both_and_their_deviations_by_squares() -> None:
    """As of independent times; a certain time is added as it is."""
    first = Forecast(0.5, RATIOS)
    both = first.followed_by(Forecast(2.0))
    assert (both.p50, both.p90) == pytest.approx((first.p50 + 2.0, first.p90 + 2.0))
    same = first.followed_by(first)
    assert same.p90 - same.p50 == pytest.approx(2**0.5 * (first.p90 - first.p50))
    assert (first.followed_by(NO_REASONING).p90, first.followed_by(NO_REASONING).samples) == (first.p90, 0)


TTFT, TTFT_SPREAD, SPREAD = 0.7, 0.35, 0.6  # s; of the first token and of the reasoning, in logarithms
FIRST = Forecast(TTFT, tuple(exp(TTFT_SPREAD * NormalDist().inv_cdf(q)) for q in QUANTILES))


@pytest.mark.parametrize("reasoning", [{"none": 0.0, "low": 0.8}, {"low": 1.5, "medium": 5.0, "high": 20.0}])
def test_nine_of_ten_answers_begin_before_their_p90_at_every_effort(reasoning: dict[str, float]) -> None:
    """A model whose reasoning takes `reasoning` seconds in the median, after a first token of 0.7 s."""
    lengths, random = AnswerLengths(), Random(2)
    kept: dict[str, list[bool]] = {effort: [] for effort in reasoning}
    for number in range(2400):
        now, effort = 2.0 * number, random.choice(list(reasoning))
        ttft = TTFT * random.lognormvariate(0.0, TTFT_SPREAD)
        seconds = reasoning[effort] * random.lognormvariate(0.0, SPREAD)
        kept[effort].append(ttft + seconds <= FIRST.followed_by(expected(lengths, effort, now)).p90)
        lengths.observe_reasoning("deep", "thinker", effort, seconds, now)
    assert all(0.87 <= sum(each) / len(each) <= 0.93 for each in kept.values())
