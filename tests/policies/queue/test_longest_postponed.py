"""Overload: where not all of a queue can be in time, the longest prefills are late, not the latest requests."""

from __future__ import annotations

from policies.queue.hold_rules import AT_LIMIT
from tests.support.queue_fixture import ONE, PROMPT, QueueFixture

LONG = 20_000  # tokens: a prefill of about a second


def at_the_pace_limit() -> QueueFixture:
    """Answers on the engine take a little more than their TPOT allows; prefills had next to no time of late."""
    queue = QueueFixture()
    queue.decode(token=0.044)
    assert queue.load().tpot_pressure > AT_LIMIT
    return queue


def test_a_long_prefill_is_postponed_for_a_short_one_that_would_be_late() -> None:
    """Moore and Hodgson (1968): most jobs are in time where the longest of those before a late one is left out."""
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=4.0)
    assert queue.assigned() == ["long"]
    queue.enter("short", budget=4.0)
    assert (queue.assigned(), queue.best_effort) == (["short"], ["long"])


def test_all_stay_where_all_are_in_time() -> None:
    """An engine that is busy, with answers far from their limit."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("long", LONG, budget=20.0)
    queue.enter("short", budget=20.0)
    assert queue.assigned() == ["long", "short"]


def test_a_prefill_that_is_not_much_longer_stays() -> None:
    """Nothing is gained where as much is lost."""
    queue = at_the_pace_limit()
    queue.enter("first", LONG, budget=4.0)
    queue.enter("second", LONG // 2, budget=4.0)
    assert queue.assigned() == ["first", "second"]


def test_no_request_is_postponed_for_another_tenants() -> None:
    """A tenant of short prompts would else keep the long ones of another away from the engines."""
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=4.0, tenant="one")
    queue.enter("short", PROMPT, budget=4.0, tenant="other")
    assert queue.assigned() == ["long", "short"]
