"""`limits.external` in the tier walk: an API is a candidate while the route may spend on it."""

from __future__ import annotations

from typing import Any

import pytest

from policies.external_share.external_share import EXTERNAL_LIMIT
from policies.fleet.fleet import AttemptReport
from policies.types import AttemptOutcome, Placement
from tests.support.queue_fixture import API, ONE, QueueFixture

pytestmark = pytest.mark.virtual_time

LATE: dict[str, Any] = {"tokens": 4000, "budget": 0.15, "tiers": ["api"]}


def test_beyond_its_share_a_route_waits_for_its_engines() -> None:
    """One in two requests may leave for the API; an engine takes the others once idle."""
    queue = QueueFixture((ONE, API))
    queue.fill(ONE)
    tight: dict[str, Any] = {"budget": 0.9, "tokens": 20_000, "tiers": ["small", "api"]}
    sent = [queue.enter(f"r{number}", **tight, limits={"external": "50%"}) for number in range(4)]
    assert sent == [[], ["r1"], [], ["r3"]]
    assert queue.destination("r1") == queue.destination("r3") == API.id
    assert queue.best_effort == ["r0", "r2"]


def test_a_route_without_a_limit_uses_the_api_at_will() -> None:
    queue = QueueFixture((ONE, API))
    assert all(queue.enter(f"r{number}", tiers=["api"]) for number in range(4))


def test_usd_count_as_reported() -> None:
    """One expected answer of 256 tokens costs 5 US cents at 20 USD per million tokens, a reported one more."""
    queue = QueueFixture((ONE, API))
    limits = {"external": {"usd_per_hour": 0.2}}
    assert queue.enter("first", tiers=["api"], limits=limits) == ["first"]
    report = AttemptReport(prompt_tokens=1900, completion_tokens=8000)
    queue.fleet.on_ended("first", AttemptOutcome.COMPLETED, queue.now, report)
    assert queue.enter("second", tiers=["api"], limits=limits) == ["second"]
    refused = queue.released["second"]
    assert (refused.outcome, refused.cause) == (Placement.RATE_LIMITED, EXTERNAL_LIMIT)
    assert refused.retry_after > 0


@pytest.mark.parametrize("later", [3599.0, 3661.0])
def test_a_refused_route_may_spend_again_after_an_hour(later: float) -> None:
    queue = QueueFixture((ONE, API))
    limits = {"external": {"usd_per_hour": 0.05}}
    assert queue.enter("first", tiers=["api"], limits=limits) == ["first"]
    queue.now += later
    queue.enter("second", tiers=["api"], limits=limits)
    assert (queue.destination("second") == API.id) is (later > 3600)
