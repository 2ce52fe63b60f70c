"""RequestQueue: waiting callers, timeouts, wake-ups and errors.

The scheduler is scripted: its decisions are tested in tests/policies/queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterator
from time import monotonic
from typing import Any

import pytest

from backends.http.connection_pool import ConnectionPool
from gateway import scheduler as module
from gateway.admission.auth import ANYONE, Tenant
from gateway.api.inference_request import InferenceRequest
from gateway.fleet.endpoint_poll import EndpointPoll, PollTarget
from gateway.fleet.monitor import Monitor
from gateway.scheduler import NO_DEADLINE_PATIENCE, WOKEN, QueueTimeout, RequestQueue
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest
from policies.routes.route import Route, Ttft
from policies.types import FOREVER, AttemptOutcome, Decision, PoolEstimate, PromptEstimate
from tests.support.builders import POOL, backend, candidate, decided, request, route
from tests.support.scripted_fleet import dead_url
from tests.support.upstream import turn_until

pytestmark = pytest.mark.virtual_time

ESTIMATE = PromptEstimate({"small": PoolEstimate(100)})
CHAT = route().model_copy(update={"ttft": Ttft(budget="1s")})


class ScriptedScheduler(QueueScheduler):
    """Releases as many requests as the test allows, and records calls."""

    def __init__(self) -> None:
        super().__init__()
        self.queued_requests: dict[Hashable, QueuedRequest] = {}
        self.allowed = 0  # requests still allowed to leave
        self.releases = 0
        self.calls: list[tuple[str, Hashable]] = []
        self.error: Exception | None = None
        self.hold = Hold(HoldRule.PREFILL, "small/a", monotonic())

    def enter(self, queued: QueuedRequest) -> None:
        self.queued_requests[queued.request_key] = queued
        queued.hold = self.hold

    def pass_through(self, queued: QueuedRequest, fleet: Fleet, now: float) -> Decision | None:
        self.enter(queued)
        return next((decision for _, decision in self.release(fleet, now)), None)

    def release(self, fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        self.releases += 1
        while self.queued_requests and self.allowed:
            request_key = next(iter(self.queued_requests))
            del self.queued_requests[request_key]
            self.allowed -= 1
            yield request_key, decided(candidate(), at=now)
        if self.error is not None and self.queued_requests:
            raise self.error

    def leave(self, request_key: Hashable, now: float) -> None:
        if (queued := self.queued_requests.pop(request_key, None)) is not None:
            queued.end_hold(now)
        self.calls.append(("leave", request_key))

    def on_dispatched(self, request_key: Hashable) -> None:
        self.calls.append(("departed", request_key))


class QueueFixture:
    """A RequestQueue, its schedulers in order of creation, and requests."""

    def __init__(self, patience: float = 60.0) -> None:
        self.schedulers: list[ScriptedScheduler] = []
        self.fleet = Fleet([POOL])
        self.queue = RequestQueue(self.fleet, lambda: patience, self._open)

    def _open(self) -> ScriptedScheduler:
        self.schedulers.append(ScriptedScheduler())
        return self.schedulers[-1]

    @property
    def scheduler(self) -> ScriptedScheduler:
        return self.schedulers[-1]

    def deciding(
        self, asked: InferenceRequest, tenant: Tenant = ANYONE, on: Route = CHAT
    ) -> Coroutine[Any, Any, Decision]:
        return self.queue.decide(self.queue.queued(asked, on, ESTIMATE, tenant), monotonic())

    async def enqueued(self, count: int = 1) -> list[tuple[InferenceRequest, asyncio.Task[Decision]]]:
        """Queues `count` requests."""
        pairs = [(asked := request(), asyncio.create_task(self.deciding(asked))) for _ in range(count)]
        await turn_until(lambda: sum(self.queue.depth().values()) == count)
        return pairs


def result_at_once(deciding: Coroutine[Any, Any, Decision]) -> Decision:
    """The result of a coroutine that never suspends."""
    with pytest.raises(StopIteration) as done:
        deciding.send(None)
    decision: Decision = done.value.value
    return decision


# --------------------------------------------------------------------------- at once


def test_a_request_released_at_once_never_suspends() -> None:
    """Without an event loop: neither task nor future nor timer."""
    fixture = QueueFixture()
    fixture.scheduler.allowed = 1
    assert result_at_once(fixture.deciding(request())).chosen is not None
    assert (fixture.fleet.on_news, fixture.queue.depth()) == (None, {})


def test_a_queued_request_has_its_tenant_and_weight() -> None:
    """Shares of engine time are by key, not by cache group."""
    fixture, seen = QueueFixture(), []
    fixture.scheduler.enter = lambda queued: seen.append((queued.tenant, queued.weight))
    with pytest.raises(RuntimeError, match="no running event loop"):  # not released: the coroutine would wait
        fixture.deciding(request(), Tenant("web", cache_group="front", weight=2.0)).send(None)
    assert seen == [("web", 2.0)]


def test_on_dispatched_reaches_the_scheduler() -> None:
    """From then on the fleet counts the request."""
    fixture, asked = QueueFixture(), request()
    fixture.queue.on_dispatched(asked)
    assert fixture.scheduler.calls == [("departed", id(asked))]


def test_every_request_has_its_own_sequence_number() -> None:
    """For tie-breaks and round robin."""
    fixture = QueueFixture()
    fixture.scheduler.allowed = 3
    for _ in range(3):
        result_at_once(fixture.deciding(request()))
    assert fixture.queue.sequence == 3


async def test_a_request_not_released_at_once_is_queued() -> None:
    """Its sequence number is taken once."""
    fixture, first, second = QueueFixture(), request(), request()
    fixture.scheduler.allowed = 1
    assert result_at_once(fixture.deciding(first)).chosen is not None
    waiting = asyncio.create_task(fixture.deciding(second))
    await turn_until(lambda: fixture.queue.depth() == {"chat": 1})
    fixture.scheduler.allowed = 1
    fixture.queue._check_soon()
    assert (await waiting).chosen is not None
    assert (fixture.queue.sequence, fixture.queue.depth()) == (2, {})


async def test_an_arrival_does_not_overtake_queued_requests() -> None:
    """The scheduler decides over all requests: the first is released, the last waits."""
    fixture = QueueFixture()
    ((_, task),) = await fixture.enqueued()
    fixture.scheduler.allowed, late = 1, request()
    waiting = asyncio.create_task(fixture.deciding(late))
    assert (await task).chosen is not None
    assert fixture.queue.depth() == {"chat": 1}
    waiting.cancel()


# --------------------------------------------------------------------------- queued


@pytest.mark.parametrize("event", ["first token", "end", "scrape", "entry", "departure of a caller"])
async def test_fleet_events_arrivals_and_departures_trigger_a_release(event: str) -> None:
    """Any of these events may have made room."""
    fixture = QueueFixture()
    first, second = await fixture.enqueued(2)
    fixture.scheduler.allowed = 1
    match event:
        case "first token":
            fixture.fleet.on_first_token("unknown", monotonic())
        case "end":
            fixture.fleet.on_ended("unknown", AttemptOutcome.FAILED, monotonic(), AttemptReport())
        case "scrape":
            target = PollTarget(ConnectionPool(dead_url(), connect_timeout=1), backend())
            await Monitor(fixture.fleet).poll(EndpointPoll("small/a", target, 1.0))
        case "entry":
            third = asyncio.create_task(fixture.deciding(request()))
        case _:
            second[1].cancel()
    async with asyncio.timeout(5):
        assert (await first[1]).chosen is not None
    if event == "entry":
        third.cancel()
    second[1].cancel()


async def test_events_of_one_loop_turn_cause_one_release() -> None:
    """A burst of tokens is no burst of decisions."""
    fixture = QueueFixture()
    ((_, task),) = await fixture.enqueued()
    before = fixture.scheduler.releases
    for _ in range(50):
        fixture.fleet.on_first_token("unknown", monotonic())
    await turn_until(lambda: fixture.scheduler.releases > before)
    await asyncio.sleep(0)
    assert fixture.scheduler.releases == before + 1
    task.cancel()


async def test_each_request_is_dispatched_before_the_next_is_released() -> None:
    """A dispatch changes the best endpoint for the next request. Arrivals in between wait for the same."""
    fixture, order = QueueFixture(), []
    release = fixture.scheduler.release

    def releasing(fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        order.append("ask")
        return release(fleet, now)

    async def sending(asked: InferenceRequest) -> None:
        await fixture.deciding(asked)
        order.append("sent")

    tasks = [asyncio.create_task(sending(request())) for _ in range(2)]
    await turn_until(lambda: len(fixture.scheduler.queued_requests) == 2)
    fixture.scheduler.release, fixture.scheduler.allowed = releasing, 3
    tasks += [asyncio.create_task(sending(request()))]
    await asyncio.gather(*tasks)
    assert order == ["ask", "sent"] * 3


async def test_an_emptied_queue_releases_the_next_arrival_at_once() -> None:
    """After any kind of departure."""
    fixture = QueueFixture()
    ((_, task),) = await fixture.enqueued()
    fixture.scheduler.allowed = 2
    assert fixture.fleet.on_news is not None
    fixture.fleet.on_news()
    await task
    async with asyncio.timeout(5):
        assert (await fixture.deciding(request())).chosen is not None


async def test_the_scheduler_is_called_at_its_wake_up_time() -> None:
    """Without any event."""
    fixture = QueueFixture()
    fixture.scheduler.wake_at = monotonic() + 0.02
    ((_, task),) = await fixture.enqueued()
    fixture.scheduler.allowed = 1
    async with asyncio.timeout(10):
        assert (await task).at >= fixture.scheduler.wake_at - 0.002


async def test_an_empty_queue_ignores_fleet_events() -> None:
    """Events then cost nothing."""
    fixture = QueueFixture()
    ((_, task),) = await fixture.enqueued()
    assert fixture.fleet.on_news is not None
    fixture.scheduler.allowed = 1
    fixture.fleet.on_news()
    await task
    assert fixture.fleet.on_news is None
    releases = fixture.scheduler.releases
    fixture.fleet.on_first_token("unknown", monotonic())
    await asyncio.sleep(0)
    assert fixture.scheduler.releases == releases


async def test_depth_counts_queued_requests_by_route() -> None:
    """For the gauge and for explanations."""
    fixture = QueueFixture()
    deciding = [
        fixture.deciding(request()),
        fixture.deciding(request()),
        fixture.deciding(request(), on=route("agent")),
    ]
    tasks = [asyncio.create_task(one) for one in deciding]
    await turn_until(lambda: sum(fixture.queue.depth().values()) == 3)
    assert fixture.queue.depth() == {"chat": 2, "agent": 1}
    for task in tasks:
        task.cancel()


# --------------------------------------------------------------------------- cancelled, timed out, stopped


async def test_a_cancelled_caller_leaves_the_scheduler() -> None:
    """At once."""
    fixture = QueueFixture()
    ((asked, task),) = await fixture.enqueued()
    queued = fixture.scheduler.queued_requests[id(asked)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), fixture.scheduler.calls, fixture.queue.depth()) == (True, [("leave", id(asked))], {})
    assert [*queued.held_s] == ["prefill"]


async def test_a_caller_cancelled_at_its_release_leaves_the_scheduler() -> None:
    """Otherwise its engine would count as busy for ever."""
    fixture = QueueFixture()
    ((asked, task),) = await fixture.enqueued()
    fixture.scheduler.allowed = 1
    assert fixture.fleet.on_news is not None
    fixture.fleet.on_news()
    await turn_until(lambda: not fixture.queue.depth())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), fixture.scheduler.calls) == (True, [("leave", id(asked))])


async def test_a_queued_request_times_out() -> None:
    """503 with Retry-After after the first-token limit."""
    fixture = QueueFixture(patience=0.02)
    fixture.scheduler.wake_at = FOREVER
    ((asked, task),) = await fixture.enqueued()
    queued = fixture.scheduler.queued_requests[id(asked)]
    with pytest.raises(QueueTimeout) as caught:
        await asyncio.wait_for(task, 1)
    assert 0.02 <= queued.held_s["prefill"] < 1.0
    assert (caught.value.status, caught.value.type, caught.value.headers["retry-after"]) == (503, "server_error", "30")
    assert "within 0.02 s" in caught.value.message
    assert fixture.scheduler.calls == [("leave", id(asked))]


async def test_a_request_without_a_deadline_waits_longer() -> None:
    """Batch requests wait until an engine is idle, bounded by NO_DEADLINE_PATIENCE."""
    fixture = QueueFixture(patience=0.02)
    task = asyncio.create_task(fixture.deciding(request(), on=route("batch")))
    await turn_until(lambda: sum(fixture.queue.depth().values()) == 1)
    (waiter,) = fixture.queue._waiters.values()
    assert waiter.patience == NO_DEADLINE_PATIENCE
    task.cancel()


async def test_batch_work_waits_until_it_is_due() -> None:
    """Hours, and not a moment longer."""
    fixture, asked = QueueFixture(patience=0.02), request()
    asked.arrival = monotonic()
    task = asyncio.create_task(fixture.deciding(asked, on=route("nightly", by="6h")))
    await turn_until(lambda: sum(fixture.queue.depth().values()) == 1)
    (waiter,) = fixture.queue._waiters.values()
    assert waiter.expires_at == waiter.queued.due == asked.arrival + 6 * 3600.0
    task.cancel()


async def test_requests_of_a_replaced_route_leave_to_be_decided_again_a_few_in_each_turn() -> None:
    """In order of arrival. Requests of other routes stay, and nothing is released meanwhile."""
    fixture, woken = QueueFixture(), list[int]()
    pairs = await fixture.enqueued(2 * WOKEN + 1)
    for number, (_, task) in enumerate(pairs):
        task.add_done_callback(lambda task, number=number: woken.append(number))
    other = asyncio.create_task(fixture.deciding(request(), on=route("batch")))
    await turn_until(lambda: len(fixture.queue.depth()) == 2)
    fixture.scheduler.calls.clear()
    fixture.queue.reload({"chat"})
    assert fixture.scheduler.calls == [("leave", id(asked)) for asked, _ in pairs]
    assert fixture.queue.depth() == {"chat": WOKEN + 1, "batch": 1}
    await turn_until(lambda: not fixture.queue.depth().get("chat"))
    assert [await task for _, task in pairs] == [None] * len(pairs)
    assert (woken, other.done()) == ([*range(len(pairs))], False)
    other.cancel()


async def test_a_request_decided_again_keeps_its_patience() -> None:
    """Counted from the first time that it was held, over any number of reloads."""
    fixture, asked = QueueFixture(patience=60.0), request()
    entered_at = monotonic() - 50.0
    task = asyncio.create_task(fixture.queue.decide(fixture.queue.queued(asked, CHAT, ESTIMATE, ANYONE), entered_at))
    await turn_until(lambda: sum(fixture.queue.depth().values()) == 1)
    (waiter,) = fixture.queue._waiters.values()
    assert (waiter.patience, waiter.expires_at) == (60.0, entered_at + 60.0)
    task.cancel()


async def test_closing_the_queue_rejects_queued_requests() -> None:
    """With 503 and Retry-After 1 s: another gateway may have time."""
    fixture = QueueFixture()
    pairs = await fixture.enqueued(3)
    fixture.queue.close()
    for _, task in pairs:
        with pytest.raises(QueueTimeout) as caught:
            await task
        assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    assert (fixture.scheduler.queued_requests, fixture.queue.depth(), fixture.fleet.on_news) == ({}, {}, None)


# --------------------------------------------------------------------------- internal errors


async def test_an_internal_error_fails_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other requests stay queued, in a new scheduler."""
    fixture = QueueFixture()
    (_, first), (_, second) = await fixture.enqueued(2)
    poison, now = request(), monotonic()
    real = module.decide

    def decide(queued: QueuedRequest, *rest: Any) -> Decision:
        if queued.tenant == "poison":
            raise ZeroDivisionError("a bug of ours")
        return real(queued, *rest)

    monkeypatch.setattr(module, "decide", decide)
    fixture.scheduler.error = ZeroDivisionError("a bug of ours")
    with pytest.raises(ZeroDivisionError):
        await fixture.deciding(poison, Tenant("poison"))
    assert "request queue failed" in caplog.text
    assert (len(fixture.schedulers), len(fixture.scheduler.queued_requests), fixture.queue.depth()) == (
        2,
        2,
        {"chat": 2},
    )
    fixture.scheduler.allowed = 2
    assert fixture.fleet.on_news is not None
    fixture.fleet.on_news()
    assert [(await task).at > now for task in (first, second)] == [True, True]


async def test_a_scheduler_error_on_an_empty_queue_places_the_request_without_queue() -> None:
    """In a new scheduler."""
    fixture = QueueFixture()
    fixture.scheduler.error = KeyError("a bug of ours")
    decision = result_at_once(fixture.deciding(request()))
    assert (decision.chosen is not None, decision.scorer, len(fixture.schedulers)) == (True, "predicted", 2)
    assert (fixture.scheduler.queued_requests, fixture.queue.depth(), fixture.fleet.on_news) == ({}, {}, None)


async def test_a_scheduler_error_places_all_queued_requests_without_queue() -> None:
    """No request is lost."""
    fixture = QueueFixture()
    pairs = await fixture.enqueued(3)
    fixture.scheduler.error = KeyError("a bug of ours")
    assert fixture.fleet.on_news is not None
    fixture.fleet.on_news()
    decisions = [await task for _, task in pairs]
    assert all(decision.chosen is not None and decision.scorer == "predicted" for decision in decisions)
    assert (len(fixture.schedulers), fixture.queue.depth()) == (2, {})
