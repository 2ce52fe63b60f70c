"""Tiers beside each other, and tiers that come only after a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from policies.routes.route import Route
from policies.types import Health, Load, Placement
from tests.support.decision_fleet import DecisionScenario, budget, order

FLEET = {"main": {"m": 0.5}, "twin": {"t": 0.3}, "spare": {"s": 0.1}, "long": {"l": 0.2}}
TWINS: list[Any] = ["main", {"pool": "twin", "beside": True, "weight": 3}, {"pool": "spare", "after": "failure"}]
CAUSES: list[Any] = ["main", {"pool": "spare", "after": "failure"}, {"pool": "long", "after": "context"}]
DOWN = Load(health=Health.DOWN)


def scenario(tiers: list[Any], **more: Any) -> DecisionScenario:
    pools = {tier if isinstance(tier, str) else tier["pool"] for tier in tiers}
    fleet = {name: endpoints for name, endpoints in FLEET.items() if name in pools}
    route = {"tiers": tiers, **more.pop("route", {})}
    return DecisionScenario(fleet, route=route, **more)


def test_equals_are_first_by_the_share_of_their_weights() -> None:
    first = Counter(order(scenario(TWINS).decide(sequence=i))[0] for i in range(1000))
    assert 700 < first["t"] < 800
    assert first["t"] + first["m"] == 1000


def test_an_equal_comes_before_the_next_tier() -> None:
    """Whichever was drawn."""
    found = [order(scenario(TWINS).decide(sequence=i)) for i in range(20)]
    assert {tuple(sorted(each[:2])) for each in found} == {("m", "t")}
    assert {each[2] for each in found} == {"s"}


def test_the_draw_of_a_request_is_the_same_again() -> None:
    """A request that waits is decided again."""
    assert len({order(scenario(TWINS).decide(sequence=7))[0] for _ in range(5)}) == 1


@pytest.mark.parametrize("prefer", ["latency", "cost", "quality", "throughput"])
@pytest.mark.parametrize("seconds", [None, 0.2])
def test_a_tier_after_a_failure_is_last_however_soon_it_is(prefer: str, seconds: float | None) -> None:
    """Neither a preference nor a budget that it alone would make brings it forward."""
    route = {"prefer": prefer, **(budget(seconds) if seconds else {})}
    assert order(scenario(CAUSES, route=route).decide()) == ["m", "s", "l"]


def test_a_tier_after_a_failure_is_first_where_no_other_is_usable() -> None:
    """The reserve for another cause is no candidate then."""
    assert order(scenario(CAUSES, loads={"m": DOWN}).decide()) == ["s"]


def test_a_tier_after_a_failure_is_first_where_every_other_endpoint_is_at_its_cap() -> None:
    """As it would be after the 429 of a server."""
    full = {"m": Load(in_flight=1, full=True)}
    assert order(scenario(CAUSES, loads=full).decide()) == ["s"]
    assert order(scenario(["main", CAUSES[2]], loads=full).decide()) == ["m", "l"]


SHORT = {"main": {"context_window": 900}, "spare": {"context_window": 950}}  # of prompts of 1000 tokens


def test_a_prompt_that_is_too_long_goes_to_the_tier_for_it() -> None:
    assert order(scenario(CAUSES, pools=SHORT).decide()) == ["l"]


def test_a_guess_of_the_answers_length_sends_no_prompt_to_the_reserve() -> None:
    """The expected 200 tokens do not fit beside it."""
    assert order(scenario(CAUSES, pools={"main": {"context_window": 1100}}).decide())[0] == "m"


def test_a_prompt_that_is_too_long_goes_to_the_reserve_without_a_tier_for_it() -> None:
    """Unless the route says that it goes nowhere."""
    tiers = ["main", {"pool": "long", "after": "failure"}]
    assert order(scenario(tiers, pools=SHORT).decide()) == ["l"]
    refused = scenario(tiers, pools=SHORT, route={"fallback": {"context": False}}).decide()
    assert (refused.outcome, refused.cause and refused.cause.value) == (Placement.UNFIT, "context_window")


def test_a_prompt_that_is_too_long_does_not_go_to_a_tier_for_refused_content() -> None:
    found = scenario(["main", {"pool": "long", "after": "content_filter"}], pools=SHORT).decide()
    assert found.outcome is Placement.UNFIT


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([{"pool": "a", "after": "failure"}], "tier 1 cannot be `after` anything"),
        ([{"pool": "a", "beside": True}], "tier 1 is `beside` no tier"),
        (["a", {"pool": "b", "beside": True, "after": "failure"}], "tier 2 is `beside` no tier"),
    ],
)
def test_a_tier_that_is_beside_or_after_nothing_is_refused(tiers: list[Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Route.model_validate({"name": "r", "tiers": tiers})
