"""Uncached tokens of a prompt, with which a TTFT budget grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.routing.prompt_counts import uncached_tokens
from policies.types import (
    Endpoint,
    FleetSnapshot,
    Health,
    Load,
    Pool,
    PoolEstimate,
    PromptEstimate,
    RequestView,
)

ENDPOINTS = {pool: tuple(Endpoint(f"{pool}/{i}", pool) for i in "ab") for pool in ("small", "large")}
POOLS = {name: Pool(name, name, endpoints) for name, endpoints in ENDPOINTS.items()}
HITS = {"small/a": 9_000, "small/b": 0, "large/a": 6_000, "large/b": 2_000}
ESTIMATE = PromptEstimate({"small": PoolEstimate(10_000), "large": PoolEstimate(11_000)})
REQUEST = RequestView(5.0)
DOWN = Load(health=Health.DOWN)


def growing(*tiers: Any) -> Route:
    return Route.model_validate({"tiers": tiers, "ttft": {"budget": "1s", "per_1k_tokens": "100ms"}})


def uncached(
    *tiers: Any, request: RequestView = REQUEST, loads: dict[str, Load] | None = None, **pools: dict[str, Any]
) -> int:
    found = {name: replace(pool, **pools.get(name, {})) for name, pool in POOLS.items()}
    fleet = FleetSnapshot(0.0, found, loads or {})
    return uncached_tokens(request, growing(*tiers), ESTIMATE, fleet, lambda endpoint, prompt: HITS[endpoint.id])


def test_the_longest_prefix_of_any_endpoint_counts() -> None:
    """Each pool counts the prompt with its own tokenizer."""
    assert uncached("large", "small") == 1_000
    assert uncached("large") == 5_000


def test_an_endpoint_that_cannot_take_the_request_does_not_count() -> None:
    """Neither one that is down, nor one of a tier that the request does not fit, nor one without its state."""
    assert uncached("large", "small", loads={"small/a": DOWN}) == 5_000
    assert uncached("large", {"pool": "small", "when": {"prompt_tokens": "<= 8000"}}) == 5_000
    assert uncached("large", "small", small={"context_window": 8_000}) == 5_000
    assert uncached("large", "small", request=RequestView(5.0, pinned="large/b")) == 9_000
    assert uncached("large", "small", request=RequestView(5.0, unfit={"small": "translated with a loss"})) == 5_000


def test_the_whole_prompt_counts_where_nobody_can_take_it() -> None:
    """By the tokenizer with the fewest tokens."""
    down = dict.fromkeys(HITS, DOWN)
    assert uncached("large", "small", loads=down) == 10_000


@pytest.mark.parametrize(("asked", "deadline"), [(None, 5 + 1.5), (0.2, 5.2)])
def test_the_deadline_is_fixed_from_these_tokens(asked: float | None, deadline: float) -> None:
    """Of the estimate at arrival, the same for every candidate."""
    request = RequestView(5.0, ttft_budget=asked)
    queued = QueuedRequest("r", request, replace(ESTIMATE, uncached_tokens=5_000), growing("large"), 1)
    assert queued.deadline == pytest.approx(deadline)
