"""When to leave an attempt that stays silent."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.hedging import GRID, HUNG, abandon_at, patience_until
from policies.latency.online_learning import PRIOR
from policies.types import Forecast
from tests.policies.deciding import P90, RATIOS

COLD = tuple(map(exp, PRIOR))  # the spread of a forecast that no sample stands behind


def taking(p50: float, ratios: tuple[float, ...] = RATIOS) -> Forecast:
    return Forecast(p50, ratios)


def left(own: Forecast, upcoming: Forecast, deadline: float) -> float:
    """When an attempt sent at 0 is left, if it stays silent."""
    return abandon_at(own, upcoming, 0.0, patience_until(own, upcoming.p50, 0.0, deadline), deadline)


def together(own: Forecast, upcoming: Forecast, at: float, deadline: float) -> float:
    """P(one of them makes it), the second begun at `at` if the first, sent at 0, is silent until then."""
    spoken = (1 - HUNG) * own.probability(at)
    return spoken + (1 - spoken) * (1 - HUNG) * upcoming.probability(deadline - at)


def test_silence_is_no_news_before_one_point_two_times_the_own_p90() -> None:
    """Nine of ten would have spoken; there is time left for the next."""
    assert patience_until(taking(0.2), taking(0.2).p50, 5.0, deadline=6.0) == pytest.approx(5.0 + 1.2 * P90 * 0.2)


def test_a_tenth_of_a_second_is_no_silence() -> None:
    """An engine that answers in 10 ms may be late by a busy gateway's own delays."""
    assert patience_until(taking(0.01), taking(0.01).p50, 5.0, deadline=6.0) == 5.1


def test_the_deadline_forces_an_earlier_look() -> None:
    """After 600 ms the next, which takes 400, would more likely be late than in time."""
    assert patience_until(taking(0.5), taking(0.4).p50, 0.0, deadline=1.0) == pytest.approx(0.6)


def test_a_deadline_that_the_next_cannot_make_forces_nothing() -> None:
    """To leave at once for a sure miss would be flight, not failover."""
    assert patience_until(taking(0.5), taking(2.0).p50, 0.0, deadline=1.0) == pytest.approx(0.5 * P90 * 1.2)


@pytest.mark.parametrize(("own", "upcoming"), [(0.2, 0.2), (0.5, 0.8), (0.3, 0.9), (0.05, 0.6)])
def test_the_moment_is_that_of_the_best_chance_together(own: float, upcoming: float) -> None:
    """Checked against the definition, moment by moment; and it beats staying."""
    first, second, deadline = taking(own), taking(upcoming), 2.0
    now = patience_until(first, second.p50, 0.0, deadline)
    best = max(
        (now + i * (deadline - now) / GRID for i in range(GRID)), key=lambda at: together(first, second, at, deadline)
    )
    assert abandon_at(first, second, 0.0, now, deadline) == pytest.approx(best)
    assert together(first, second, best, deadline) > (1 - HUNG) * first.probability(deadline)


def test_of_two_equals_each_has_half_of_the_time() -> None:
    """To the next step of the grid."""
    assert left(taking(0.05), taking(0.05), deadline=1.5) == pytest.approx(0.75, abs=1.5 / GRID)


@pytest.mark.parametrize("ratios", [RATIOS, COLD], ids=["known", "cold"])
@pytest.mark.parametrize("deadline", [0.75, 1.5, 6.0])
def test_a_hung_attempt_is_left_in_time_for_its_peer(ratios: tuple[float, ...], deadline: float) -> None:
    """Where the deadline allows ten times what either takes, 19 of 20 peers make it, known or never met."""
    own = upcoming = taking(deadline / 10, ratios)
    assert upcoming.probability(deadline - left(own, upcoming, deadline)) > 0.95


def test_a_hung_attempt_is_left_though_the_time_is_short_for_both() -> None:
    """Two of 500 ms in 1.5 s: forecasts alone, made of those that spoke, would stay to the end."""
    own = upcoming = taking(0.5)
    assert upcoming.probability(1.5 - left(own, upcoming, 1.5)) > 0.85


@pytest.mark.parametrize("ratios", [RATIOS, COLD], ids=["known", "cold"])
@pytest.mark.parametrize("p50", [0.005, 0.1, 1.0])
def test_a_generous_deadline_causes_no_flight(ratios: tuple[float, ...], p50: float) -> None:
    """An eighth of 30 s at least, and more than 99 of 100 take: its work is not thrown away for a hair."""
    own = taking(p50, ratios)
    assert left(own, taking(p50), deadline=30.0) >= max(3.75, 2 * own.quantile(0.99))


def test_nobody_waits_for_half_of_a_generous_deadline_in_vain() -> None:
    """An eighth of it, or three times what 99 of 100 take, is silence enough."""
    assert left(taking(0.05), taking(0.05), deadline=30.0) == 3.75
    assert left(taking(1.0), taking(1.0), deadline=30.0) == pytest.approx(3 * taking(1.0).quantile(0.99))


def test_an_attempt_is_not_left_for_one_that_would_not_make_it() -> None:
    """It stays until the deadline, or three times what 99 of 100 take."""
    fast, slow = taking(0.05), taking(3.0)
    assert abandon_at(fast, slow, 0.0, 0.1, deadline=2.0) == 2.0
    assert abandon_at(taking(0.5), slow, 0.0, 0.84, deadline=1.0) == pytest.approx(3 * taking(0.5).quantile(0.99))


def test_past_the_deadline_a_second_of_silence_is_the_least() -> None:
    """However fast it usually is: chances no longer compare."""
    assert abandon_at(taking(0.05), taking(0.05), sent=3.0, now=3.1, deadline=2.0) == 4.0


@given(st.floats(0.001, 20), st.floats(0.001, 20), st.floats(0, 100), st.floats(0, 10), st.floats(-5, 20))
def test_the_moment_is_never_in_the_past(own: float, upcoming: float, sent: float, waited: float, left: float) -> None:
    """Unless the attempt is overdue already: then it is left now."""
    now, deadline = sent + waited, sent + waited + left
    at = abandon_at(taking(own), taking(upcoming), sent, now, deadline)
    overdue = sent + max(3 * taking(own).quantile(0.99), 1.0, (deadline - sent) / 8)
    assert now <= at < deadline or at == max(deadline, overdue)
    assert patience_until(taking(own), taking(upcoming).p50, sent, deadline) > sent
