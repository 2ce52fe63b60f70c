"""Queues of requests by endpoint, and the work ahead of a request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batch.batch_work import VALLEY
from policies.queue.best_effort_queue import BestEffortQueue
from policies.queue.endpoint_queues import Ahead, EndpointQueues
from policies.queue.queue_part import QueueHooks
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import FOREVER, Candidate, Endpoint, Forecast, PoolEstimate, PromptEstimate, RequestView
from tests.support.queue_fixture import ONE, TWO, route

ROUTE, TOKENS = route(), 100


def held(
    request_key: str,
    deadline: float = 1.0,
    tenant: str = "",
    sequence: int = 0,
    prefill_s: float = 0.1,
    caller: str = "",
) -> QueuedRequest:
    request, estimate = RequestView(0.0, caller=caller), PromptEstimate({"small": PoolEstimate(TOKENS)})
    queued = QueuedRequest(request_key, request, estimate, ROUTE, sequence, tenant)
    queued.deadline, queued.prefill_s = deadline, prefill_s
    return queued


def sent_to(endpoint: Endpoint, prefill_s: float) -> Candidate:
    return Candidate(endpoint, 0, 1000, 0, Forecast(0.1, prefill=prefill_s), 1.0, 0.0)


def names(queue: Iterable[QueuedRequest]) -> list[str]:
    return [str(one.request_key) for one in queue]


def test_the_queue_of_an_endpoint_is_in_order_of_deadline() -> None:
    """Equal deadlines are in order of arrival."""
    queues = EndpointQueues(BestEffortQueue(QueueHooks()))
    for one in (
        held("d", FOREVER, sequence=1),
        held("c", 2.0, sequence=2),
        held("b", 1.0, sequence=4),
        held("a", 1.0, sequence=3),
    ):
        queues.assign(one, ONE, HoldRule.PREFILL, 0.0)
    assert names(queues.of(ONE.id)) == ["a", "b", "c", "d"]
    assert not queues.of(TWO.id)


def test_the_best_effort_queue_is_in_order_of_arrival() -> None:
    """Missed deadlines order nothing."""
    queues = EndpointQueues(BestEffortQueue(QueueHooks()))
    for one in (held("b", 0.1, sequence=2), held("a", 9.0, sequence=1), held("c", 0.0, sequence=3)):
        queues.best_effort.hold_late(one, HoldRule.PREFILL, ONE.id, 0.0)
    assert names(queues.best_effort) == ["a", "b", "c"]


def seconds_ahead(queues: EndpointQueues, queued: QueuedRequest) -> dict[str, float]:
    return {endpoint: ahead.prefill_s for endpoint, ahead in queues.ahead(queued).items()}


def test_work_ahead_is_of_requests_due_before() -> None:
    """At each endpoint; of equal deadlines the earlier arrival is before, and a request is not ahead of itself."""
    queues = EndpointQueues(BestEffortQueue(QueueHooks()))
    one = held("b", 2.0, sequence=3)
    others = (held("a", 1.0, prefill_s=0.25), one, held("c", 2.0, sequence=2, prefill_s=0.25), held("d", 2.1))
    for other in (*others, held("later", 2.0, sequence=4)):
        queues.assign(other, ONE, HoldRule.PREFILL, 0.0)
    queues.assign(held("e", 0.5), TWO, HoldRule.PREFILL, 0.0)
    assert seconds_ahead(queues, one) == {ONE.id: 0.5, TWO.id: 0.1}
    assert queues.ahead(one)[ONE.id].tokens == 2 * TOKENS


def test_work_ahead_counts_requests_in_dispatch() -> None:
    """At any deadline: a request in dispatch cannot be overtaken."""
    queues = EndpointQueues(BestEffortQueue(QueueHooks()))
    queues.in_dispatch["a"] = sent_to(ONE, 0.25)
    queues.assign(held("b", 1.0, prefill_s=0.5), ONE, HoldRule.PREFILL, 0.0)
    assert queues.ahead(held("c", 2.0)) == {ONE.id: Ahead(2, 0.75, 1000 + TOKENS)}
    assert queues.ahead(held("d", 0.5)) == {ONE.id: Ahead(1, 0.25, 1000)}


def test_requests_that_wait_elsewhere_are_no_work_ahead() -> None:
    """Late ones come after those in time; those that wait for a limit of their own caller hold up nobody."""
    queues, limited = EndpointQueues(BestEffortQueue(QueueHooks())), held("a", 0.5, caller="c")
    queues.best_effort.hold_late(held("late", 0.5), HoldRule.PREFILL, ONE.id, 0.0)
    queues.assign(limited, ONE, HoldRule.PREFILL, 0.0, own_limit=True)
    assert queues.ahead(held("b", 1.0)) == {}
    assert not queues.of(ONE.id)
    queues.unassign(limited)
    assert (queues.assigned, limited.own_limit) == ({}, False)


def test_the_largest_tenant_is_the_one_with_most_requests_in_all_queues() -> None:
    """Counted in requests, not in seconds of prefill; the latest arrival is returned."""
    queues = EndpointQueues(BestEffortQueue(QueueHooks()))
    queues.assign(held("a", 1.0, "x", sequence=4), ONE, HoldRule.PREFILL, 0.0)
    queues.assign(held("b", 5.0, "y", sequence=1), ONE, HoldRule.PREFILL, 0.0)
    queues.best_effort.hold_late(held("c", 1.0, "y", sequence=3), HoldRule.PREFILL, ONE.id, 0.0)
    queues.assign(held("d", 9.0, "y", sequence=2), TWO, HoldRule.PREFILL, 0.0)
    queues.assign(held("a", 1.0, "x", sequence=4), ONE, HoldRule.PREFILL, 0.0)
    queues.assign(held("b", 5.0, "y", sequence=1), ONE, HoldRule.PREFILL, 0.0)
    queues.best_effort.hold_late(held("c", 1.0, "y", sequence=3), HoldRule.PREFILL, ONE.id, 0.0)
    queues.assign(held("d", 9.0, "y", sequence=2), TWO, HoldRule.PREFILL, 0.0)
    assert queues.latest_of_largest_tenant().request_key == "c"


def test_batch_work_of_the_largest_tenant_makes_room_first() -> None:
    """Without keys all callers are one tenant, and a chat would be refused for the sake of work that has hours."""
    queues, batch = EndpointQueues(BestEffortQueue(QueueHooks())), held("batch", sequence=1)
    batch.due = 6 * 3600.0
    queues.best_effort.hold_late(batch, VALLEY, ONE.id, 0.0)
    queues.assign(held("chat", 1.0, sequence=2), ONE, HoldRule.PREFILL, 0.0)
    assert queues.latest_of_largest_tenant().request_key == "batch"


@pytest.mark.parametrize("where", ["new", "last", "bound", "leaving", "nowhere"])
def test_remove_finds_a_request_in_any_queue(where: str) -> None:
    """By the request key alone."""
    queues, one = EndpointQueues(BestEffortQueue(QueueHooks())), held("a")
    match where:
        case "new":
            queues.new.append(one)
        case "last":
            queues.best_effort.hold_late(one, HoldRule.PREFILL, ONE.id, 0.0)
        case "bound":
            queues.assign(one, ONE, HoldRule.PREFILL, 0.0)
        case "leaving":
            queues.in_dispatch["a"] = sent_to(ONE, 0.1)
    queues.remove("a", 0.0)
    assert (len(queues), queues.assigned, queues.in_dispatch) == (0, {}, {})


def test_an_empty_queue_is_removed() -> None:
    """An empty gateway is recognised by an empty dictionary."""
    queues, one, two = EndpointQueues(BestEffortQueue(QueueHooks())), held("a"), held("b")
    queues.assign(one, ONE, HoldRule.PREFILL, 0.0)
    queues.assign(two, ONE, HoldRule.PREFILL, 0.0)
    queues.unassign(one)
    assert names(queues.of(ONE.id)) == ["b"]
    queues.unassign(two)
    assert queues.assigned == {}


moves = st.tuples(
    st.sampled_from(["new", "bind", "last", "send", "drop"]), st.integers(0, 5), st.sampled_from([ONE, TWO])
)


@given(st.lists(moves, max_size=30))
def test_a_request_is_in_one_queue_at_a_time(steps: list[tuple[str, int, Endpoint]]) -> None:
    """As long as a move begins with `remove`."""
    queues, where = EndpointQueues(BestEffortQueue(QueueHooks())), dict[str, str]()
    for move, number, endpoint in steps:
        request_key = str(number)
        queues.remove(request_key, 0.0)
        where.pop(request_key, None)
        one = held(request_key, deadline=number % 3, sequence=number)
        match move:
            case "new":
                queues.new.append(one)
            case "bind":
                queues.assign(one, endpoint, HoldRule.PREFILL, 0.0)
            case "last":
                queues.best_effort.hold_late(one, HoldRule.PREFILL, ONE.id, 0.0)
            case "send":
                queues.in_dispatch[request_key] = sent_to(endpoint, 0.1)
        if move != "drop":
            where[request_key] = move
    found = [
        *names(queues.new),
        *names(queues.best_effort),
        *names(queues.of(ONE.id)),
        *names(queues.of(TWO.id)),
        *queues.in_dispatch,
    ]
    assert sorted(map(str, found)) == sorted(where)
    assert len(queues) == sum(move != "send" for move in where.values())
