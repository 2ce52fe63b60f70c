"""Tier choice by TTFT and TPOT: a tier whose load costs answers their pace gives way to one that keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.reasons import reason_of
from policies.types import Load, Placement, Price, RequestView
from tests.support.decision_fleet import DecisionScenario, TpotChance, budget, order

FLEET = {"large": {"L": 0.1}, "small": {"s": 0.1}, "api": {"A": 0.1}}
KEPT, MISSED = TpotChance(0.98, 1.0), TpotChance(0.7, 1.0)
LOST = TpotChance(0.02, 0.0)  # slower than the budget at rest
TPOT = {"tpot": {"budget": "50ms"}}


def first(chances: dict[str, TpotChance], request: RequestView | None = None, **route: Any) -> str:
    found = DecisionScenario(FLEET, tpot=chances, route={**budget(3.0), **TPOT, **route}).decide(request)
    assert found.outcome is Placement.PLACE
    assert sorted(order(found)) == ["A", "L", "s"]
    return order(found)[0]


def test_a_tier_that_load_makes_too_slow_gives_way_to_the_next_that_keeps_the_tpot() -> None:
    """The first token would come in time everywhere: the answers would not."""
    assert first({}) == "L"
    assert first({"L": MISSED}) == "s"
    assert first({"L": MISSED, "s": MISSED}) == "A"


@pytest.mark.parametrize(("seconds", "chosen"), [(0.15, "s"), (0.3, "L")])
def test_the_chance_is_of_ttft_and_tpot_together(seconds: float, chosen: str) -> None:
    """Of the first tier 0.925 come within 0.15 s and 0.995 within 0.3 s; of these 0.92 keep the TPOT."""
    fleet = {"large": {"L": 0.1}, "small": {"s": 0.05}}
    chances = {"L": TpotChance(0.92, 1.0), "s": KEPT}
    found = DecisionScenario(fleet, tpot=chances, route={**budget(seconds), **TPOT}).decide()
    assert order(found)[0] == chosen


def test_where_no_tier_keeps_the_tpot_the_first_one_stays() -> None:
    """Leaving would help nobody."""
    assert first(dict.fromkeys(("L", "s", "A"), MISSED)) == "L"


def test_a_tpot_that_is_missed_even_at_rest_is_no_reason_to_leave() -> None:
    """The promise is what is wrong, not the load: `firsttoken check` and a log line say so."""
    assert first({"L": LOST}) == "L"
    assert first(dict.fromkeys(("L", "s", "A"), LOST)) == "L"


def test_a_tpot_that_is_missed_even_at_rest_is_no_reason_to_come_either() -> None:
    """A tier in trouble is not left for one that is always slower."""
    assert first({"L": MISSED, "s": LOST, "A": KEPT}) == "A"
    assert first({"L": MISSED, "s": LOST, "A": LOST}) == "L"


def test_one_endpoint_that_keeps_the_tpot_is_enough_for_its_tier() -> None:
    fleet = {"large": {"L1": 0.1, "L2": 0.1}, "small": {"s": 0.1}}
    slow = DecisionScenario(fleet, tpot={"L1": MISSED, "L2": MISSED}, route={**budget(3.0), **TPOT}).decide()
    half = DecisionScenario(fleet, tpot={"L1": MISSED}, route={**budget(3.0), **TPOT}).decide()
    assert (order(slow)[0], order(half)[0][0]) == ("s", "L")


def test_a_tier_is_never_taken_for_its_tpot_that_would_be_late() -> None:
    """The TPOT orders tiers in time, and no others."""
    loads = {"s": Load(queued_tokens=100_000.0), "A": Load(queued_tokens=100_000.0)}  # 5 s of work
    found = DecisionScenario(FLEET, loads=loads, tpot={"L": MISSED}, route={**budget(3.0), **TPOT}).decide()
    assert order(found)[0] == "L"


@pytest.mark.parametrize("on_miss", ["shed", "queue", "best_effort"])
@given(now=st.floats(0, 1), at_rest=st.floats(0, 1))
def test_the_tpot_makes_no_request_late(on_miss: str, now: float, at_rest: float) -> None:
    """With one tier there is nowhere else to go: the decision is the same whatever the TPOT."""
    chances = {"L": TpotChance(now, at_rest)}
    route = {**budget(3.0), **TPOT, "on_miss": on_miss}
    plain, slow = (DecisionScenario({"large": {"L": 0.1}}, tpot=one, route=route).decide() for one in ({}, chances))
    assert (slow.outcome, slow.reason, slow.ranked) == (plain.outcome, plain.reason, plain.ranked)


def test_only_streamed_answers_on_routes_with_a_tpot_and_a_deadline_are_concerned() -> None:
    """Nobody sees the pace of the others, and nobody waits for a request without a deadline."""
    whole = RequestView(0.0, stream=False)
    assert first({"L": MISSED}, whole) == "L"
    assert first({"L": MISSED}, tpot=None) == "L"
    assert first({"L": MISSED}, ttft=None) == "L"
    assert first({"L": MISSED}, RequestView(0.0, stream=True, tpot_budget=0.05), tpot=None) == "s"


def test_the_tpot_counts_whatever_is_preferred() -> None:
    """The cheapest tier in time is too slow by load: the next cheapest."""
    pools = {
        "large": {"price": Price(9.0, 9.0)},
        "small": {"price": Price(1.0, 1.0)},
        "api": {"price": Price(2.0, 2.0)},
    }
    found = DecisionScenario(FLEET, pools=pools, tpot={"s": MISSED}, route={**budget(3.0), **TPOT, "prefer": "cost"})
    assert order(found.decide())[0] == "A"


def test_the_tier_that_was_left_says_why() -> None:
    """In /explain."""
    found = DecisionScenario(FLEET, tpot={"L": MISSED}, route={**budget(3.0), **TPOT}).decide()
    reasons = {each.endpoint.id: reason_of(found, each) for each in found.ranked}
    assert reasons["L"].endswith("worth 0.200 less than the first, most of it by its chances (0.300)")
