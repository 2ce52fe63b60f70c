"""Overload: where not all of a queue can be in time, the longest prefills are late, not the latest requests."""

from __future__ import annotations

from policies.queue.hold_rules import AT_LIMIT
from policies.queue.placement_round import POSTPONED
from tests.support.queue_fixture import LARGE, ONE, PROMPT, QueueFixture

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


def test_no_request_is_postponed_for_another_callers() -> None:
    """Without keys all callers are one tenant; each address has requests of its own."""
    queue = at_the_pace_limit()
    queue.enter("long", LONG, budget=2.5, tpot=PACE, caller="10.0.0.1")
    queue.enter("short", budget=2.5, tpot=PACE, caller="10.0.0.2")
    assert queue.assigned() == ["long", "short"]


def test_a_pace_that_a_caller_asks_for_makes_no_other_callers_requests_late() -> None:
    """A caller may tighten its own TPOT budget: the time that answers leave for prefills is the same."""
    queue = at_the_pace_limit()
    queue.enter("hurried", LONG // 6, budget=4.0, tpot=PACE, tenant="one", asked_tpot=0.001)
    queue.enter("long", LONG, budget=4.1, tpot=PACE, tenant="other")
    queue.enter("short", budget=4.1, tpot=PACE, tenant="other")
    assert queue.assigned() == ["hurried", "long", "short"]


def test_a_route_with_another_scorer_has_no_late_requests() -> None:
    """Not even where a request of a route with the queue's own scorer comes to the same engine."""
    queue, other = at_the_pace_limit(), {"tpot": PACE, "scorer": "least_request", "name": "other"}
    queue.enter("first", budget=2.0, tpot=PACE)
    queue.enter("long", LONG, budget=2.5, **other)
    queue.enter("short", budget=2.5, **other)
    queue.enter("second", budget=2.0, tpot=PACE)
    assert queue.assigned() == ["first", "second", "long", "short"]


def test_a_request_that_is_postponed_at_once_is_late() -> None:
    queue = at_the_pace_limit()
    queue.enter("short", budget=2.5, tpot=PACE)
    queue.enter("long", LONG, budget=2.4, tpot=PACE)
    assert queue.best_effort == ["long"]
    assert queue.held("long").is_late


def test_a_postponed_request_is_not_moved_to_another_tier_in_the_same_round() -> None:
    """Both were due to spill: the first has moved before the second, which is late in its place."""
    queue = QueueFixture((ONE, LARGE))
    queue.decode(token=0.044)
    queue.decode(LARGE, token=0.043)
    coming = [(8_000, 1.5, 0.02), (8_000, 2.5, 0.3), (LONG, 2.5, 0.3), (PROMPT, 2.5, 0.0), (LONG, 1.5, 0.3)]
    for number, (tokens, budget, later) in enumerate(coming):
        queue.enter(str(number), tokens, budget=budget, tpot=PACE, tiers=["small", "large"])
        queue.release(later)
    assert (queue.assigned(LARGE), queue.best_effort) == (["0", "3"], ["2", "4"])


def test_a_few_of_a_long_queue_are_postponed_at_a_time() -> None:
    """An engine that comes to its limit with a long queue: the search through all of it is bounded."""
    queue = QueueFixture()
    queue.fill(ONE)
    for number in range(300):
        queue.enter(str(number), 120 if number % 2 else 40, budget=2.0, tpot=PACE)
    queue.decode(token=0.044)
    queue.enter("last", 40, budget=2.0, tpot=PACE)
    assert len(queue.best_effort) == POSTPONED
