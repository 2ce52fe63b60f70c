"""Time that a session has spent, and what is left of its budget."""

from __future__ import annotations

import pytest

from gateway.observe import session_time
from gateway.observe.record import Record
from gateway.observe.session_time import FORGOTTEN, SessionTimes

TOTAL = 120.0  # s


def step(since: float, until: float, session: int = 1, budget: float | None = TOTAL, route: str = "agent") -> Record:
    return Record(arrival=since, total=until - since, session=session, session_budget=budget, route=route)


@pytest.mark.parametrize(
    ("steps", "spent"),
    [
        ([(0, 10)], 10),
        ([(0, 10), (60, 70)], 20),
        ([(0, 10), (0, 12), (0, 30)], 30),
        ([(2, 3), (0, 5)], 5),
        ([(0, 30), (5, 10)], 30),
        ([(0, 10), (5, 20), (15, 25), (100, 101)], 26),
        ([(0, 100), (200, 250)], 150),
    ],
    ids=["one step", "a pause", "parallel steps", "the short one ended first", "within", "a chain", "over the budget"],
)
def test_the_time_with_a_step_in_the_gateway_is_spent(steps: list[tuple[float, float]], spent: float) -> None:
    """Pauses are the client's own, and parallel steps are one: the last of them counts."""
    times = SessionTimes()
    left = [times.left(step(*each)) for each in sorted(steps, key=lambda each: each[1])]
    assert left[-1] == TOTAL - spent


def test_sessions_routes_and_callers_have_their_own_time() -> None:
    """The hash of a session has the caller in it."""
    times = SessionTimes()
    assert times.left(step(0, 50)) == 70
    assert times.left(step(0, 50, session=2)) == 70
    assert times.left(step(0, 50, route="other")) == 70
    assert times.left(step(60, 70)) == 60


def test_a_route_without_a_budget_keeps_nothing() -> None:
    """Nothing is remembered that nobody asked for."""
    times = SessionTimes()
    assert times.left(step(0, 50, budget=None)) is None
    assert times.left(step(60, 70)) == 110


def test_a_session_begins_anew_after_a_long_silence() -> None:
    """Clients name their conversations as they like."""
    times = SessionTimes()
    times.left(step(0, 50))
    assert times.left(step(50 + FORGOTTEN, 60 + FORGOTTEN)) == 60
    assert times.left(step(70 + 2 * FORGOTTEN, 80 + 2 * FORGOTTEN)) == 110


def test_the_session_that_is_silent_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, whatever names callers make up."""
    monkeypatch.setattr(session_time, "SESSIONS", 2)
    times = SessionTimes()
    for at, session in enumerate((1, 2, 1, 3)):
        times.left(step(at, at + 0.5, session=session))
    assert times.left(step(10, 10.5, session=1)) == TOTAL - 1.5
    assert times.left(step(11, 11.5, session=2)) == TOTAL - 0.5
