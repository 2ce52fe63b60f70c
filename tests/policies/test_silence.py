"""When to leave an attempt that stays silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Forecast
from policies.silence import GRID, first_look, leave_at
from tests.policies.deciding import P90, RATIOS


def taking(p50: float) -> Forecast:
    return Forecast(p50, RATIOS)


def conditional(own: Forecast, sent: float, at: float, deadline: float) -> float:
    """P(own <= deadline - sent | own > at - sent)."""
    spoken = own.chance(at - sent)
    return (own.chance(deadline - sent) - spoken) / (1 - spoken)


def test_silence_is_no_news_before_one_point_two_times_the_own_p90() -> None:
    """Nine of ten would have spoken; there is time left for the next."""
    assert first_look(taking(0.2), taking(0.2), 5.0, deadline=6.0) == pytest.approx(5.0 + 1.2 * P90 * 0.2)


def test_the_deadline_forces_an_earlier_look() -> None:
    """After 600 ms the next, which takes 400, would more likely be late than in time."""
    assert first_look(taking(0.5), taking(0.4), 0.0, deadline=1.0) == pytest.approx(0.6)


def test_a_deadline_that_the_next_cannot_make_forces_nothing() -> None:
    """To leave at once for a sure miss would be flight, not failover."""
    assert first_look(taking(0.5), taking(2.0), 0.0, deadline=1.0) == pytest.approx(0.5 * P90 * 1.2)


def test_an_attempt_past_its_usual_time_is_left_at_once_for_one_that_is_likelier() -> None:
    """Silent for 336 ms where nine of ten take 280, and a fresh one has 664 ms for 200."""
    assert leave_at(taking(0.2), taking(0.2), sent=0.0, now=0.336, deadline=1.0) == 0.336


def test_the_moment_is_the_first_of_the_grid_at_which_the_next_is_likelier() -> None:
    """Checked against the definition, moment by moment."""
    own, upcoming, sent, now, deadline = taking(0.5), taking(0.8), 0.0, 0.84, 2.0
    grid = [now + i * (deadline - now) / GRID for i in range(GRID)]
    likelier = [at for at in grid if upcoming.chance(deadline - at) > conditional(own, sent, at, deadline)]
    assert likelier
    assert likelier[0] > now
    assert leave_at(own, upcoming, sent, now, deadline) == pytest.approx(likelier[0])


def test_an_attempt_that_stays_the_likelier_is_left_when_it_is_overdue() -> None:
    """At the deadline, or after three times what 99 of 100 take."""
    fast, slow = taking(0.05), taking(3.0)
    assert leave_at(fast, slow, 0.0, 0.084, deadline=2.0) == 2.0
    assert leave_at(taking(0.5), slow, 0.0, 0.84, deadline=1.0) == pytest.approx(3 * taking(0.5).quantile(0.99))


def test_past_the_deadline_a_second_of_silence_is_the_least() -> None:
    """However fast it usually is: chances no longer compare."""
    assert leave_at(taking(0.05), taking(0.05), sent=3.0, now=3.1, deadline=2.0) == 4.0


@given(st.floats(0.001, 20), st.floats(0.001, 20), st.floats(0, 100), st.floats(0, 10), st.floats(-5, 20))
def test_the_moment_is_never_in_the_past(own: float, upcoming: float, sent: float, waited: float, left: float) -> None:
    """Unless the attempt is overdue already: then it is left now."""
    now, deadline = sent + waited, sent + waited + left
    at = leave_at(taking(own), taking(upcoming), sent, now, deadline)
    overdue = max(deadline, sent + max(3 * taking(own).quantile(0.99), 1.0))
    assert now <= at < deadline or at == overdue
    assert first_look(taking(own), taking(upcoming), sent, deadline) > sent
