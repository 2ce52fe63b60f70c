"""A route as written in YAML."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policies.routes.route import Route
from policies.types import FOREVER


def route(**raw: Any) -> Route:
    return Route.model_validate({"tiers": ["small"], **raw})


def test_a_tier_is_a_name_or_a_mapping() -> None:
    """Most tiers need no condition."""
    tiers = route(tiers=["large", {"pool": "small", "when": {"tools": False}}]).tiers
    assert [(tier.pool, tier.when is None) for tier in tiers] == [("large", True), ("small", False)]


def test_reasons_to_escalate_are_a_list() -> None:
    found = route(escalate=["empty", "invalid_json"])
    assert (route().escalate, found.escalate) == (frozenset(), {"empty", "invalid_json"})
    assert Route.model_validate(found.model_dump(), context="dumped") == found


@pytest.mark.parametrize("off", ["off", False, None])
def test_a_budget_can_be_switched_off(off: Any) -> None:
    """So an operator can undo a preset; YAML dialects read `off` differently."""
    switched = route(ttft=off, tpot=off, total=off)
    assert (switched.ttft, switched.tpot, switched.total) == (None, None, None)


def test_on_and_off_may_arrive_as_booleans() -> None:
    """A YAML 1.1 parser reads `on` and `off` as booleans."""
    assert route(rescue=True).rescue == "on"
    assert route(rescue=False, hedge=False) == route(rescue="off", hedge="off")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tiers": []}, "at least 1 item"),
        ({"tiers": ["small", "small"]}, "tier 2 can never be reached: tier 1 takes every request to pool small"),
        ({"ttft": {"budget": "2s"}, "total": {"budget": "1s"}}, "ttft.budget (2s) is longer than total.budget (1s)"),
        (
            {"ttft": {"budget": "2s"}, "limits": {"ttft_budget": "1s"}},
            "limits.ttft_budget (1s) is shorter than ttft.budget (2s)",
        ),
        ({"ttft": {"budget": "0s"}}, "greater than 0"),
        ({"ttft": {"budget": "1s", "target": 1}}, "less than 1"),
        (
            {"gap": {"budget": "40ms"}, "tpot": {"budget": "50ms"}},
            "gap.budget (0.04s) is shorter than tpot.budget (0.05s), which may be the preset of workload",
        ),
        ({"gap": {"budget": "5ms"}, "tpot": "off"}, "greater than or equal to 0.01"),
        ({"hedge": {"max_extra": "300%"}}, "less than or equal to 1"),
        ({"ttft": {"bugdet": "1s"}}, "Extra inputs are not permitted"),
        ({"scorer": "best"}, "'predicted', 'round_robin', 'least_request' or 'prefix_hash'"),
        ({"scorer": "dualmap"}, "'predicted', 'round_robin', 'least_request' or 'prefix_hash'"),
        ({"max_attempts": 0}, "greater than or equal to 1"),
    ],
)
def test_contradictory_or_unknown_settings_are_refused(raw: dict[str, Any], message: str) -> None:
    """Unknown keys, contradictory budgets, unreachable tiers."""
    with pytest.raises(ValidationError) as refused:
        route(**raw)
    assert message in str(refused.value)


def test_a_pool_may_have_a_conditional_and_an_unconditional_tier() -> None:
    """First for short prompts, last for all."""
    tiers = [{"pool": "small", "when": {"prompt_tokens": "<= 1000"}}, "large", "small"]
    assert len(route(tiers=tiers).tiers) == 3


@pytest.mark.parametrize(
    ("raw", "asked", "got"),
    [
        ({"ttft": {"budget": "1s"}}, None, 1.0),
        ({"ttft": {"budget": "1s"}}, 0.3, 0.3),
        ({"ttft": {"budget": "1s"}}, 9.0, 1.0),
        ({"ttft": {"budget": "1s"}, "limits": {"ttft_budget": "5s"}}, 3.0, 3.0),
        ({"ttft": {"budget": "1s"}, "limits": {"ttft_budget": "5s"}}, 9.0, 5.0),
        ({"ttft": {"budget": "1s"}, "limits": {"ttft_budget": "5s"}}, None, 1.0),
        ({}, None, FOREVER),
        ({}, 2.0, 2.0),
        ({"limits": {"ttft_budget": "5s"}}, 9.0, 9.0),
    ],
)
def test_a_caller_can_tighten_the_ttft_budget_and_loosen_it_up_to_the_limit(
    raw: dict[str, Any], asked: float | None, got: float
) -> None:
    """Without a limit a route is never loosened; without a budget every value tightens."""
    assert route(**raw).ttft_budget(asked) == got


@pytest.mark.parametrize(
    ("raw", "asked", "uncached", "got"),
    [
        ({}, None, 0, 1.0),
        ({}, None, 100_000, 5.0),
        ({}, 0.3, 100_000, 0.3),
        ({}, 9.0, 100_000, 5.0),
        ({"limits": {"ttft_budget": "7s"}}, 9.0, 100_000, 7.0),
        ({"total": {"budget": "3s"}}, None, 100_000, 3.0),
    ],
)
def test_a_ttft_budget_can_grow_with_the_uncached_tokens(
    raw: dict[str, Any], asked: float | None, uncached: int, got: float
) -> None:
    """To the budget of the whole answer at most. A caller's own budget is of the prompt that it sends: it is fixed."""
    growing = route(ttft={"budget": "1s", "per_1k_tokens": "40ms"}, **raw)
    assert growing.ttft_budget(asked, uncached) == pytest.approx(got)
    assert growing.budget_grows
    assert route(ttft={"budget": "1s"}).ttft_budget(None, uncached) == 1.0


@pytest.mark.parametrize(
    ("own", "asked", "got"),
    [("50ms", None, 0.05), ("50ms", 0.02, 0.02), ("50ms", 0.08, 0.05), ("off", None, None), ("off", 0.08, 0.08)],
)
def test_a_caller_can_tighten_the_tpot_budget(own: str, asked: float | None, got: float | None) -> None:
    """Never loosen; without a budget every value tightens."""
    assert route(tpot={"budget": own} if own != "off" else own).tpot_budget(asked) == got


@pytest.mark.parametrize(
    ("cap", "asked", "got"),
    [(None, None, None), (None, 50, 50), (100, None, 100), (100, 50, 50), (100, 500, 100)],
)
def test_output_tokens_are_the_default_and_the_cap(cap: int | None, asked: int | None, got: int | None) -> None:
    """The smaller of the caller's max_tokens and the route's; the route's if the caller sends none."""
    assert route(limits={"output_tokens": cap}).output_cap(asked) == got


def test_editors_offer_off_for_every_budget() -> None:
    """The JSON Schema accepts what validation does."""
    properties = Route.model_json_schema()["properties"]
    assert [name for name, field in properties.items() if {"const": "off"} in field.get("anyOf", [])] == [
        "ttft",
        "tpot",
        "total",
        "by",
    ]


@pytest.mark.parametrize(("own", "asked", "got"), [("6h", None, 21600.0), ("6h", 60.0, 60.0), ("off", None, FOREVER)])
def test_a_caller_names_another_time_to_be_done_by(own: str, asked: float | None, got: float) -> None:
    """Sooner or later than the route's, but before the end of its answers."""
    assert route(by=own).done_within(asked) == got
    assert route(total={"budget": "2s"}).done_within(60.0) == 20.0


@pytest.mark.parametrize("kept", ["ttft", "total"])
def test_work_that_can_wait_has_no_other_deadline(kept: str) -> None:
    """`ttft` and `total` of a preset are named."""
    with pytest.raises(ValidationError, match=f"`{kept}: off`"):
        route(by="6h", **{kept: {"budget": "1s"}})
