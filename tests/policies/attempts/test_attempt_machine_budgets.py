"""The attempt machine takes the permissions of both budgets itself, and returns them at every end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.blame.blame import BLAME
from policies.types import FOREVER, Candidate
from tests.support.attempt_script import (
    API,
    A,
    B,
    C,
    GivenFacts,
    ScriptedRace,
    Step,
    begun,
    fails,
    hedged,
    machine,
    of_server,
    reason,
    silence,
    told,
)
from tests.support.decision_fleet import candidate

OVERLOADS = [kind for kind, blame in BLAME.items() if blame.charged]
KEYS = of_server("api.example.com", "key1", "key2")


def spent() -> RetryBudget:
    return RetryBudget(burst=0, share=0)


# --------------------------------------------------------------------------- a retry


def test_the_replies_that_show_load_are_charged() -> None:
    """A lost connection and a timeout cost an engine no work."""
    loaded = ["server", "provider", "overloaded", "queue_limit", "rate_limited", "request_rate", "token_rate"]
    assert loaded == OVERLOADS


@pytest.mark.parametrize("kind", BLAME)
def test_a_retry_in_the_same_pool_is_charged_for_a_reply_that_shows_load(kind: str) -> None:
    budget = RetryBudget()
    race = begun(A, B, retries=budget)
    before = budget.tokens
    race.failed(fails(1, kind), 0.1)
    assert (budget.retrying, before - budget.tokens) == ((1, 1) if kind in OVERLOADS else (0, 0))


@pytest.mark.parametrize("kind", OVERLOADS)
def test_a_fallback_to_another_pool_is_not_charged(kind: str) -> None:
    """The budget protects a single pool from being hammered."""
    budget = RetryBudget()
    step = begun(A, API, retries=budget).failed(fails(1, kind), 0.1)
    assert (told(step), budget.retrying) == (["open 2 fallback api"], 0)


@pytest.mark.parametrize("kind", OVERLOADS)
def test_without_a_permission_the_pool_is_avoided(kind: str) -> None:
    """For good: candidates of the failed pool are skipped."""
    race = begun(A, B, API, C, max_attempts=4, retries=spent())
    assert told(race.failed(fails(1, kind), 0.1)) == ["open 2 fallback api"]
    assert told(race.failed(fails(2, "auth"), 0.2)) == ["give up"]


@pytest.mark.parametrize("kind", ["connect", "reset", "timeout", "protocol"])
def test_a_lost_connection_needs_no_permission(kind: str) -> None:
    """No engine did any work for the attempt."""
    step = begun(A, B, retries=spent()).failed(fails(1, kind), 0.1)
    assert told(step) == ["open 2 fallback b"]


@pytest.mark.parametrize(("kind", "free"), [(kind, "rate" in kind) for kind in OVERLOADS])
def test_another_key_of_the_server_is_not_charged_for_a_rate_limit(kind: str, free: bool) -> None:
    """Each key has limits of its own; the load of the server is one."""
    step = begun(*KEYS, retries=spent()).failed(fails(1, kind), 0.1)
    assert told(step) == (["open 2 fallback key2"] if free else ["give up"])


@pytest.mark.parametrize("ranked", [(A, B), (A,)])
def test_a_spent_budget_is_the_reason_to_give_up(ranked: tuple[Candidate, ...]) -> None:
    """Otherwise retries would double the load of an overloaded fleet. The same endpoint needs a permission too."""
    step = begun(*ranked, retries=spent()).failed(fails(1), 0.1)
    assert reason(step) == "the retry budget is spent"


def test_another_attempt_at_the_same_endpoint_is_charged() -> None:
    budget = RetryBudget()
    race = begun(A, retries=budget)
    race.failed(fails(1, "overloaded"), 0.1)
    assert budget.retrying == 1
    assert told(race.look(0.2)) == ["open 2 fallback a"]


# --------------------------------------------------------------------------- a hedge


def test_a_hedge_is_charged_when_it_is_sent() -> None:
    """The request itself has earned it here."""
    budget = HedgeBudget(1.0)
    race = machine(A, B, hedge=True, hedges=budget)
    step, _ = silence(race, race.begin(0.0))
    assert told(step) == ["open 2 hedge b"]
    assert not budget.try_take()


@pytest.mark.parametrize(
    "race",
    [
        lambda hedges: machine(A, hedge=True, hedges=hedges),
        lambda hedges: machine(A, B, hedge=True, hedges=hedges, max_attempts=1),
        lambda hedges: machine(A, B, hedge=False, hedges=hedges),
        lambda hedges: machine(A, B, hedge=True, hedges=hedges, deadline=FOREVER),
        lambda hedges: machine(A, B, hedge=True, hedges=hedges, stream=False),
        lambda hedges: machine(A, B, hedge=True, hedges=hedges, facts=GivenFacts(saturated=True)),
    ],
    ids=["no candidate", "no attempt left", "not asked for", "no deadline", "whole answer", "saturated"],
)
def test_a_hedge_is_taken_only_when_it_is_sent(race: Callable[[HedgeBudget], ScriptedRace]) -> None:
    """Nothing has to be returned."""
    budget = HedgeBudget(1.0)
    tried = race(budget)
    silence(tried, tried.begin(0.0))
    assert [budget.try_take(), budget.try_take()] == [True, False]


# --------------------------------------------------------------------------- every end


def committed(race: ScriptedRace) -> Step:
    return race.first_token(2, 0.3)


def client_gone(race: ScriptedRace) -> Step:
    return race.client_gone()


def refused(race: ScriptedRace) -> Step:
    return race.failed(fails(2, "client"), 0.3)


@pytest.mark.parametrize("end", [committed, client_gone, refused])
def test_every_end_returns_the_share_of_the_retry_budget(end: Callable[[ScriptedRace], Step]) -> None:
    """Of the request and of its retries."""
    budget = RetryBudget()
    race = begun(A, B, retries=budget)
    race.failed(fails(1), 0.1)
    assert (budget.active, budget.retrying) == (1, 1)
    end(race)
    assert (budget.active, budget.retrying) == (0, 0)
    race.failed(fails(2), 0.4)
    race.first_token(2, 0.4)
    race.client_gone()
    race.begin(0.4)
    race.endpoint_down(2, 0.4)
    assert (budget.active, budget.retrying) == (0, 0)


def test_a_request_that_was_placed_nowhere_leaves_no_share() -> None:
    budget = RetryBudget()
    begun(retries=budget)
    assert (budget.active, budget.retrying) == (0, 0)


def test_a_retry_for_the_rest_of_an_answer_is_returned_too() -> None:
    """The request counts no longer as active once its answer has begun."""
    budget = RetryBudget()
    race = begun(A, B, C, candidate("d"), max_attempts=5, retries=budget, recovers=True)
    race.first_token(1, 0.2)
    race.broken(BLAME["server"], race.others(), 1.0)
    race.failed(fails(2, "overloaded"), 1.1)
    assert (budget.active, budget.retrying) == (0, 1)
    race.first_token(3, 1.2)
    assert (budget.active, budget.retrying) == (0, 0)


def test_a_hedge_that_lost_is_not_returned() -> None:
    """It has cost an engine work."""
    budget = HedgeBudget(1.0)
    race, now = hedged(A, B, hedges=budget)
    race.first_token(1, now + 0.1)
    assert not budget.try_take()
