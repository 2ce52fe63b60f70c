"""Who waits, and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.placement_round import EndpointQueues
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, Candidate, Endpoint, Forecast, PromptEstimate, RequestView
from tests.policies.queue.waiting_room import ONE, TWO, route

ROUTE = route()


def held(ticket: str, deadline: float = 1.0, tenant: str = "", seed: int = 0) -> QueuedRequest:
    queued = QueuedRequest(ticket, RequestView(0.0), PromptEstimate({}), ROUTE, seed, tenant)
    queued.deadline = deadline
    return queued


def sent_to(endpoint: Endpoint, prefill_s: float) -> Candidate:
    return Candidate(endpoint, 0, 1000, 0, Forecast(0.1, prefill=prefill_s), 1.0, 0.0)


def names(lane: list[QueuedRequest]) -> list[str]:
    return [str(one.request_key) for one in lane]


def test_a_lane_is_in_the_order_of_deadlines() -> None:
    """Of two that are due at once, who came first."""
    queues = EndpointQueues()
    for one in (held("d", FOREVER, seed=1), held("c", 2.0, seed=2), held("b", 1.0, seed=4), held("a", 1.0, seed=3)):
        queues.assign(one, ONE, 0.1)
    assert names(queues.assigned.get(ONE.id, [])) == ["a", "b", "c", "d"]
    assert TWO.id not in queues.assigned


def test_the_last_lane_is_in_the_order_of_arrival() -> None:
    """Deadlines that are past order nothing."""
    queues = EndpointQueues()
    for one in (held("b", 0.1, seed=2), held("a", 9.0, seed=1), held("c", 0.0, seed=3)):
        queues.add_best_effort(one)
    assert names(queues.best_effort) == ["a", "b", "c"]


def test_what_is_due_no_later_goes_ahead() -> None:
    """At the endpoint where it waits; and never itself."""
    queues = EndpointQueues()
    one = held("b", 2.0)
    for other, endpoint in ((held("a", 1.0), ONE), (one, ONE), (held("c", 2.0), ONE), (held("d", 2.1), ONE)):
        queues.assign(other, endpoint, 0.25)
    queues.assign(held("e", 0.5), TWO, 0.1)
    assert queues.prefill_ahead(one) == {ONE.id: 0.5, TWO.id: 0.1}


def test_what_is_on_its_way_goes_ahead_of_all() -> None:
    """However late it is due: it is not here any more."""
    queues = EndpointQueues()
    queues.in_dispatch["a"] = sent_to(ONE, 0.25)
    queues.assign(held("b", 1.0), ONE, 0.5)
    assert queues.prefill_ahead(held("c", 2.0)) == {ONE.id: 0.75}
    assert queues.prefill_ahead(held("d", 0.5)) == {ONE.id: 0.25}


def test_what_waits_last_is_in_nobodys_way() -> None:
    """It goes behind all that can still make theirs."""
    queues = EndpointQueues()
    queues.add_best_effort(held("a", 0.5))
    assert queues.prefill_ahead(held("b", 1.0)) == {}


def test_the_most_is_the_latest_of_the_tenant_that_holds_most() -> None:
    """In requests, wherever they wait."""
    queues = EndpointQueues()
    queues.assign(held("a", 1.0, "x", seed=4), ONE, 9.0)
    queues.assign(held("b", 5.0, "y", seed=1), ONE, 0.1)
    queues.add_best_effort(held("c", 1.0, "y", seed=3))
    queues.assign(held("d", 9.0, "y", seed=2), TWO, 0.1)
    assert queues.latest_of_largest_tenant().request_key == "c"


@pytest.mark.parametrize("where", ["new", "last", "bound", "leaving", "nowhere"])
def test_a_request_can_be_dropped_wherever_it_is(where: str) -> None:
    """By its ticket alone."""
    queues, one = EndpointQueues(), held("a")
    match where:
        case "new":
            queues.new.append(one)
        case "last":
            queues.add_best_effort(one)
        case "bound":
            queues.assign(one, ONE, 0.1)
        case "leaving":
            queues.in_dispatch["a"] = sent_to(ONE, 0.1)
    queues.remove("a")
    assert (len(queues), queues.assigned, queues.in_dispatch) == (0, {}, {})


def test_a_lane_that_has_emptied_is_not_there() -> None:
    """So that it costs nothing to see that nobody waits."""
    queues, one, two = EndpointQueues(), held("a"), held("b")
    queues.assign(one, ONE, 0.1)
    queues.assign(two, ONE, 0.1)
    queues.unassign(one)
    assert names(queues.assigned.get(ONE.id, [])) == ["b"]
    queues.unassign(two)
    assert queues.assigned == {}


def test_whose_last_moment_it_is_is_known_when_it_has_come() -> None:
    """Wherever in the queues; and again when it is over, for as long as they stay."""
    queues, early, late = EndpointQueues(), held("early", 1.0), held("late", 2.0)
    queues.assign(late, ONE, 0.1, spill_at=3.0)
    queues.assign(early, ONE, 0.1, spill_at=5.0)
    queues.assign(held("never"), TWO, 0.1)
    assert [names(queues.due_to_spill(now)) for now in (2.9, 3.0)] == [[], ["late"]]
    late.spill_at = 4.0
    assert [names(queues.due_to_spill(now)) for now in (3.9, 4.0, 5.0)] == [[], ["late"], ["early", "late"]]
    queues.unassign(late)
    assert names(queues.due_to_spill(6.0)) == ["early"]


moves = st.tuples(
    st.sampled_from(["new", "bind", "last", "send", "drop"]), st.integers(0, 5), st.sampled_from([ONE, TWO])
)


@given(st.lists(moves, max_size=30))
def test_a_request_is_in_one_place(steps: list[tuple[str, int, Endpoint]]) -> None:
    """As long as whoever moves it takes it from where it was."""
    queues, where = EndpointQueues(), dict[str, str]()
    for move, number, endpoint in steps:
        ticket = str(number)
        queues.remove(ticket)
        where.pop(ticket, None)
        one = held(ticket, deadline=number % 3, seed=number)
        match move:
            case "new":
                queues.new.append(one)
            case "bind":
                queues.assign(one, endpoint, 0.1)
            case "last":
                queues.add_best_effort(one)
            case "send":
                queues.in_dispatch[ticket] = sent_to(endpoint, 0.1)
        if move != "drop":
            where[ticket] = move
    found = [
        *names(queues.new),
        *names(queues.best_effort),
        *names(queues.assigned.get(ONE.id, [])),
        *names(queues.assigned.get(TWO.id, [])),
        *queues.in_dispatch,
    ]
    assert sorted(map(str, found)) == sorted(where)
    assert len(queues) == sum(move != "send" for move in where.values())
