"""`region` of a route: which endpoints it may use, and which it uses first."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policies.rate_limit.send_limits import SendLimits
from policies.routes.region import ALIKE, ALIKE_S, REGION
from policies.routes.route import Route
from policies.routing.prompt_counts import uncached_tokens
from policies.routing.reasons import reason_of
from policies.types import Health, Load, Placement, RejectionKind, RequestView
from tests.support.decision_fleet import DecisionScenario, budget, order

REGIONS = {"e1": "eu", "e2": "eu", "u": "us", "a": "ap", "e3": "eu", "u3": "us"}
LARGE = {"large": {"e1": 0.3, "e2": 0.3, "u": 0.1, "a": 0.2}}
BOTH = {**LARGE, "small": {"e3": 0.05, "u3": 0.05}}
PREFER = {"prefer": ["eu", "us"]}
ONLY = {"only": ["eu"]}


def scenario(ttft: Any, region: Any, **more: Any) -> DecisionScenario:
    return DecisionScenario(
        ttft, regions=REGIONS, route={**budget(1.0), "region": region, **more.pop("route", {})}, **more
    )


def down(*names: str, **more: Any) -> dict[str, Load]:
    return {name: Load(health=Health.DOWN, **more) for name in names}


def test_without_a_region_the_fastest_endpoint_of_a_tier_is_taken() -> None:
    decision = DecisionScenario(LARGE, regions=REGIONS, route=budget(1.0)).decide()
    assert order(decision)[0] == "u"


def test_only_leaves_no_candidate_of_another_region() -> None:
    """Neither as a first choice nor as a fallback; the others are rejected with the reason."""
    decision = scenario(BOTH, ONLY).decide()
    assert sorted(order(decision)) == ["e1", "e2", "e3"]
    kinds = {each.endpoint: each.kind for each in decision.rejected}
    assert kinds == dict.fromkeys(("u", "a", "u3"), REGION)


def test_an_endpoint_without_a_region_is_in_none() -> None:
    """A label that was forgotten leaks nothing."""
    decision = DecisionScenario({"p": {"e1": 0.3, "x": 0.1}}, regions=REGIONS, route={"region": ONLY}).decide()
    assert order(decision) == ["e1"]


@pytest.mark.parametrize(
    "loads",
    [
        down("e1", "e2", "e3"),
        {name: Load(full=True) for name in ("e1", "e2", "e3")} | down("u", failing=True),
        down("e1", "e2", "e3", failing=True) | down("u", "a", "u3", failing=True),
        {name: Load(limits=SendLimits(blocked_until=50.0)) for name in ("e1", "e2", "e3")},
    ],
    ids=["down", "at their cap", "a last resort", "rate limited"],
)
def test_only_holds_whatever_is_wrong_with_the_region(loads: dict[str, Load]) -> None:
    """Not even as a last resort, or where the others only have to be waited for."""
    decision = scenario(BOTH, ONLY, loads=loads).decide()
    assert set(order(decision)) <= {"e1", "e2", "e3"}


def test_a_region_that_is_down_is_unavailable_and_not_an_invalid_request() -> None:
    """The caller may come back: the wait is that of the region's own endpoints."""
    decision = scenario(LARGE, ONLY, loads=down("e1", "e2")).decide()
    assert (decision.outcome, decision.cause) == (Placement.UNAVAILABLE, RejectionKind.DOWN)
    assert decision.retry_after > 0


def test_no_header_widens_only() -> None:
    """A tier's `when` may read a header; what `only` leaves out stays out."""
    tiers = [{"pool": "large", "when": {"header.x-region": "us"}}, "large"]
    for headers in ({}, {"x-region": "us"}):
        request = RequestView(0.0, stream=True, headers=headers)
        assert set(order(scenario(LARGE, ONLY, route={"tiers": tiers}).decide(request))) == {"e1", "e2"}


def test_the_budget_that_grows_counts_the_caches_of_the_region_alone() -> None:
    """See `uncached_tokens`: a prefix that another region holds makes no budget shorter."""
    for region, cached in ((None, 900), (ONLY, 0)):
        known = DecisionScenario(LARGE, regions=REGIONS, route={"region": region})
        found = uncached_tokens(
            RequestView(0.0), known._route(), known.estimate, known.fleet, lambda e, p: 900 if e.id == "u" else 0
        )
        assert found == known.tokens - cached


def test_a_preferred_region_comes_first_where_it_makes_the_budget() -> None:
    """Though slower; then the next named one, then all others; and all of a tier before the next tier."""
    assert order(scenario(BOTH, PREFER).decide())[2:] == ["u", "a", "e3", "u3"]
    assert set(order(scenario(BOTH, PREFER).decide())[:2]) == {"e1", "e2"}


def test_a_preferred_region_that_misses_the_budget_is_left() -> None:
    """As a tier is: the next region of the same tier, before the next tier."""
    busy = {name: Load(queued_tokens=40_000) for name in ("e1", "e2")}
    decision = scenario(BOTH, PREFER, loads=busy).decide()
    assert order(decision)[:2] == ["u", "a"]


def test_where_no_region_makes_the_budget_the_best_chance_counts() -> None:
    decision = scenario(LARGE, PREFER, route={**budget(0.05), "on_miss": "best_effort"}).decide()
    assert order(decision)[0] == "u"


def test_reasons_name_the_region_that_was_preferred() -> None:
    decision = scenario(LARGE, PREFER).decide()
    [reason] = [reason_of(decision, each) for each in decision.ranked if each.endpoint.id == "u"]
    assert reason.endswith("most of it by the place of its tier or part of a tier (0.100)")


def test_a_baseline_walks_the_regions_in_their_order() -> None:
    decision = scenario(LARGE, PREFER, route={"scorer": "round_robin"}).decide()
    assert {each.endpoint.locality for each in [*decision.ranked][:2]} == {"eu"}


def test_the_nearest_region_is_that_of_the_least_round_trip() -> None:
    """By measured network time, and not by the forecast, which `prefer: latency` goes by."""
    rtt = {"e1": 0.012, "e2": 0.009, "u": 0.09, "a": 0.2}
    decision = scenario(LARGE, {"prefer": "nearest"}, rtt=rtt).decide()
    assert [each.endpoint.locality for each in decision.ranked] == ["eu", "eu", "us", "ap"]


def test_regions_as_near_as_each_other_share_the_load() -> None:
    """Two zones of one region differ by microseconds, which are no reason for an order."""
    rtt = {"e1": 0.001, "e2": 0.001, "u": 0.001 * ALIKE + ALIKE_S, "a": 0.2}
    assert order(scenario(LARGE, {"prefer": "nearest"}, rtt=rtt).decide())[0] == "u"  # the fastest of both
    rtt["u"] += 1e-6
    assert order(scenario(LARGE, {"prefer": "nearest"}, rtt=rtt).decide())[2] == "u"


def test_an_unmeasured_region_counts_as_near() -> None:
    """Else nothing would ever measure it."""
    rtt = {"e1": 0.02, "e2": 0.02, "u": 0.09}
    assert order(scenario(LARGE, {"prefer": "nearest"}, rtt=rtt).decide())[0] == "a"


@pytest.mark.parametrize(
    ("region", "error"),
    [
        ({}, "region is empty"),
        ({"only": []}, "at least 1 item"),
        ({"only": ["eu"], "prefer": ["us", "eu"]}, "region.prefer names us, which region.only excludes"),
        ({"prefer": "near"}, "nearest"),
    ],
)
def test_a_region_that_says_nothing_or_contradicts_itself_is_an_error(region: Any, error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        Route.model_validate({"tiers": ["p"], "region": region})
