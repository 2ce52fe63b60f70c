"""What could take a request, and why the rest cannot."""

from __future__ import annotations

from typing import Any

import pytest

from policies.latency.tpot import STALL_GRID
from policies.types import Decision, Health, Load, Placement, RequestView
from tests.policies.deciding import DecisionScenario, budget, order

TWO = {"small": {"a": 0.1, "b": 0.1}}


def rejections(decision: Decision) -> dict[str, str]:
    """Reasons, by endpoint or (for a whole tier) by pool."""
    return {rejection.endpoint or rejection.pool: rejection.reason for rejection in decision.rejected}


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (Load(health=Health.DOWN), "down"),
        (Load(blocked_until=12.5), "rate limited for 2.5 s more"),
    ],
)
def test_an_endpoint_that_is_out_is_not_considered(load: Load, reason: str) -> None:
    """And /explain says why."""
    decision = DecisionScenario(TWO, loads={"a": load}).decide(now=10.0)
    assert order(decision) == ["b"]
    assert rejections(decision) == {"a": reason}


@pytest.mark.parametrize("load", [Load(health=Health.PROBING), Load(blocked_until=10.0), Load(in_flight=99)])
def test_an_endpoint_that_is_only_busy_or_due_is_considered(load: Load) -> None:
    """On trial with nothing in flight it gets its one request; a rate limit that is over is over."""
    assert sorted(order(DecisionScenario(TWO, loads={"a": load}).decide(now=10.0))) == ["a", "b"]


def test_an_endpoint_that_is_being_warmed_up_is_the_last_resort() -> None:
    """It is taken where its pool has no other that could be, and only there."""
    warming, down = Load(warming=True), Load(health=Health.DOWN)
    assert order(DecisionScenario(TWO, loads={"a": warming, "b": Load(queued_tokens=1e6)}).decide()) == ["b"]
    assert order(DecisionScenario(TWO, loads={"a": warming, "b": down}).decide()) == ["a"]
    assert sorted(order(DecisionScenario(TWO, loads={"a": warming, "b": warming}).decide())) == ["a", "b"]


def test_the_engine_time_of_a_prompt_is_looked_up_where_it_would_be_spent() -> None:
    """What is cached costs none: scorers need the seconds to price the harm to others."""
    asked = DecisionScenario(
        TWO, hits={"b": 960}, loads={name: Load(expected_tpot_misses=(9.0,) * len(STALL_GRID)) for name in "ab"}
    )
    assert order(asked.decide()) == ["b", "a"]


def test_an_endpoint_without_a_load_is_taken_as_idle() -> None:
    """It has just been configured; nothing is known against it."""
    decision = DecisionScenario(TWO, loads={"a": Load(queued_tokens=100.0)}, route=budget(1.0)).decide()
    assert order(decision) == ["b", "a"]


@pytest.mark.parametrize(
    ("asked", "pool", "reason"),
    [
        ({"tools": True}, {"capabilities": frozenset({"json_schema"})}, "it lacks tools"),
        ({"json_schema": True}, {"capabilities": frozenset({"tools"})}, "it lacks json_schema"),
        ({"images": True}, {"capabilities": frozenset()}, "it lacks images"),
        ({"max_tokens": 25}, {"context_window": 1024}, "1000 tokens + 25 output exceed its context window of 1024"),
        ({}, {"context_window": 1199}, "1000 tokens + 200 output exceed its context window of 1199"),
    ],
)
def test_a_tier_that_can_never_take_the_request_is_passed(
    asked: dict[str, Any], pool: dict[str, Any], reason: str
) -> None:
    """Whatever its load: the next tier is asked."""
    world = DecisionScenario({"large": {"L": 0.1}, "small": {"s": 0.1}}, pools={"large": pool})
    decision = world.decide(RequestView(0.0, **asked))
    assert order(decision) == ["s"]
    assert rejections(decision) == {"large": reason}
    assert [rejection.tier for rejection in decision.rejected] == [0]


@pytest.mark.parametrize(
    ("asked", "pool"),
    [
        ({"tools": True}, {"capabilities": None}),
        ({"tools": True}, {"capabilities": frozenset({"tools", "images"})}),
        ({"max_tokens": 24}, {"context_window": 1024}),
        ({"max_tokens": 10**9}, {"context_window": None}),
    ],
)
def test_what_is_not_known_filters_nothing(asked: dict[str, Any], pool: dict[str, Any]) -> None:
    """Nor does what just fits."""
    assert order(DecisionScenario({"large": {"L": 0.1}}, pools={"large": pool}).decide(RequestView(0.0, **asked))) == [
        "L"
    ]


def test_the_routes_cap_on_output_counts_for_the_context_window() -> None:
    """What is sent is the capped max_tokens, so that is what must fit."""
    world = DecisionScenario({"large": {"L": 0.1}}, pools={"large": {"context_window": 1100}})
    assert world.decide(RequestView(0.0, max_tokens=4096)).outcome is Placement.UNFIT
    world.route = {"limits": {"output_tokens": 100}}
    assert world.decide(RequestView(0.0, max_tokens=4096)).outcome is Placement.PLACE


def test_a_when_that_does_not_hold_closes_its_tier() -> None:
    """With its own reason."""
    tiers = [{"pool": "small", "when": {"prompt_tokens": "<= 500"}}, "large"]
    decision = DecisionScenario({"small": {"s": 0.1}, "large": {"L": 0.1}}, route={"tiers": tiers}).decide()
    assert order(decision) == ["L"]
    assert rejections(decision) == {"small": "prompt_tokens 1000 is not <= 500"}


def test_a_pool_that_stands_in_two_tiers_is_considered_once() -> None:
    """In the first whose condition holds."""
    tiers = [{"pool": "small", "when": {"tools": False}}, "large", "small"]
    world = DecisionScenario({"small": {"s": 0.1}, "large": {"L": 0.1}}, route={"tiers": tiers})
    assert [(c.endpoint.id, c.tier) for c in world.decide().ranked] == [("s", 0), ("L", 1)]
    assert [(c.endpoint.id, c.tier) for c in world.decide(RequestView(0.0, tools=True)).ranked] == [
        ("L", 1),
        ("s", 2),
    ]
    assert [(r.pool, r.tier, r.reason) for r in world.decide().rejected] == [
        ("small", 2, "its pool is looked at in tier 1")
    ]
    world.route = {"tiers": ["large", {"pool": "small", "when": {"tools": False}}, "small"]}
    assert [(r.tier, r.reason) for r in world.decide().rejected] == [(2, "its pool is looked at in tier 2")]


def test_an_endpoint_that_is_passed_over_while_it_is_warmed_up_says_so() -> None:
    """It is neither ranked nor forgotten; where its whole pool is, all are ranked."""
    warming = DecisionScenario({"small": {"a": 0.1, "b": 0.1}}, loads={"a": Load(warming=True)})
    assert order(warming.decide()) == ["b"]
    assert rejections(warming.decide()) == {"a": "being warmed up: it is given its cache back"}
    warming.loads = {"a": Load(warming=True), "b": Load(warming=True)}
    assert (sorted(order(warming.decide())), rejections(warming.decide())) == (["a", "b"], {})


def test_a_pool_without_an_estimate_is_not_guessed_at() -> None:
    """Its tokenizer failed, or it is not in the fleet; the others serve."""
    tiers = ["gone", "small"]
    decision = DecisionScenario(TWO, route={"tiers": tiers}).decide()
    assert sorted(order(decision)) == ["a", "b"]
    assert rejections(decision) == {"gone": "the prompt was not estimated for it"}


def test_beliefs_are_asked_once_for_every_usable_endpoint() -> None:
    """A forecast is the dearest part of a decision."""
    world = DecisionScenario(
        {"small": {"a": 0.1, "b": 0.1}, "large": {"L": 0.1}}, loads={"b": Load(health=Health.DOWN)}
    )
    world.route = budget(1.0)
    world.decide()
    assert world.beliefs.asked == ["a", "L"]
