"""Tier choice on routes that judge the openings of streams: the first token must leave time for the rest of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from policies.queue.queued_request import QueuedRequest
from policies.routing.tiers import decide
from policies.types import Decision, Forecast, RequestView
from tests.support.decision_fleet import DecisionScenario, budget, order, preset

FLEET = {"large": {"L": 0.5}, "small": {"s": 0.2}}  # probability 0.9 at 700 and 280 ms


def decided(judging: Mapping[str, float] | None, reasoning: Mapping[str, float] | None = None) -> Decision:
    """Under a budget of 1 s."""
    scenario = DecisionScenario(FLEET)
    promised = preset("chat", {"name": "r", "tiers": list(FLEET), **budget(1.0)})
    request = RequestView(0.0, stream=True)
    times = None if reasoning is None else {pool: Forecast(seconds) for pool, seconds in reasoning.items()}
    queued = QueuedRequest("r", request, scenario.estimate, promised, 0, reasoning=times, judging=judging)
    return decide(queued, scenario.fleet, scenario.beliefs, 0.0)


@pytest.mark.parametrize(
    ("judging", "chosen", "deadline"),
    [
        (None, "L", 1.0),
        ({"large": 0.29, "small": 0.1}, "L", 0.71),
        ({"large": 0.31, "small": 0.1}, "s", 0.9),
        ({"large": 0.1, "small": 5.0}, "L", 0.9),
    ],
)
def test_the_wait_for_an_opening_takes_time_from_the_first_token_of_its_pool(
    judging: Mapping[str, float] | None, chosen: str, deadline: float
) -> None:
    """The deadline of the attempts is that of the engine's first token, by which they are hedged and left."""
    found = decided(judging)
    assert (order(found)[0], found.deadline, found.judging) == (chosen, pytest.approx(deadline), judging)


def test_reasoning_and_judging_add_up() -> None:
    """Of pools that reason, and a budget of the answer."""
    assert order(decided({"large": 0.2, "small": 0.0}, {"large": 0.09, "small": 0.0}))[0] == "L"
    assert order(decided({"large": 0.2, "small": 0.0}, {"large": 0.11, "small": 0.0}))[0] == "s"


@pytest.mark.parametrize(("judged", "chosen"), [(0.1, "near"), (0.25, "far")])
def test_what_a_caller_does_not_see_counts_for_each_region_of_a_tier(judged: float, chosen: str) -> None:
    """Reasoning and judging, of a budget of the answer: the nearer region comes first where it leaves time for both."""
    scenario = DecisionScenario({"large": {"near": 0.3, "far": 0.1}}, regions={"near": "eu", "far": "us"})
    route = {"name": "r", "tiers": ["large"], "ttft": {"budget": "1s", "of": "answer"}, "region": {"prefer": ["eu"]}}
    reasoning, judging = {"large": Forecast(0.4)}, {"large": judged}
    request = RequestView(0.0, stream=True)
    promised = preset("chat", route)
    queued = QueuedRequest("r", request, scenario.estimate, promised, 0, reasoning=reasoning, judging=judging)
    decision = decide(queued, scenario.fleet, scenario.beliefs, 0.0)
    assert order(decision)[0] == chosen
    assert decision.deadline == pytest.approx(1.0 - 0.4 - judged)
