"""Overload: where not all of a queue can be in time, the longest prefills are late, not the latest requests."""

from __future__ import annotations

from policies.queue.hold_rules import AT_LIMIT
from tests.support.queue_fixture import QueueFixture

LONG = 20_000  # tokens: a prefill of 1.4 s
PACE = {"budget": "50ms"}  # of the route


def at_the_pace_limit() -> QueueFixture:
    """Answers take a little more than their TPOT allows, and leave prefills 60% of the time from 0.4 s on."""
    queue = QueueFixture()
    queue.decode(token=0.044)
    assert queue.load().tpot_pressure > AT_LIMIT
    return queue


def test_a_long_prefill_is_postponed_for_a_short_one_that_would_be_late() -> None:
    """Moore and Hodgson (1968): most jobs are in time where the longest of those before a late one is left out."""
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=2.5, tpot=PACE)
    assert queue.assigned() == ["long"]
    queue.enter("short", budget=2.5, tpot=PACE)
    assert (queue.assigned(), queue.best_effort) == (["short"], ["long"])


def test_all_stay_where_all_are_in_time() -> None:
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=4.0, tpot=PACE)
    queue.enter("short", budget=4.0, tpot=PACE)
    assert queue.assigned() == ["long", "short"]


def test_the_latest_is_late_where_none_before_it_is_much_longer() -> None:
    """As much would be lost as is gained."""
    queue = at_the_pace_limit()
    queue.enter("first", LONG, budget=2.5, tpot=PACE)
    queue.enter("second", LONG * 2 // 3, budget=2.5, tpot=PACE)
    assert (queue.assigned(), queue.best_effort) == (["first"], ["second"])


def test_no_request_is_postponed_for_another_tenants() -> None:
    """A tenant of short prompts would else keep the long ones of another away from the engines."""
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=2.5, tpot=PACE, tenant="one")
    queue.enter("short", budget=2.5, tpot=PACE, tenant="other")
    assert queue.assigned() == ["long", "short"]
