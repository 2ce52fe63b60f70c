"""Budgets of retries and hedges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.budgets import HedgeBudget, RetryBudget


def entered(requests: int) -> RetryBudget:
    budget = RetryBudget()
    for _ in range(requests):
        budget.began()
    return budget


@pytest.mark.parametrize(("active", "allowed"), [(0, 10), (40, 10), (100, 10), (200, 20), (1000, 100)])
def test_retries_at_once_are_ten_or_a_tenth_of_the_active_requests(active: int, allowed: int) -> None:
    """A sudden fault under load is not left without retries."""
    budget = entered(active)
    assert sum(budget.try_take() for _ in range(active + 20)) == allowed


def test_a_steady_fault_adds_less_than_a_tenth_to_the_load() -> None:
    """However few requests there are at a time: of one after the other, half fail."""
    budget, retried = RetryBudget(), 0
    for number in range(1200):
        budget.began()
        if number % 2 and budget.try_take():
            retried += 1
            budget.give_back()
        budget.ended()
    assert 108 <= retried <= 120


def test_the_budget_shrinks_with_the_requests() -> None:
    """Retries taken when there were more requests are kept, but no new ones are allowed."""
    budget = entered(200)
    assert all(budget.try_take() for _ in range(20))
    for _ in range(100):
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
