"""Attempts on routes whose tiers are asked again, or come after a failure of one kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.attempts.budgets import RetryBudget
from policies.routes.levels import AttemptRules, FailureCause
from policies.types import FOREVER, Candidate
from tests.support.attempt_script import ScriptedRace, fails, machine, silence, told
from tests.support.decision_fleet import candidate


def at(tier: int, id: str) -> Candidate:
    return replace(candidate(id, pool=f"pool-{id}"), tier=tier)


MAIN, TWIN, SPARE, LONG, LENIENT = at(0, "m"), at(1, "t"), at(2, "s"), at(3, "l"), at(4, "c")
AFTER: tuple[frozenset[FailureCause], ...] = (
    frozenset(),
    frozenset(),
    frozenset({"failure"}),
    frozenset({"context"}),
    frozenset({"content_filter"}),
)


def race(*ranked: Candidate, retries: int | None = None, **more: Any) -> ScriptedRace:
    """Without a deadline."""
    rules = AttemptRules((1, 1, 2, 3, 4), AFTER, retries)
    found = machine(*ranked, deadline=FOREVER, max_attempts=20, tiers=rules, **more)
    found.begin(0.0)
    return found


def asked(found: ScriptedRace, *kinds: str) -> str:
    """Endpoints asked after failures of these kinds, one after the other."""
    ids = ""
    for number, kind in enumerate(kinds, 1):
        step = found.failed(fails(number, kind), float(number))
        if not step.actions and step.wake_at is not None:
            step = found.look(step.wake_at)
        ids += "".join(words.rpartition(" ")[2] if words.startswith("open") else "." for words in told(step))
    return ids


ALL = (MAIN, TWIN, SPARE, LONG, LENIENT)


def test_each_level_has_its_retries_in_turns_before_the_next() -> None:
    assert asked(race(*ALL, retries=2), *["server"] * 6) == "tmsss."


def test_the_only_endpoint_is_asked_again_before_the_next_level() -> None:
    assert asked(race(MAIN, SPARE, retries=2), "server", "server", "server", "connect") == "mmss"


def test_without_retries_each_endpoint_is_asked_once() -> None:
    assert asked(race(*ALL), *["auth"] * 3) == "ts."


def test_a_prompt_that_is_too_long_goes_to_the_tier_for_it_alone() -> None:
    assert asked(race(*ALL, retries=1), "context", "server", "server") == "ll."


def test_refused_content_goes_to_the_tier_for_it_alone() -> None:
    """At any attempt, and whatever the route says of other refusals."""
    assert asked(race(*ALL, retries=0), "content_filter", "server") == "c."
    assert asked(race(*ALL, retries=1), "server", "content_filter") == "tc"


def test_a_refusal_without_a_tier_for_it_goes_where_the_route_says() -> None:
    assert asked(race(MAIN, SPARE), "content_filter") == "."
    assert asked(race(MAIN, SPARE, other_filter=True), "content_filter") == "s"


def test_a_decision_for_the_reserve_is_followed_as_it_is_ranked() -> None:
    """Every other tier was out when the request was decided."""
    assert asked(race(LONG, LENIENT), "connect") == "c"


def test_a_silent_attempt_is_followed_by_a_reserve_only_at_its_limit() -> None:
    """Lateness is no failure: within a deadline the tier is not raced with."""
    found = machine(MAIN, SPARE, deadline=1.0, limit=30.0, hedge=True, tiers=AttemptRules((1, 1, 2), AFTER[:3]))
    step, now = silence(found, found.begin(0.0))
    assert (told(step), now) == (["cancel 1 silent", "open 2 fallback s"], 30.0)


def test_an_empty_retry_budget_denies_no_retry_of_the_route() -> None:
    empty = RetryBudget(burst=0.0, share=0.0)
    rules = AttemptRules((1,), (frozenset(),), retries=1)
    found = machine(MAIN, deadline=FOREVER, tiers=rules, retries=empty)
    found.begin(0.0)
    assert asked(found, "server") == "m"
