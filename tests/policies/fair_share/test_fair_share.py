"""Requests of a tenant above its share of the engines."""

from __future__ import annotations

import pytest

from policies.types import Placement
from tests.support.queue_fixture import ONE, QueueFixture


def above_share() -> QueueFixture:
    """Tenant a has used more than b; the engine is idle."""
    queue = QueueFixture()
    queue.enter("b0", tenant="b")
    queue.complete("b0")
    for number in range(20):
        queue.enter(f"a{number}", tenant="a")
        queue.complete(f"a{number}")
    return queue


def test_while_another_tenant_is_active_requests_above_the_share_come_last() -> None:
    """Also those that were assigned before."""
    queue = above_share()
    filling = queue.fill(ONE)
    assert queue.enter("a20", tenant="a") == queue.enter("b1", tenant="b") == []
    assert (queue.assigned(), queue.best_effort) == (["b1"], ["a20"])
    queue.first_tokens(*filling)
    assert queue.release() == ["b1"]
    queue.first_tokens("b1")
    assert queue.release() == ["a20"]


def test_the_flooding_tenant_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound of the queue."""
    monkeypatch.setattr("policies.queue.queue_scheduler.MAX_HELD", 4)
    queue = QueueFixture()
    queue.fill(ONE)
    for name in ("a0", "b0", "b1", "b2"):
        assert queue.enter(name, tenant=name[0]) == []
    assert queue.enter("a1", tenant="a") == ["b2"]
    assert queue.destination("b2") == ""


def test_a_route_that_sheds_holds_no_more_above_the_share_than_can_be_in_time() -> None:
    """Held for the whole patience, a flood would fill the queue, and its callers would learn nothing."""
    queue = above_share()
    filling = queue.fill(ONE)
    for number in range(50):
        queue.enter(f"flood{number}", tenant="a", on_miss="shed")
    held = queue.best_effort
    assert held == [f"flood{number}" for number in range(len(held))]
    assert 3 <= len(held) <= 8  # prefills of 0.1 s, in a budget of 1 s, at the target of the route
    refused = queue.released["flood49"]
    assert refused.outcome is Placement.SHED
    assert 0.0 < refused.retry_after < 2.0
    assert queue.enter("modest", tenant="b", on_miss="shed") == []
    queue.first_tokens(*filling)
    assert queue.release()[0] == "modest"


def test_a_held_request_above_the_share_is_refused_once_it_cannot_be_in_time() -> None:
    """A route that sheds; on a route that queues it is answered late."""
    queue = above_share()
    queue.fill(ONE)
    queue.enter("shedding", tenant="a", on_miss="shed")
    queue.enter("queueing", tenant="a", name="other")
    assert queue.best_effort == ["shedding", "queueing"]
    assert sorted(queue.release(later=0.95)) == ["queueing", "shedding"]
    assert queue.released["shedding"].outcome is Placement.SHED
    assert queue.released["queueing"].outcome is Placement.PLACE
