"""Tier choice on routes whose budget is of the answer: the first token must leave time for the reasoning."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from policies.queue.queued_request import QueuedRequest
from policies.routing.decide import decide
from policies.types import Decision, Forecast, Placement, RequestView
from tests.support.decision_fleet import DecisionScenario, budget, order, preset

FLEET = {"large": {"L": 0.5}, "small": {"s": 0.2}}  # probability 0.9 at 700 and 280 ms


def decided(reasoning: Mapping[str, float] | None, seconds: float, **route: str) -> Decision:
    scenario = DecisionScenario(FLEET)
    promised = preset("chat", {"name": "r", "tiers": list(FLEET), **budget(seconds), **route})
    request = RequestView(0.0, stream=True)
    times = None if reasoning is None else {pool: Forecast(seconds) for pool, seconds in reasoning.items()}
    queued = QueuedRequest("r", request, scenario.estimate, promised, 0, reasoning=times)
    return decide(queued, scenario.fleet, scenario.beliefs, 0.0)


@pytest.mark.parametrize(
    ("reasoning", "chosen"),
    [
        (None, "L"),
        ({"large": 0.0, "small": 0.0}, "L"),
        ({"large": 0.19, "small": 0.0}, "L"),
        ({"large": 0.31, "small": 0.0}, "s"),
        ({"large": 0.31, "small": 0.31}, "s"),
        ({"large": 0.0, "small": 5.0}, "L"),
    ],
)
def test_reasoning_takes_time_from_the_first_token_of_its_pool(
    reasoning: Mapping[str, float] | None, chosen: str
) -> None:
    """Under a budget of 1 s the first tier needs 700 to 800 ms for its first token."""
    assert order(decided(reasoning, 1.0))[0] == chosen


@pytest.mark.parametrize(
    ("reasoning", "deadline"), [(None, 1.0), ({"large": 0.2, "small": 0.1}, 0.8), ({"large": 0.9, "small": 0.1}, 0.9)]
)
def test_the_deadline_is_that_of_the_first_token(reasoning: Mapping[str, float] | None, deadline: float) -> None:
    """Of the chosen pool: silence beyond it is late, whatever reasoning follows."""
    assert decided(reasoning, 1.0).deadline == pytest.approx(deadline)


def test_a_route_that_sheds_refuses_what_reasoning_makes_late_everywhere() -> None:
    """At once, with the time until a useful retry."""
    assert decided({"large": 3.0, "small": 3.0}, 1.0, on_miss="shed").outcome is Placement.SHED
    assert decided({"large": 3.0, "small": 0.5}, 1.0, on_miss="shed").outcome is Placement.PLACE


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "near"), (0.65, "far")])
def test_reasoning_counts_for_each_region_of_a_tier(seconds: float, chosen: str) -> None:
    """The nearer region comes first where it leaves time for it."""
    scenario = DecisionScenario({"large": {"near": 0.3, "far": 0.1}}, regions={"near": "eu", "far": "us"})
    route = {"name": "r", "tiers": ["large"], "ttft": {"budget": "1s", "of": "answer"}, "region": {"prefer": ["eu"]}}
    reasoning = {"large": Forecast(seconds)}
    request, promised = RequestView(0.0, stream=True), preset("chat", route)
    queued = QueuedRequest("r", request, scenario.estimate, promised, 0, reasoning=reasoning)
    decision = decide(queued, scenario.fleet, scenario.beliefs, 0.0)
    assert (order(decision)[0], decision.deadline) == (chosen, pytest.approx(1.0 - seconds))
