"""Queues of requests by endpoint, and the work ahead of a request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.queued_request import QueuedRequest
from policies.types import FOREVER, Candidate, Endpoint, Forecast, PromptEstimate, RequestView
from tests.support.queue_fixture import ONE, TWO, route

ROUTE = route()


def held(
    request_key: str, deadline: float = 1.0, tenant: str = "", sequence: int = 0, prefill_s: float = 0.1
) -> QueuedRequest:
    queued = QueuedRequest(request_key, RequestView(0.0), PromptEstimate({}), ROUTE, sequence, tenant)
    queued.deadline, queued.prefill_s = deadline, prefill_s
    return queued


def sent_to(endpoint: Endpoint, prefill_s: float) -> Candidate:
    return Candidate(endpoint, 0, 1000, 0, Forecast(0.1, prefill=prefill_s), 1.0, 0.0)


def names(queue: Iterable[QueuedRequest]) -> list[str]:
    return [str(one.request_key) for one in queue]


def test_the_queue_of_an_endpoint_is_in_order_of_deadline() -> None:
    """Equal deadlines are in order of arrival."""
    queues = EndpointQueues()
    for one in (
        held("d", FOREVER, sequence=1),
        held("c", 2.0, sequence=2),
        held("b", 1.0, sequence=4),
        held("a", 1.0, sequence=3),
    ):
        queues.assign(one, ONE)
    assert names(queues.assigned.get(ONE.id, [])) == ["a", "b", "c", "d"]
    assert TWO.id not in queues.assigned


def test_the_best_effort_queue_is_in_order_of_arrival() -> None:
    """Missed deadlines order nothing."""
    queues = EndpointQueues()
    for one in (held("b", 0.1, sequence=2), held("a", 9.0, sequence=1), held("c", 0.0, sequence=3)):
        queues.best_effort.add(one, 0.0)
    assert names(queues.best_effort) == ["a", "b", "c"]


def test_prefill_ahead_counts_requests_due_no_later() -> None:
    """At each endpoint; a request is not ahead of itself."""
    queues = EndpointQueues()
    one = held("b", 2.0)
    for other in (held("a", 1.0, prefill_s=0.25), one, held("c", 2.0, prefill_s=0.25), held("d", 2.1)):
        queues.assign(other, ONE)
    queues.assign(held("e", 0.5), TWO)
    assert queues.prefill_ahead(one) == {ONE.id: 0.5, TWO.id: 0.1}


def test_prefill_ahead_counts_requests_in_dispatch() -> None:
    """At any deadline: a request in dispatch cannot be overtaken."""
    queues = EndpointQueues()
    queues.in_dispatch["a"] = sent_to(ONE, 0.25)
    queues.assign(held("b", 1.0, prefill_s=0.5), ONE)
    assert queues.prefill_ahead(held("c", 2.0)) == {ONE.id: 0.75}
    assert queues.prefill_ahead(held("d", 0.5)) == {ONE.id: 0.25}


def test_prefill_ahead_ignores_the_best_effort_queue() -> None:
    """Requests in time go before best-effort requests."""
    queues = EndpointQueues()
    queues.best_effort.add(held("a", 0.5), 0.0)
    assert queues.prefill_ahead(held("b", 1.0)) == {}


def test_the_largest_tenant_is_the_one_with_most_requests_in_all_queues() -> None:
    """Counted in requests, not in seconds of prefill; the latest arrival is returned."""
    queues = EndpointQueues()
    queues.assign(held("a", 1.0, "x", sequence=4), ONE)
    queues.assign(held("b", 5.0, "y", sequence=1), ONE)
    queues.best_effort.add(held("c", 1.0, "y", sequence=3), 0.0)
    queues.assign(held("d", 9.0, "y", sequence=2), TWO)
    queues.assign(held("a", 1.0, "x", sequence=4), ONE, 9.0)
    queues.assign(held("b", 5.0, "y", sequence=1), ONE, 0.1)
    queues.best_effort.add(held("c", 1.0, "y", sequence=3), 0.0)
    queues.assign(held("d", 9.0, "y", sequence=2), TWO, 0.1)
    assert queues.latest_of_largest_tenant().request_key == "c"


@pytest.mark.parametrize("where", ["new", "last", "bound", "leaving", "nowhere"])
def test_remove_finds_a_request_in_any_queue(where: str) -> None:
    """By the request key alone."""
    queues, one = EndpointQueues(), held("a")
    match where:
        case "new":
            queues.new.append(one)
        case "last":
            queues.best_effort.add(one, 0.0)
        case "bound":
            queues.assign(one, ONE)
        case "leaving":
            queues.in_dispatch["a"] = sent_to(ONE, 0.1)
    queues.remove("a")
    assert (len(queues), queues.assigned, queues.in_dispatch) == (0, {}, {})


def test_an_empty_queue_is_removed() -> None:
    """An empty gateway is recognised by an empty dictionary."""
    queues, one, two = EndpointQueues(), held("a"), held("b")
    queues.assign(one, ONE)
    queues.assign(two, ONE)
    queues.unassign(one)
    assert names(queues.assigned.get(ONE.id, [])) == ["b"]
    queues.unassign(two)
    assert queues.assigned == {}


def test_due_to_spill_lists_requests_past_their_last_moment() -> None:
    """In any queue and position, for as long as the request is assigned and the moment has passed."""
    queues, early, late = EndpointQueues(), held("early", 1.0), held("late", 2.0)
    queues.assign(late, ONE, spill_at=3.0)
    queues.assign(early, ONE, spill_at=5.0)
    queues.assign(held("never"), TWO)
    assert [names(queues.due_to_spill(now)) for now in (2.9, 3.0)] == [[], ["late"]]
    late.spill_at = 4.0
    assert [names(queues.due_to_spill(now)) for now in (3.9, 4.0, 5.0)] == [[], ["late"], ["early", "late"]]
    queues.unassign(late)
    assert names(queues.due_to_spill(6.0)) == ["early"]


moves = st.tuples(
    st.sampled_from(["new", "bind", "last", "send", "drop"]), st.integers(0, 5), st.sampled_from([ONE, TWO])
)


@given(st.lists(moves, max_size=30))
def test_a_request_is_in_one_queue_at_a_time(steps: list[tuple[str, int, Endpoint]]) -> None:
    """As long as a move begins with `remove`."""
    queues, where = EndpointQueues(), dict[str, str]()
    for move, number, endpoint in steps:
        request_key = str(number)
        queues.remove(request_key)
        where.pop(request_key, None)
        one = held(request_key, deadline=number % 3, sequence=number)
        match move:
            case "new":
                queues.new.append(one)
            case "bind":
                queues.assign(one, endpoint)
            case "last":
                queues.best_effort.add(one, 0.0)
            case "send":
                queues.in_dispatch[request_key] = sent_to(endpoint, 0.1)
        if move != "drop":
            where[request_key] = move
    found = [
        *names(queues.new),
        *names(queues.best_effort),
        *names(queues.assigned.get(ONE.id, [])),
        *names(queues.assigned.get(TWO.id, [])),
        *queues.in_dispatch,
    ]
    assert sorted(map(str, found)) == sorted(where)
    assert len(queues) == sum(move != "send" for move in where.values())
