"""Who waits, and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.endpoint_queues import EndpointQueues, QueuedRequest
from policies.types import FOREVER, Endpoint, PromptEstimate, RequestView
from tests.policies.queue.waiting_room import ONE, TWO, route

ROUTE = route()


def held(ticket: str, deadline: float = 1.0, tenant: str = "", seed: int = 0) -> QueuedRequest:
    return QueuedRequest(ticket, RequestView("r", 0.0, cache_group=tenant), PromptEstimate({}), ROUTE, seed, deadline)


def names(lane: list[QueuedRequest]) -> list[str]:
    return [str(one.request_key) for one in lane]


def test_a_lane_is_in_the_order_of_deadlines() -> None:
    """Of two that are due at once, who came first."""
    lanes = EndpointQueues()
    for one in (held("d", FOREVER, seed=1), held("c", 2.0, seed=2), held("b", 1.0, seed=4), held("a", 1.0, seed=3)):
        lanes.bind(one, ONE, 0.1)
    assert names(lanes.of(ONE.id)) == ["a", "b", "c", "d"]
    assert lanes.of(TWO.id) == []


def test_the_last_lane_is_in_the_order_of_arrival() -> None:
    """Deadlines that are past order nothing."""
    lanes = EndpointQueues()
    for one in (held("b", 0.1, seed=2), held("a", 9.0, seed=1), held("c", 0.0, seed=3)):
        lanes.put_last(one)
    assert names(lanes.best_effort_queue) == ["a", "b", "c"]


def test_what_is_due_no_later_goes_ahead() -> None:
    """At the endpoint where it waits; and never itself."""
    lanes = EndpointQueues()
    one = held("b", 2.0)
    for other, endpoint in ((held("a", 1.0), ONE), (one, ONE), (held("c", 2.0), ONE), (held("d", 2.1), ONE)):
        lanes.bind(other, endpoint, 0.25)
    lanes.bind(held("e", 0.5), TWO, 0.1)
    assert lanes.ahead(one) == {ONE.id: 0.5, TWO.id: 0.1}


def test_what_is_on_its_way_goes_ahead_of_all() -> None:
    """However late it is due: it is not here any more."""
    lanes = EndpointQueues()
    lanes.send("a", ONE, 0.25)
    lanes.bind(held("b", 1.0), ONE, 0.5)
    assert lanes.ahead(held("c", 2.0)) == {ONE.id: 0.75}
    assert lanes.ahead(held("d", 0.5)) == {ONE.id: 0.25}


def test_what_waits_last_is_in_nobodys_way() -> None:
    """It goes behind all that can still make theirs."""
    lanes = EndpointQueues()
    lanes.put_last(held("a", 0.5))
    assert lanes.ahead(held("b", 1.0)) == {}


def test_a_tenant_needs_what_is_bound_for_it() -> None:
    """On all engines; what waits last is given up."""
    lanes = EndpointQueues()
    lanes.bind(held("a", tenant="x"), ONE, 0.25)
    lanes.bind(held("b", tenant="x"), TWO, 0.5)
    lanes.bind(held("c", tenant="y"), ONE, 0.125)
    lanes.put_last(held("d", tenant="y"))
    assert lanes.need() == {"x": 0.75, "y": 0.125}


def test_the_most_is_the_latest_of_the_tenant_that_holds_most() -> None:
    """In requests, wherever they wait."""
    lanes = EndpointQueues()
    lanes.bind(held("a", 1.0, "x", seed=4), ONE, 9.0)
    lanes.bind(held("b", 5.0, "y", seed=1), ONE, 0.1)
    lanes.put_last(held("c", 1.0, "y", seed=3))
    lanes.bind(held("d", 9.0, "y", seed=2), TWO, 0.1)
    assert lanes.most().request_key == "c"


@pytest.mark.parametrize("where", ["new", "last", "bound", "leaving", "nowhere"])
def test_a_request_can_be_dropped_wherever_it_is(where: str) -> None:
    """By its ticket alone."""
    lanes, one = EndpointQueues(), held("a")
    match where:
        case "new":
            lanes.new.append(one)
        case "last":
            lanes.put_last(one)
        case "bound":
            lanes.bind(one, ONE, 0.1)
        case "leaving":
            lanes.send("a", ONE, 0.1)
    lanes.drop("a")
    assert (len(lanes), lanes.assigned, lanes.leaving, lanes.quiet) == (0, {}, {}, True)


def test_a_lane_that_has_emptied_is_not_there() -> None:
    """So that it costs nothing to see that nobody waits."""
    lanes, one, two = EndpointQueues(), held("a"), held("b")
    lanes.bind(one, ONE, 0.1)
    lanes.bind(two, ONE, 0.1)
    lanes.unbind(one)
    assert names(lanes.of(ONE.id)) == ["b"]
    lanes.unbind(two)
    assert lanes.assigned == {}


def test_whose_last_moment_it_is_is_known_when_it_has_come() -> None:
    """Wherever in the lanes; and again when it is over, for as long as they stay."""
    lanes, early, late = EndpointQueues(), held("early", 1.0), held("late", 2.0)
    lanes.bind(late, ONE, 0.1, leave_by=3.0)
    lanes.bind(early, ONE, 0.1, leave_by=5.0)
    lanes.bind(held("never"), TWO, 0.1)
    assert [names(lanes.must_leave(now)) for now in (2.9, 3.0)] == [[], ["late"]]
    lanes.leave_later(late, 4.0)
    assert [names(lanes.must_leave(now)) for now in (3.9, 4.0, 5.0)] == [[], ["late"], ["early", "late"]]
    lanes.unbind(late)
    assert names(lanes.must_leave(6.0)) == ["early"]


def test_it_is_quiet_where_loads_are_as_the_fleet_knows_them() -> None:
    """What has found no place, or waits last, does not change them."""
    lanes = EndpointQueues()
    lanes.new.append(held("a"))
    lanes.put_last(held("b"))
    assert lanes.quiet
    lanes.bind(held("c"), ONE, 0.1)
    assert not lanes.quiet
    lanes.drop("c")
    lanes.send("d", ONE, 0.1)
    assert (lanes.quiet, lanes.on_the_way(ONE.id), lanes.on_the_way(TWO.id)) == (False, True, False)


moves = st.tuples(
    st.sampled_from(["new", "bind", "last", "send", "drop"]), st.integers(0, 5), st.sampled_from([ONE, TWO])
)


@given(st.lists(moves, max_size=30))
def test_a_request_is_in_one_place(steps: list[tuple[str, int, Endpoint]]) -> None:
    """As long as whoever moves it takes it from where it was."""
    lanes, where = EndpointQueues(), dict[str, str]()
    for move, number, endpoint in steps:
        ticket = str(number)
        lanes.drop(ticket)
        where.pop(ticket, None)
        one = held(ticket, deadline=number % 3, seed=number)
        match move:
            case "new":
                lanes.new.append(one)
            case "bind":
                lanes.bind(one, endpoint, 0.1)
            case "last":
                lanes.put_last(one)
            case "send":
                lanes.send(ticket, endpoint, 0.1)
        if move != "drop":
            where[ticket] = move
    found = [
        *names(lanes.new),
        *names(lanes.best_effort_queue),
        *names(lanes.of(ONE.id)),
        *names(lanes.of(TWO.id)),
        *lanes.leaving,
    ]
    assert sorted(map(str, found)) == sorted(where)
    assert len(lanes) == sum(move != "send" for move in where.values())
