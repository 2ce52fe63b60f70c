"""Dispatch at once, queues per endpoint in deadline order, and the limit on queued requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fleet.engine_load import EngineLoad
from policies.queue import placement_round, queue_scheduler
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue_parts import queue_parts
from policies.routes.route import ScorerName
from policies.types import FOREVER, Endpoint, Health, Placement
from tests.support.queue_fixture import (
    API,
    LARGE,
    ONE,
    PROMPT,
    START,
    TWO,
    QueueFixture,
    bound_decisions,
    count_decisions,
    pool,
)

# --------------------------------------------------------------------------- capacity of endpoints


@pytest.mark.parametrize("budget", [1.0, 0.01, None])
def test_a_request_is_dispatched_at_once_while_an_endpoint_has_room(budget: float | None) -> None:
    """Nothing is queued while an endpoint has room: late requests and requests without a budget included."""
    queue = QueueFixture()
    assert queue.enter("r", budget=budget) == ["r"]
    assert (queue.destination("r"), queue.scheduler.held, queue.scheduler.wake_at) == (ONE.id, 0, FOREVER)


def test_an_engine_receives_a_tenth_of_a_second_of_prefill() -> None:
    """An engine's own queue is first come, first served, so all further requests stay in the gateway, where order is
    possible."""
    queue = QueueFixture()
    assert [queue.enter(name) for name in "abcd"] == [["a"], ["b"], [], []]
    assert (queue.assigned(), queue.scheduler.held) == (["c", "d"], 2)


def test_a_queued_request_is_released_by_a_first_token() -> None:
    """Each first token releases one request."""
    queue = QueueFixture()
    for name in "abcd":
        queue.enter(name)
    queue.first_tokens("a")
    assert queue.release() == ["c"]
    assert queue.release() == []
    queue.first_tokens("b")
    assert queue.release() == ["d"]


def test_nobody_waits_for_room_at_a_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only engine fails, and has prompts in progress: the request is tried there; the queue comes to an end."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.send("long", ONE, 20_000, queue.now)
    queue.fail("server", times=6)
    assert (queue.load().health, queue.load().failing) == (Health.DOWN, True)
    bound_decisions(monkeypatch, 10)
    assert queue.enter("r", budget=5.0) == ["r"]
    assert queue.destination("r") == ONE.id


def test_a_caller_whom_an_engine_has_refused_waits_for_room_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a cap is closed to nobody: its refusal is part of the forecast. The request stays in the queue
    of all, and the queue comes to an end."""
    queue = QueueFixture()
    queue.fail("rate_limited", caller="a")
    queue.fill(ONE)
    queue.arrive("of a", budget=60.0, caller="a")
    queue.arrive("of b", budget=40.0, caller="b")
    bound_decisions(monkeypatch, 10)
    assert queue.release() == []
    assert queue.assigned() == ["of b", "of a"]


def test_a_request_that_comes_back_to_its_queue_ends_the_turn_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules that disagree on a request cost one decision in a turn, and no endless loop: those behind wait."""
    queue = QueueFixture()
    for name in "abcd":
        queue.enter(name)
    monkeypatch.setattr(placement_round.PlacementRound, "note_hold", lambda *_: False)
    decided = count_decisions(monkeypatch)
    assert queue.release() == []
    assert (decided, queue.assigned()) == (["c"], ["c", "d"])


def test_an_engine_whose_answers_are_behind_their_tpot_budget_has_no_room() -> None:
    """A prefill would stall the answers again, even on an engine without backlog. The engine has room after the
    answers."""
    queue = QueueFixture()
    answers = queue.decode(token=0.0435)
    assert queue.load().backlog_s == 0
    assert queue.enter("r", budget=2.0) == []
    assert queue.assigned() == ["r"]
    queue.end(*answers)
    assert queue.release() == ["r"]


@pytest.mark.parametrize(("tier", "waits_at"), [("small", TWO), ({"pool": "small", "adapter": "sql"}, ONE)])
def test_only_a_request_without_an_adapter_leaves_an_engine_for_its_pace(tier: object, waits_at: Endpoint) -> None:
    """Loads stall answers: each adapter that is loaded elsewhere, too, closes a further engine."""
    queue = QueueFixture((ONE, TWO))
    queue.decode(ONE)
    queue.fill(TWO)
    assert queue.load(ONE).reopens_in > queue.load(TWO).backlog_s
    assert queue.enter("r", 200, budget=5.0, tiers=[tier]) == []
    assert queue.assigned(waits_at) == ["r"]


@pytest.mark.parametrize("budget", [2.0, 0.01])
def test_an_engine_with_a_full_kv_cache_has_no_room(budget: float) -> None:
    """The engine would let the request wait in its own order, or preempt another. In time or late, the request waits
    here until answers have freed blocks."""
    queue = QueueFixture()
    full = EngineLoad(running=9, kv_usage=0.96, block_size=16, kv_blocks=20_000)
    queue.fleet.on_scrape(ONE.id, full, queue.now)
    assert queue.enter("r", budget=budget) == []
    queue.fleet.on_scrape(ONE.id, replace(full, kv_usage=0.9), queue.now)
    assert queue.release() == ["r"]


def test_an_api_always_has_room() -> None:
    """At any number of requests in flight and any budget."""
    queue = QueueFixture((API,))
    names = [f"{budget} {number}" for budget in (None, 0.01, 1.0, 20.0) for number in range(50)]
    assert [
        queue.enter(name, budget=float(b) if (b := name.split()[0]) != "None" else None, tiers=["api"])
        for name in names
    ] == [[name] for name in names]


@pytest.mark.parametrize("scorer", [name for name in get_args(ScorerName) if name != "predicted"])
def test_a_baseline_scorer_is_never_queued(scorer: ScorerName) -> None:
    """A baseline represents a router without a queue."""
    queue = QueueFixture()
    names = [str(number) for number in range(20)]
    assert [queue.enter(name, budget=0.01, scorer=scorer) for name in names] == [[name] for name in names]


def test_a_request_without_a_possible_endpoint_is_refused_at_once() -> None:
    """Hopeless (`shed`), unfit and unavailable requests are not queued."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("late", budget=0.1, on_miss="shed")
    queue.enter("unfit", tiers=[{"pool": "small", "when": {"tools": True}}])
    for _ in range(3):
        queue.fleet.on_probe_failed(ONE.id, queue.now)
    queue.enter("alone")
    outcomes = [queue.released[name].outcome for name in ("late", "unfit", "alone")]
    assert outcomes == [Placement.SHED, Placement.UNFIT, Placement.UNAVAILABLE]
    assert queue.scheduler.held == 0


# --------------------------------------------------------------------------- deadline order


def test_a_queue_is_released_earliest_deadline_first() -> None:
    """Order of arrival does not count."""
    queue = QueueFixture()
    keys = queue.fill(ONE)
    for name, budget in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.enter(name, budget=budget)
    assert queue.assigned() == ["a", "b", "c"]
    queue.first_tokens(*keys)
    assert queue.release() == ["a", "b"]


def test_a_tight_deadline_overtakes_loose_ones() -> None:
    """The request meets its budget because a second of less urgent prefill is queued in the gateway, not the engine."""
    queue = QueueFixture()
    keys = queue.fill(ONE)
    for number in range(10):
        queue.enter(f"loose {number}", budget=5.0)
    queue.enter("tight", budget=0.5)
    queue.first_tokens(*keys)
    assert queue.release()[0] == "tight"
    assert queue.released["tight"].ranked[0].probability > 0.9


def test_queued_prefill_due_no_later_counts_as_work_ahead() -> None:
    """So new requests are assigned to the shorter queue: two engines get equal queues."""
    queue = QueueFixture((ONE, TWO))
    queue.fill(ONE, TWO)
    for name in "abcdef":
        queue.enter(name, budget=3.0)
    assert (len(queue.assigned(ONE)), len(queue.assigned(TWO))) == (3, 3)


def test_queued_prefill_due_later_does_not_count_as_work_ahead() -> None:
    """An urgent request is assigned to the engine with the longer queue if everything queued there is due later."""
    queue = QueueFixture((ONE, TWO))
    queue.fill(ONE, TWO)
    queue.send("more", TWO, PROMPT, queue.now)
    queue.enter("loose", tokens=3000, budget=9.0)
    assert queue.assigned(ONE) == ["loose"]
    queue.enter("tight", budget=1.0)
    assert queue.assigned(ONE) == ["tight", "loose"]


# --------------------------------------------------------------------------- decided again


def test_a_late_head_of_the_queue_yields_to_a_request_in_time() -> None:
    """The engine was slower than predicted: the late request moves to the best-effort queue."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("tight", tokens=4000, budget=0.6)
    queue.enter("loose", budget=5.0)
    assert queue.assigned() == ["tight", "loose"]
    assert queue.release(later=0.5) == ["loose"]
    assert queue.best_effort == ["tight"]


def test_requests_of_a_dead_endpoint_are_reassigned() -> None:
    """At the first release after the failure."""
    queue = QueueFixture((ONE, TWO))
    queue.fill(ONE, TWO)
    queue.enter("r", budget=2.0)
    assigned, other = (ONE, TWO) if queue.assigned(ONE) else (TWO, ONE)
    for _ in range(3):
        queue.fleet.on_probe_failed(assigned.id, queue.now)
    assert queue.release() == []
    assert (queue.assigned(assigned), queue.assigned(other)) == ([], ["r"])


def test_requests_of_a_removed_endpoint_are_reassigned() -> None:
    """A reload removed the endpoint."""
    queue = QueueFixture((ONE, TWO))
    queue.fill(ONE, TWO)
    queue.enter("r", budget=2.0)
    assigned, other = (ONE, TWO) if queue.assigned(ONE) else (TWO, ONE)
    queue.fleet.reload([pool("small", [other])])
    assert queue.release() == []
    assert (queue.assigned(assigned), queue.assigned(other)) == ([], ["r"])


def test_a_queued_request_waits_for_its_own_engine_though_another_becomes_idle() -> None:
    """Its engine was chosen with all work ahead: moving requests gained nothing (decision 0012). At its
    turn it is decided again like a new one, and goes where it is best by then."""
    queue = QueueFixture((ONE, TWO))
    keys = queue.fill(ONE, TWO)
    for name in "abcd":
        queue.enter(name, budget=3.0)
    queued_at_one, queued_at_two = queue.assigned(ONE), queue.assigned(TWO)
    queue.first_tokens(*keys[2:])
    assert queue.release() == queued_at_two
    queue.first_tokens(*queued_at_two)
    assert queue.release() == []
    queue.first_tokens(*keys[:2])
    assert queue.release() == queued_at_one
    assert [queue.destination(name) for name in queued_at_one] == [ONE.id, TWO.id]


# --------------------------------------------------------------------------- limits


def test_beyond_max_held_the_largest_tenant_loses_its_latest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arriving request is not refused if another tenant has more requests queued."""
    monkeypatch.setattr(queue_scheduler, "MAX_HELD", 3)
    queue = QueueFixture()
    queue.fill(ONE)
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        assert queue.enter(name, tenant=tenant, budget=9.0) == []
    assert queue.enter("d", tenant="z", budget=None) == ["b"]
    refused = queue.released["b"]
    assert (refused.outcome, refused.retry_after, refused.reason) == (Placement.SHED, 5.0, "3 requests wait already")
    assert queue.scheduler.held == 3


def test_max_held_bounds_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive between two releases included."""
    monkeypatch.setattr(queue_scheduler, "MAX_HELD", 3)
    queue = QueueFixture()
    for number in range(20):
        queue.arrive(str(number), budget=9.0)
    released = queue.release()
    assert queue.scheduler.held == 3
    assert [name for name in released if queue.destination(name)] == ["0", "1"]


def test_the_scheduler_asks_for_a_wake_up_while_requests_are_queued() -> None:
    """Room can appear by time alone, without an event."""
    queue = QueueFixture()
    keys = queue.fill(ONE)
    queue.enter("r", budget=2.0)
    assert START < queue.scheduler.wake_at <= START + 0.1
    queue.first_tokens(*keys)
    queue.release()
    assert queue.scheduler.wake_at == FOREVER


@pytest.mark.parametrize("budget", [2.0, 0.1, None])
def test_leave_removes_the_request_from_any_queue(budget: float | None) -> None:
    """An assigned, a late and a batch request."""
    queue = QueueFixture()
    keys = queue.fill(ONE)
    queue.enter("r", budget=budget)
    queue.leave("r")
    assert (queue.scheduler.held, queue.scheduler.wake_at) == (0, FOREVER)
    queue.first_tokens(*keys)
    assert queue.release() == []


def test_a_released_request_counts_as_load_until_it_is_dispatched() -> None:
    """A second decision in between must not find the same engine idle. An unknown request key changes nothing."""
    queue = QueueFixture((ONE, TWO))
    queue.arrive("a", tokens=9000)
    [(_, first)] = queue.scheduler.release(queue.fleet, queue.now)
    queue.arrive("b", tokens=9000)
    [(_, second)] = queue.scheduler.release(queue.fleet, queue.now)
    assert first.chosen is not None
    assert second.chosen is not None
    assert first.chosen.endpoint != second.chosen.endpoint
    for request_key in ("a", "b", "nobody"):
        queue.scheduler.on_dispatched(request_key)
        queue.scheduler.leave(request_key, queue.now)
    assert (queue.scheduler.held, queue.scheduler.queues.in_dispatch) == (0, {})


# --------------------------------------------------------------------------- invariants

steps = st.tuples(
    st.sampled_from(["enter", "enter", "look", "first token", "end", "leave", "wait", "lost", "found"]),
    st.integers(0, 9),
    st.sampled_from([0.05, 0.2, 1.0, None]),
    st.sampled_from(["x", "y"]),
    st.sampled_from(["queue", "best_effort", "shed"]),
    st.sampled_from([["small"], ["small", "api"], ["large", "small"]]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_every_request_is_released_once_or_queued_in_one_place(
    found: list[tuple[str, int, float | None, str, Literal["queue", "best_effort", "shed"], list[str]]],
) -> None:
    """For any sequence of events, no request is lost and none is released twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_scheduler, "MAX_HELD", 6)
        queue, inside = QueueFixture((ONE, TWO, LARGE, API)), set[str]()
        for number, (step, which, budget, tenant, on_miss, tiers) in enumerate(found):
            match step:
                case "enter":
                    queue.arrive(str(number), 900 * (which + 1), budget, tenant, on_miss=on_miss, tiers=tiers)
                    inside.add(str(number))
                case "leave" if inside:
                    left = sorted(inside)[which % len(inside)]
                    queue.scheduler.leave(left, queue.now)
                    inside.remove(left)
                case "first token" | "end" if queue.released:
                    name = list(queue.released)[which % len(queue.released)]
                    queue.first_tokens(name) if step == "first token" else queue.end(name)
                case "lost":
                    queue.fleet.on_probe_failed((ONE, TWO)[which % 2].id, queue.now)
                case "found":
                    queue.fleet.on_probe_answered((ONE, TWO)[which % 2].id, queue.now)
                case "wait":
                    queue.now += which / 10
            if step != "enter" or which % 2:
                inside -= set(queue.release())
                queues = queue.scheduler.queues
                held = chain(queues.best_effort, *queues.assigned.values())
                assert sorted(str(queued.request_key) for queued in held) == sorted(inside)
                assert all(requests == sorted(requests) for requests in queues.assigned.values())
                assert (queues.new, queues.in_dispatch, queue.scheduler.held <= 6) == ([], {}, True)
                assert queue.scheduler.wake_at == (queue.now + placement_round.TICK if inside else FOREVER)


# --------------------------------------------------------------------------- the rule that holds a request


@pytest.mark.parametrize(("budget", "rule"), [(1.0, "prefill"), (0.15, "prefill"), (None, "prefill")])
def test_the_rule_that_would_hold_a_request_is_the_one_that_does(budget: float | None, rule: str) -> None:
    """In time, late, and without a deadline; asking changes nothing, and the request is held from its arrival on."""
    queue = QueueFixture()
    queue.fill(ONE)
    asked = queue.would_hold(tokens=4000, budget=budget)
    assert (asked and asked.rule, asked and asked.endpoint, queue.scheduler.held) == (rule, ONE.id, 0)
    assert queue.enter("r", tokens=4000, budget=budget) == []
    assert queue.hold("r") == rule
    queue.release(later=0.03)
    assert [(each.hold and each.hold.since) for each in queue.scheduler.holds()] == [START]
    assert queue.leave("r") == {rule: pytest.approx(0.03)}


def test_to_ask_where_a_request_would_go_changes_nothing() -> None:
    """Of a request in time, a late one, and one without a deadline."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("held", tokens=4000, budget=0.15)
    for budget in (1.0, 0.15, None):
        before = queue.would_hold(tokens=4000, budget=budget)
        assert [queue.would_hold(tokens=4000, budget=budget) for _ in range(5)] == [before] * 5
    assert queue.scheduler.held == 1


def test_a_request_is_sent_where_it_was_said_that_it_would_go() -> None:
    """At once, with the forecast of its decision."""
    queue = QueueFixture()
    asked, hold = queue.would_place(tokens=4000, budget=1.0)
    queue.enter("r", tokens=4000, budget=1.0)
    expected, placed = asked.chosen, queue.released["r"].chosen
    assert (asked.outcome, hold) == (Placement.PLACE, None)
    assert expected is not None
    assert placed is not None
    assert (expected.endpoint, expected.forecast.p90) == (placed.endpoint, placed.forecast.p90)


def test_no_rule_holds_a_request_that_an_engine_takes_at_once() -> None:
    queue = QueueFixture()
    assert queue.would_hold() is None
    assert queue.enter("r") == ["r"]
    assert queue.held_s("r") == {}


def test_each_rule_has_its_part_of_the_time_in_the_queue() -> None:
    """A prefill in progress first, then answers that cannot bear another."""
    queue = QueueFixture()
    queue.decode(token=0.0435)
    keys = queue.fill(ONE)
    assert queue.enter("r", budget=5.0) == []
    queue.first_tokens(*keys)
    queue.release(later=0.1)
    queue.end(f"{ONE.id} answer 0", *keys)
    queue.release(later=0.2)
    assert queue.held_s("r") == {"prefill": pytest.approx(0.1), "pace": pytest.approx(0.2)}


def test_a_request_that_an_earlier_deadline_displaces_waits_its_turn() -> None:
    """From then on the first is held by the prefill in progress, and the displaced one by the first."""
    queue = QueueFixture()
    queue.send("busy", ONE, 20_000, queue.now)
    assert queue.enter("loose", budget=9.0) == []
    queue.now += 0.1
    assert queue.enter("tight", budget=8.0) == []
    assert (queue.assigned(), queue.hold("tight"), queue.hold("loose")) == (["tight", "loose"], "prefill", "turn")
    queue.now += 0.2
    assert queue.leave("loose") == {"prefill": pytest.approx(0.1), "turn": pytest.approx(0.2)}


def test_a_late_request_behind_another_of_its_queue_waits_its_turn() -> None:
    """Also one that was the first until a request came back."""
    queue = QueueFixture()
    queue.fill(ONE)
    for name in ("first", "second"):
        assert queue.enter(name, tokens=4000, budget=0.15) == []
    assert (queue.hold("first"), queue.hold("second")) == ("prefill", "turn")
    queue.arrive("returned", tokens=4000, budget=0.15)
    queue.scheduler.queues.new[-1].returned = True
    assert queue.release() == []
    assert [queue.hold(name) for name in ("returned", "first", "second")] == ["prefill", "turn", "turn"]


@pytest.mark.parametrize("budget", [2.0, 0.15])
def test_a_request_of_a_scheduler_that_failed_enters_another_as_a_new_one(budget: float) -> None:
    """Assigned or late before, it is held by the other scheduler, and can leave."""
    queue = QueueFixture()
    queue.fill(ONE)
    assert queue.enter("r", tokens=4000, budget=budget) == []
    held = queue.held("r")
    queue.scheduler = QueueScheduler(queue_parts())
    queue.scheduler.enter(held)
    assert (queue.release(), queue.scheduler.held) == ([], 1)
    assert (queue.assigned(), queue.best_effort) == ((["r"], []) if budget > 1 else ([], ["r"]))
    queue.leave("r")
    assert queue.scheduler.held == 0
