"""`region` of a route in the queue: parts of a tier are left as tiers are, and `only` is never left."""

from __future__ import annotations

from typing import Any

import pytest

from policies.queue.hold_rules import TICK
from policies.types import FOREVER, Endpoint
from tests.support.queue_fixture import START, QueueFixture

HERE, FAR = Endpoint("small/1", "small", "eu"), Endpoint("small/2", "small", "us")
PREFER: dict[str, Any] = {"region": {"prefer": ["eu"]}}
ONLY: dict[str, Any] = {"region": {"only": ["eu"]}}


def first_release(queue: QueueFixture, until: float) -> float:
    """The time of the first release, with a release every TICK seconds; FOREVER if none until `until`."""
    while queue.now < until:
        if queue.release(later=TICK):
            return queue.now
    return FOREVER


def test_a_queued_request_goes_to_another_region_in_time() -> None:
    """At the last moment, as for another tier: the engine in eu has long promised what it does not keep."""
    queue = QueueFixture((HERE, FAR))
    queue.decode(HERE, token=0.0435)
    assert queue.enter("r", budget=3.0, **PREFER) == []
    assert queue.assigned(HERE) == ["r"]
    assert START + 2.0 < first_release(queue, START + 3.0) < START + 3.0
    assert queue.destination("r") == FAR.id
    assert queue.released["r"].ranked[0].probability >= 0.9


def test_without_a_preferred_region_it_goes_to_the_idle_engine_at_once() -> None:
    """The control of the test above."""
    queue = QueueFixture((HERE, FAR))
    queue.decode(HERE, token=0.0435)
    assert queue.enter("r", budget=3.0) == ["r"]
    assert queue.destination("r") == FAR.id


@pytest.mark.parametrize("budget", [0.15, 3.0, None], ids=["late", "in time", "without a deadline"])
def test_no_queued_request_leaves_its_only_region(budget: float | None) -> None:
    """Beside an idle engine elsewhere, which it would go to otherwise, it waits until the engine in eu takes it."""
    for region, endpoint in ((ONLY, HERE), ({}, FAR)):
        queue = QueueFixture((HERE, FAR))
        queue.fill(HERE)
        assert queue.enter("r", budget=budget, **region) == ([] if region else ["r"])
        assert not region or START < first_release(queue, START + 5.0) < FOREVER
        assert queue.destination("r") == endpoint.id


@pytest.mark.parametrize(("region", "waits"), [(PREFER, True), ({}, False)], ids=["prefer", "none"])
def test_work_without_a_deadline_waits_for_its_preferred_region(region: dict[str, Any], waits: bool) -> None:
    """As it waits for its preferred tier."""
    queue = QueueFixture((HERE, FAR))
    queue.fill(HERE)
    released = queue.enter("r", budget=None, **region)
    assert released == ([] if waits else ["r"])
    assert waits or queue.destination("r") == FAR.id
