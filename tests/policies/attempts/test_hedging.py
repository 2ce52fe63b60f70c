"""Moments at which a silent attempt is reconsidered and abandoned."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.patience import GRID, HUNG, abandon_at, leave_by, patience_until
from policies.latency.online_learning import PRIOR
from policies.types import FOREVER, Forecast
from tests.support.decision_fleet import P90, RATIOS

COLD = tuple(map(exp, PRIOR))  # the spread of a forecast without samples


def taking(p50: float, ratios: tuple[float, ...] = RATIOS) -> Forecast:
    return Forecast(p50, ratios, samples=100)


def abandoned_at(own: Forecast, upcoming: Forecast, deadline: float) -> float:
    """The time (s) at which a silent attempt sent at 0 is abandoned."""
    return abandon_at(own, upcoming, 0.0, patience_until(own, upcoming.p50, 0.0, deadline), deadline)


def joint_probability(own: Forecast, upcoming: Forecast, at: float, deadline: float) -> float:
    """P(either attempt meets the deadline), with the second sent at `at` if the first, sent at 0, is silent until
    then."""
    spoken = (1 - HUNG) * own.probability(at)
    return spoken + (1 - spoken) * (1 - HUNG) * upcoming.probability(deadline - at)


def test_an_attempt_is_reconsidered_after_1_2_times_its_p90() -> None:
    """More than 90% of attempts have answered by then, and time is left for the next."""
    assert patience_until(taking(0.2), taking(0.2).p50, 5.0, deadline=6.0) == pytest.approx(5.0 + 1.2 * P90 * 0.2)


def test_an_attempt_is_reconsidered_after_100_ms_at_the_earliest() -> None:
    """A busy gateway's own delays can hide an answer of 10 ms."""
    assert patience_until(taking(0.01), taking(0.01).p50, 5.0, deadline=6.0) == 5.1


def test_the_deadline_brings_the_reconsideration_forward() -> None:
    """After 600 ms the next attempt, with a median of 400 ms, would more likely be late than in time."""
    assert patience_until(taking(0.5), taking(0.4).p50, 0.0, deadline=1.0) == pytest.approx(0.6)


def test_a_deadline_beyond_the_next_candidates_reach_changes_nothing() -> None:
    """Leaving early for a certain miss gains nothing."""
    assert patience_until(taking(0.5), taking(2.0).p50, 0.0, deadline=1.0) == pytest.approx(0.5 * P90 * 1.2)


@pytest.mark.parametrize(("own", "upcoming"), [(0.2, 0.2), (0.5, 0.8), (0.3, 0.9), (0.05, 0.6)])
def test_abandon_at_maximizes_the_joint_probability(own: float, upcoming: float) -> None:
    """Compared with the definition on every grid point; the result beats waiting."""
    first, second, deadline = taking(own), taking(upcoming), 2.0
    now = patience_until(first, second.p50, 0.0, deadline)
    best = max(
        (now + i * (deadline - now) / GRID for i in range(GRID)),
        key=lambda at: joint_probability(first, second, at, deadline),
    )
    assert abandon_at(first, second, 0.0, now, deadline) == pytest.approx(best)
    assert joint_probability(first, second, best, deadline) > (1 - HUNG) * first.probability(deadline)


def test_two_equal_candidates_get_half_of_the_time_each() -> None:
    """To the next step of the grid."""
    assert abandoned_at(taking(0.05), taking(0.05), deadline=1.5) == pytest.approx(0.75, abs=1.5 / GRID)


@pytest.mark.parametrize("ratios", [RATIOS, COLD], ids=["known", "cold"])
@pytest.mark.parametrize("deadline", [0.75, 1.5, 6.0])
def test_a_hung_attempt_is_abandoned_in_time_for_its_peer(ratios: tuple[float, ...], deadline: float) -> None:
    """With a deadline of ten medians, 95% of the peers meet the deadline, with or without samples."""
    own = upcoming = taking(deadline / 10, ratios)
    assert upcoming.probability(deadline - abandoned_at(own, upcoming, deadline)) > 0.95


def test_a_hung_attempt_is_abandoned_even_with_little_time() -> None:
    """Two medians of 500 ms in 1.5 s: forecasts, made from answered attempts alone, would wait until the end."""
    own = upcoming = taking(0.5)
    assert upcoming.probability(1.5 - abandoned_at(own, upcoming, 1.5)) > 0.85


@pytest.mark.parametrize("ratios", [RATIOS, COLD], ids=["known", "cold"])
@pytest.mark.parametrize("p50", [0.005, 0.1, 1.0])
def test_a_long_deadline_causes_no_early_abandonment(ratios: tuple[float, ...], p50: float) -> None:
    """At least an eighth of 30 s, and twice the p99: the work done is not thrown away for a tiny gain."""
    own = taking(p50, ratios)
    assert abandoned_at(own, taking(p50), deadline=30.0) >= max(3.75, 2 * own.quantile(0.99))


def test_a_long_deadline_is_not_waited_out() -> None:
    """An eighth of the deadline, or three times the p99, is enough."""
    assert abandoned_at(taking(0.05), taking(0.05), deadline=30.0) == 3.75
    assert abandoned_at(taking(1.0), taking(1.0), deadline=30.0) == pytest.approx(3 * taking(1.0).quantile(0.99))


def test_an_attempt_is_not_abandoned_for_a_candidate_that_would_miss() -> None:
    """Until the deadline, or three times the p99."""
    fast, slow = taking(0.05), taking(3.0)
    assert abandon_at(fast, slow, 0.0, 0.1, deadline=2.0) == 2.0
    assert abandon_at(taking(0.5), slow, 0.0, 0.84, deadline=1.0) == pytest.approx(3 * taking(0.5).quantile(0.99))


def test_after_the_deadline_an_attempt_gets_a_second_at_least() -> None:
    """Even a fast endpoint: probabilities are all 0."""
    assert abandon_at(taking(0.05), taking(0.05), sent=3.0, now=3.1, deadline=2.0) == 4.0


@given(st.floats(0.001, 20), st.floats(0.001, 20), st.floats(0, 100), st.floats(0, 10), st.floats(-5, 20))
def test_abandon_at_is_never_in_the_past(
    own: float, upcoming: float, sent: float, waited: float, remaining: float
) -> None:
    """Unless the attempt is overdue: then the attempt is abandoned now."""
    now, deadline = sent + waited, sent + waited + remaining
    at = abandon_at(taking(own), taking(upcoming), sent, now, deadline)
    overdue = sent + max(3 * taking(own).quantile(0.99), 1.0, (deadline - sent) / 8)
    assert now <= at < deadline or at == max(deadline, overdue)
    assert patience_until(taking(own), taking(upcoming).p50, sent, deadline) > sent


def test_a_guess_is_no_reason_to_wait_past_the_deadline() -> None:
    """An API that has shown nothing yet, and its like behind it: the 99th percentile of the prior is 1.7 s."""
    own = Forecast(0.4, COLD, samples=0)
    assert abandoned_at(own, own, deadline=1.0) <= 1.0
    assert abandoned_at(replace(own, samples=100), own, deadline=1.0) > 5.0


def test_a_fresh_attempt_that_would_take_as_long_is_no_reason_to_start_anew() -> None:
    """A long prompt before engines that have shown nothing yet: past the deadline by little, the first is about to
    answer. The two together take twice the better one at most."""
    own = Forecast(3.8, COLD, samples=0)
    assert abandoned_at(own, own, deadline=4.0) == pytest.approx(7.6)
    assert abandoned_at(own, Forecast(0.5, COLD, samples=0), deadline=4.0) <= 4.3


@given(st.floats(0.05, 5), st.floats(0.05, 5), st.booleans(), st.floats(0.2, 12))
def test_a_cold_api_that_hangs_leaves_the_next_its_forecast(
    own_p50: float, next_p50: float, trained: bool, deadline: float
) -> None:
    """Where the medians of both fit before the deadline: the next candidate has half of its chance at least."""
    own, upcoming = Forecast(own_p50, COLD), Forecast(next_p50, COLD, samples=100 * trained)
    asked_at = min(patience_until(own, upcoming.p50, 0.0, deadline), leave_by(own, upcoming, 0.0, deadline))
    left_at = abandon_at(own, upcoming, 0.0, asked_at, deadline)
    assert left_at >= min(own_p50, asked_at)
    if own_p50 + next_p50 <= deadline:
        assert deadline - left_at >= next_p50 * (1 - 1e-9)


def test_only_an_api_with_a_guessed_forecast_is_left_early() -> None:
    """An engine's siblings would take as long; what was learned tells of silence by itself."""
    cold, upcoming = Forecast(1.5, COLD), Forecast(1.0, COLD)
    assert leave_by(cold, upcoming, 0.0, 4.0) == pytest.approx(2.0)
    known = replace(upcoming, samples=1)
    assert leave_by(cold, known, 0.0, 4.0) == pytest.approx(4.0 - upcoming.quantile(0.8))
    assert leave_by(replace(cold, prefill=0.3), upcoming, 0.0, 4.0) == FOREVER
    assert leave_by(replace(cold, samples=100), upcoming, 0.0, 4.0) == FOREVER
    assert leave_by(cold, cold, 0.0, 2.9) == FOREVER


@pytest.mark.parametrize("own_p50", [0.4, 0.9, 0.95, 1.5, 4.0, 12.0, 60.0])
def test_a_later_guess_takes_no_more_of_the_next_candidates_time(own_p50: float) -> None:
    """A cold API before a model of 0.1 s, under 1 s: the next keeps its 90th percentile, whatever the guess."""
    own, upcoming = Forecast(own_p50, COLD), Forecast(0.1, COLD, samples=3)
    asked_at = min(patience_until(own, upcoming.p50, 0.0, 1.0), leave_by(own, upcoming, 0.0, 1.0))
    assert 0.5 <= abandon_at(own, upcoming, 0.0, asked_at, 1.0) <= 1.0 - upcoming.p90


def test_an_attempt_is_not_left_for_a_slightly_better_chance() -> None:
    """Both prefills would be paid for: at the end of patience the second is likelier by less than a tenth."""
    own, upcoming = taking(0.5), taking(0.6)
    silent = patience_until(own, upcoming.p50, 0.0, 1.6)
    gain = joint_probability(own, upcoming, silent, 1.6) - (1 - HUNG) * own.probability(1.6)
    assert gain > 0
    assert abandon_at(own, upcoming, 0.0, silent, 1.6) >= 1.6


def test_tokens_of_other_answers_make_a_hang_unlikely() -> None:
    """An engine that has written something since is slow: the silence is explained by its slowest answers alone."""
    own, upcoming = taking(0.2), taking(0.4)
    dead, alive = (abandon_at(own, upcoming, 0.0, 0.5, 1.0, heard_at) for heard_at in (-1.0, 0.4))
    assert dead < 1.0 < alive
