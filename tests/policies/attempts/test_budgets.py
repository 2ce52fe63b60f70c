"""Budgets of retries and hedges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.attempt_machine import HedgeBudget, RetryBudget


def entered(requests: int) -> RetryBudget:
    budget = RetryBudget()
    for _ in range(requests):
        budget.began()
    return budget


@pytest.mark.parametrize(("active", "allowed"), [(0, 3), (10, 3), (30, 3), (40, 4), (1000, 100)])
def test_retries_are_a_tenth_of_the_active_requests_and_three_at_least(active: int, allowed: int) -> None:
    """Retries must not double the load of an overloaded fleet."""
    budget = entered(active)
    assert sum(budget.try_take() for _ in range(active + 10)) == allowed


def test_a_retry_that_has_ended_makes_room_for_another() -> None:
    """The budget bounds concurrent retries, not their total."""
    budget = entered(10)
    assert [budget.try_take() for _ in range(4)] == [True, True, True, False]
    budget.give_back()
    assert [budget.try_take() for _ in range(2)] == [True, False]


def test_the_budget_shrinks_with_the_requests() -> None:
    """Retries taken when there were more requests are kept, but no new ones are allowed."""
    budget = entered(100)
    assert all(budget.try_take() for _ in range(10))
    for _ in range(50):
        budget.ended()
    assert not budget.try_take()


def test_hedges_are_earned_before_they_are_sent() -> None:
    """At 10 % the tenth request is the first that may be hedged."""
    budget = HedgeBudget(0.1)
    allowed = []
    for _ in range(20):
        budget.began()
        allowed.append(budget.try_take())
    assert [i for i, yes in enumerate(allowed, 1) if yes] == [10, 20]


def test_hedges_saved_up_are_bounded() -> None:
    """A long calm does not pay for a storm of second copies."""
    budget = HedgeBudget(0.5, burst=4)
    for _ in range(1000):
        budget.began()
    assert sum(budget.try_take() for _ in range(100)) == 4


def test_a_hedge_given_back_can_be_taken_again() -> None:
    """An unsent hedge costs nothing."""
    budget = HedgeBudget(1.0)
    budget.began()
    assert budget.try_take()
    budget.give_back()
    assert [budget.try_take(), budget.try_take()] == [True, False]


def test_a_share_of_zero_allows_no_hedge() -> None:
    """For any number of requests."""
    budget = HedgeBudget(0.0)
    for _ in range(1000):
        budget.began()
    assert not budget.try_take()


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_hedges_never_exceed_their_share_of_the_requests(share: float, wants: list[bool]) -> None:
    """`max_extra` is a promise, at every moment and not on average."""
    budget, sent = HedgeBudget(share), 0
    for requests, wanted in enumerate(wants, 1):
        budget.began()
        sent += wanted and budget.try_take()
        assert sent <= share * requests + 1e-3
