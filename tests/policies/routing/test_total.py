"""Tier choice by the whole answer: a promise of `total`, alone or beside TTFT, and preferences that look at the end."""

from __future__ import annotations

from typing import Any

import pytest

from policies.routing.reasons import reason_of
from policies.types import Load, Placement, RequestView
from tests.support.decision_fleet import DecisionScenario, TpotChance, answers, budget, candidate, order

QUICK, FAST = "quick", "fast"
PATHS = {"starts": {QUICK: 0.35}, "writes": {FAST: 2.1}}  # s to the first token
TPOTS = {QUICK: 1 / 65, FAST: 1 / 140}
REPORT, CHAT = answers(2500, 5000), answers(60, 100)


def scenario(tokens: Any = REPORT, tpots: Any = TPOTS, **route: Any) -> DecisionScenario:
    return DecisionScenario(PATHS, route=route, tpots=tpots, answer_tokens=tokens)


def total(seconds: float, **more: Any) -> dict[str, Any]:
    return {"total": {"budget": f"{seconds:g}s", **more}}


@pytest.mark.parametrize(("tokens", "first"), [(REPORT, FAST), (CHAT, QUICK)])
def test_the_soonest_whole_answer_depends_on_its_length(tokens: Any, first: str) -> None:
    """2.1 s and 140 tokens a second for a report; 350 ms and 65 for a chat, which is over by then."""
    assert order(scenario(tokens, prefer="completion").decide())[0] == first


def test_the_soonest_first_token_is_another_preference() -> None:
    """`latency` does not look at the end."""
    assert order(scenario(prefer="latency").decide())[0] == QUICK
    assert order(scenario(CHAT, prefer="throughput").decide())[0] == FAST


def test_an_endpoint_of_unknown_pace_is_asked_for_a_few_answers() -> None:
    """Else it would be forecast by a prior for ever. While three are in progress, the others have to tell."""

    def first(prefer: str, in_flight: int) -> str:
        loads, route = {FAST: Load(in_flight=in_flight)}, {"prefer": prefer}
        found = DecisionScenario(PATHS, loads, route=route, tpots={QUICK: 0.0}, answer_tokens=CHAT)
        return order(found.decide())[0]

    assert [first(prefer, 2) for prefer in ("completion", "throughput")] == [FAST, FAST]
    assert [first(prefer, 3) for prefer in ("completion", "throughput")] == [QUICK, QUICK]


def test_a_tier_that_misses_the_total_gives_way_to_the_next_that_keeps_it() -> None:
    """The first token would come in time at both."""
    chosen = scenario(**budget(5.0), **total(50)).decide()
    assert order(chosen) == [FAST, QUICK]
    assert "most of it by its chances" in reason_of(chosen, chosen.ranked[1])


def test_a_total_that_every_tier_keeps_or_misses_is_no_reason_to_leave() -> None:
    assert order(scenario(CHAT, **budget(5.0), **total(60)).decide())[0] == QUICK
    assert order(scenario(**budget(5.0), **total(10)).decide())[0] == QUICK


def test_what_is_unknown_counts_as_kept() -> None:
    """Of the lengths of a new route, and of the pace of a new endpoint."""
    assert order(scenario((), **budget(5.0), **total(60)).decide())[0] == QUICK
    assert order(scenario(tpots={FAST: 1 / 140}, **budget(5.0), **total(60)).decide())[0] == QUICK


def test_a_tier_in_time_for_its_total_must_keep_the_tpot_too() -> None:
    """A route with several promises needs all of them."""
    route = {**budget(5.0), **total(60), "tpot": {"budget": "50ms"}}
    lost = {FAST: TpotChance(0.1, 1.0)}
    made = DecisionScenario(PATHS, route=route, tpots=TPOTS, answer_tokens=REPORT, tpot=lost)
    assert order(made.decide())[0] == QUICK


def test_each_promise_may_have_a_target_of_its_own() -> None:
    """The whole answer of the first tier is in time with a chance of about 0.7."""
    assert order(scenario(**budget(5.0), **total(50)).decide())[0] == FAST
    assert order(scenario(**budget(5.0), **total(50, target=0.5)).decide())[0] == QUICK


def test_a_tpot_with_a_target_is_judged_apart_from_the_first_token() -> None:
    fleet = {"large": {"L": 0.1}, "small": {"s": 0.1}}
    chances = {"L": TpotChance(0.8, 1.0)}
    for target, first in ((0.9, "s"), (0.75, "L")):
        route = {**budget(3.0), "tpot": {"budget": "50ms", "target": target}}
        assert order(DecisionScenario(fleet, tpot=chances, route=route).decide())[0] == first


def test_a_route_that_promises_the_total_alone_is_decided_by_it() -> None:
    """The chance is of the whole answer; a tier that offers none is not sheltered by its place in the order."""
    found = scenario(**total(60), ttft=None).decide()
    assert order(found) == [FAST, QUICK]
    chances = {each.endpoint.id: each.probability for each in found.ranked}
    assert chances[FAST] > 0.9 > chances[QUICK]


def test_a_total_alone_that_nobody_makes_is_shed() -> None:
    """In ten seconds nobody writes 2,500 tokens: the caller is told at once."""
    assert scenario(**total(10), ttft=None, on_miss="shed").decide().outcome is Placement.SHED


def test_a_ttft_that_the_caller_names_counts_beside_the_total() -> None:
    """The fast path would be late with the first token."""
    request = RequestView(0.0, stream=True, ttft_budget=1.0)
    assert order(scenario(**total(60), ttft=None).decide(request))[0] == QUICK


def test_of_a_tier_endpoints_that_keep_the_total_come_first() -> None:
    """A pool of two kinds of machines: the one with the sooner first token writes too slowly."""
    mixed = DecisionScenario(
        {"main": PATHS["starts"] | PATHS["writes"]},
        route={**budget(5.0), **total(60)},
        tpots=TPOTS,
        answer_tokens=REPORT,
    ).decide()
    assert order(mixed) == [FAST, QUICK]
    assert "most of it by its chances" in reason_of(mixed, mixed.ranked[1])


def test_a_decision_tells_the_end_of_each_candidates_answer() -> None:
    """For /explain and the Record; None of an endpoint whose pace nobody knows."""
    found = scenario(**total(60), tpots={FAST: 1 / 140}).decide()
    whole = found.completion(candidate(FAST, 2.1))
    assert whole is not None
    assert whole.p50 == pytest.approx(2.1 + 2500 / 140)
    assert found.completion(candidate(QUICK, 0.35)) is None
