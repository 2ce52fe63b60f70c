"""The line before the engines: who waits, who is told when, and that nobody is lost.

The room here does what the test says, so that what is tried is how it is driven, not whom it prefers.
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
from gateway.fleet.monitor import Monitor
from gateway.scheduler import NO_DEADLINE_PATIENCE, QueueTimeout, RequestQueue
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.routes.route import Route, Ttft
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, NEVER, AttemptOutcome, Decision, PoolEstimate, PromptEstimate
from tests.gateway.builders import POOL, backend, candidate, decided, request, route
from tests.gateway.upstream.dispatching import dead_url
from tests.support.upstream import turn_until

ESTIMATE = PromptEstimate({"small": PoolEstimate(100)})
CHAT = route().model_copy(update={"ttft": Ttft(budget="1s")})


class Room(QueueScheduler):
    """Lets pass whom the test says, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[Hashable, QueuedRequest] = {}
        self.passing = 0  # how many more may pass
        self.looks = 0
        self.told: list[tuple[str, Hashable]] = []
        self.bug: Exception | None = None
        self.limited = 0.0

    def enter(self, queued: QueuedRequest) -> None:
        self.inside[queued.request_key] = queued

    def pass_through(self, queued: QueuedRequest, fleet: Fleet, now: float) -> Decision | None:
        self.enter(queued)
        return next((decision for _, decision in self.release(fleet, now)), None)

    def release(self, fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        self.looks += 1
        while self.inside and self.passing:
            ticket = next(iter(self.inside))
            del self.inside[ticket]
            self.passing -= 1
            yield ticket, decided(candidate(), at=now)
        if self.bug is not None and self.inside:
            raise self.bug

    def leave(self, ticket: Hashable, now: float = NEVER) -> float:
        self.inside.pop(ticket, None)
        self.told.append(("leave", ticket))
        return self.limited

    def on_dispatched(self, ticket: Hashable) -> None:
        self.told.append(("departed", ticket))


class Stage:
    """A line, its rooms in the order in which they were opened, and requests before it."""

    def __init__(self, patience: float = 60.0) -> None:
        self.rooms: list[Room] = []
        self.fleet = Fleet([POOL])
        self.line = RequestQueue(self.fleet, lambda: patience, self._open)

    def _open(self) -> Room:
        self.rooms.append(Room())
        return self.rooms[-1]

    @property
    def room(self) -> Room:
        return self.rooms[-1]

    def asking(
        self, asked: InferenceRequest, tenant: Tenant = ANYONE, on: Route = CHAT
    ) -> Coroutine[Any, Any, Decision]:
        return self.line.decide(asked, on, ESTIMATE, tenant)

    async def held(self, count: int = 1) -> list[tuple[InferenceRequest, asyncio.Task[Decision]]]:
        """So many requests, in the room."""
        pairs = [(asked := request(), asyncio.create_task(self.asking(asked))) for _ in range(count)]
        await turn_until(lambda: sum(self.line.depth().values()) == count)
        return pairs


def at_once(asking: Coroutine[Any, Any, Decision]) -> Decision:
    """Its result, if it waits for nothing."""
    with pytest.raises(StopIteration) as done:
        asking.send(None)
    decision: Decision = done.value.value
    return decision


# --------------------------------------------------------------------------- at once


def test_a_request_that_may_go_waits_for_nothing() -> None:
    """No event loop is needed for it: neither task nor future nor timer."""
    stage = Stage()
    stage.room.passing = 1
    assert at_once(stage.asking(request())).chosen is not None
    assert (stage.fleet.on_news, stage.line.depth()) == (None, {})


def test_its_tenants_cache_group_goes_with_it() -> None:
    """Fairness and caches are by it."""
    stage, seen = Stage(), []
    stage.room.enter = lambda queued: seen.append(queued.cache_group)
    with pytest.raises(RuntimeError, match="no running event loop"):  # it is not let pass, and would wait
        stage.asking(request(), Tenant("web", cache_group="front")).send(None)
    assert seen == ["front"]


def test_a_request_that_was_sent_leaves_the_room() -> None:
    """From then on the fleet counts it."""
    stage, asked = Stage(), request()
    stage.line.on_dispatched(asked)
    assert stage.room.told == [("departed", id(asked))]


def test_every_request_has_an_ordinal_of_its_own() -> None:
    """It breaks ties and turns round robin."""
    stage = Stage()
    stage.room.passing = 3
    for _ in range(3):
        at_once(stage.asking(request()))
    assert stage.line.sequence == 3


async def test_none_at_once_means_held() -> None:
    """Then, and only then, there is something to wait for; the ordinal is taken once."""
    stage, first, second = Stage(), request(), request()
    stage.room.passing = 1
    assert at_once(stage.asking(first)).chosen is not None
    waiting = asyncio.create_task(stage.asking(second))
    await turn_until(lambda: stage.line.depth() == {"chat": 1})
    stage.room.passing = 1
    stage.line._check_soon()
    assert (await waiting).chosen is not None
    assert (stage.line.sequence, stage.line.depth()) == (2, {})


async def test_who_comes_while_others_wait_goes_past_nobody() -> None:
    """The room is asked about all of them: the first is let go, who came last waits."""
    stage = Stage()
    ((_, task),) = await stage.held()
    stage.room.passing, late = 1, request()
    waiting = asyncio.create_task(stage.asking(late))
    assert (await task).chosen is not None
    assert stage.line.depth() == {"chat": 1}
    waiting.cancel()


# --------------------------------------------------------------------------- held


@pytest.mark.parametrize("event", ["first token", "end", "scrape", "entry", "departure of a caller"])
async def test_who_waits_is_looked_at_when_something_happens(event: str) -> None:
    """Whatever may have made room."""
    stage = Stage()
    first, second = await stage.held(2)
    stage.room.passing = 1
    match event:
        case "first token":
            stage.fleet.on_first_token("unknown", monotonic())
        case "end":
            stage.fleet.on_ended("unknown", AttemptOutcome.FAILED, monotonic(), AttemptReport())
        case "scrape":
            await Monitor(stage.fleet).poll("small/a", ConnectionPool(dead_url(), connect_timeout=1), backend())
        case "entry":
            third = asyncio.create_task(stage.asking(request()))
        case _:
            second[1].cancel()
    async with asyncio.timeout(0.5):
        assert (await first[1]).chosen is not None
    if event == "entry":
        third.cancel()
    second[1].cancel()


async def test_many_events_of_one_turn_are_one_look() -> None:
    """A burst of tokens is not a burst of decisions."""
    stage = Stage()
    ((_, task),) = await stage.held()
    before = stage.room.looks
    for _ in range(50):
        stage.fleet.on_first_token("unknown", monotonic())
    await turn_until(lambda: stage.room.looks > before)
    await asyncio.sleep(0)
    assert stage.room.looks == before + 1
    task.cancel()


async def test_they_go_one_at_a_time() -> None:
    """Each has been sent when the room is asked for the next, for its going changes where the next should go; who
    comes in between waits for the same."""
    stage, order = Stage(), []
    release = stage.room.release

    def releasing(fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        order.append("ask")
        return release(fleet, now)

    async def sending(asked: InferenceRequest) -> None:
        await stage.asking(asked)
        order.append("sent")

    tasks = [asyncio.create_task(sending(request())) for _ in range(2)]
    await turn_until(lambda: len(stage.room.inside) == 2)
    stage.room.release, stage.room.passing = releasing, 3
    tasks += [asyncio.create_task(sending(request()))]
    await asyncio.gather(*tasks)
    assert order == ["ask", "sent"] * 3


async def test_a_line_that_has_emptied_lets_the_next_pass_at_once() -> None:
    """However the last one left."""
    stage = Stage()
    ((_, task),) = await stage.held()
    stage.room.passing = 2
    assert stage.fleet.on_news is not None
    stage.fleet.on_news()
    await task
    async with asyncio.timeout(0.5):
        assert (await stage.asking(request())).chosen is not None


async def test_who_waits_is_looked_at_when_the_room_says() -> None:
    """With no event at all."""
    stage = Stage()
    stage.room.wake_at = monotonic() + 0.02
    ((_, task),) = await stage.held()
    stage.room.passing = 1
    async with asyncio.timeout(1):
        assert (await task).at >= stage.room.wake_at - 0.002


async def test_nobody_listens_once_nobody_waits() -> None:
    """What happens in the fleet costs nothing then."""
    stage = Stage()
    ((_, task),) = await stage.held()
    assert stage.fleet.on_news is not None
    stage.room.passing = 1
    stage.fleet.on_news()
    await task
    assert stage.fleet.on_news is None
    looks = stage.room.looks
    stage.fleet.on_first_token("unknown", monotonic())
    await asyncio.sleep(0)
    assert stage.room.looks == looks


async def test_how_many_wait_is_known_by_route() -> None:
    """For the gauge and for explanations."""
    stage = Stage()
    asking = [stage.asking(request()), stage.asking(request()), stage.asking(request(), on=route("agent"))]
    tasks = [asyncio.create_task(one) for one in asking]
    await turn_until(lambda: sum(stage.line.depth().values()) == 3)
    assert stage.line.depth() == {"chat": 2, "agent": 1}
    for task in tasks:
        task.cancel()


# --------------------------------------------------------------------------- gone, too long, stopped


async def test_a_caller_that_leaves_leaves_the_room() -> None:
    """Its place is free at once."""
    stage = Stage()
    ((asked, task),) = await stage.held()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), stage.room.told, stage.line.depth()) == (True, [("leave", id(asked))], {})


async def test_a_caller_that_leaves_as_it_is_let_go_leaves_too() -> None:
    """Else the engine that it was to go to would be thought busy for ever."""
    stage = Stage()
    ((asked, task),) = await stage.held()
    stage.room.passing = 1
    assert stage.fleet.on_news is not None
    stage.fleet.on_news()
    await turn_until(lambda: not stage.line.depth())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), stage.room.told) == (True, [("leave", id(asked))])


async def test_a_request_is_not_held_for_ever() -> None:
    """503 with Retry-After once the limit of silence is over, room or no room."""
    stage = Stage(patience=0.02)
    stage.room.wake_at, stage.room.limited = FOREVER, 0.01
    ((asked, task),) = await stage.held()
    with pytest.raises(QueueTimeout) as caught:
        await asyncio.wait_for(task, 1)
    assert caught.value.rate_limited_s == 0.01
    assert (caught.value.status, caught.value.type, caught.value.headers["retry-after"]) == (503, "server_error", "30")
    assert "within 0.02 s" in caught.value.message
    assert stage.room.told == [("leave", id(asked))]


async def test_nobody_is_turned_away_who_has_no_deadline() -> None:
    """Batch is held until an engine has time for it: not for ever either, but as long as callers wait."""
    stage = Stage(patience=0.02)
    task = asyncio.create_task(stage.asking(request(), on=route("batch")))
    await turn_until(lambda: sum(stage.line.depth().values()) == 1)
    (waiter,) = stage.line._waiters.values()
    assert waiter.expires_at - waiter.entered_at == pytest.approx(NO_DEADLINE_PATIENCE)
    task.cancel()


async def test_who_still_waits_when_the_gateway_goes_away_is_told_so() -> None:
    """Another one may have time: come back in a second."""
    stage = Stage()
    pairs = await stage.held(3)
    stage.line.close()
    for _, task in pairs:
        with pytest.raises(QueueTimeout) as caught:
            await task
        assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    assert (stage.room.inside, stage.line.depth(), stage.fleet.on_news) == ({}, {}, None)


# --------------------------------------------------------------------------- our own bugs


async def test_a_bug_befalls_the_request_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets the error; the others wait on, in a new room."""
    stage = Stage()
    (_, first), (_, second) = await stage.held(2)
    poison, now = request(), monotonic()
    real = module.decide

    def decide(queued: QueuedRequest, *rest: Any) -> Decision:
        if queued.cache_group == "poison":
            raise ZeroDivisionError("a bug of ours")
        return real(queued, *rest)

    monkeypatch.setattr(module, "decide", decide)
    stage.room.bug = ZeroDivisionError("a bug of ours")
    with pytest.raises(ZeroDivisionError):
        await stage.asking(poison, Tenant("x", cache_group="poison"))
    assert "request queue failed" in caplog.text
    assert (len(stage.rooms), len(stage.room.inside), stage.line.depth()) == (2, 2, {"chat": 2})
    stage.room.passing = 2
    assert stage.fleet.on_news is not None
    stage.fleet.on_news()
    assert [(await task).at > now for task in (first, second)] == [True, True]


async def test_a_bug_of_an_empty_room_is_nobodys_error() -> None:
    """Who met it goes where it would go without a room."""
    stage = Stage()
    stage.room.bug = KeyError("a bug of ours")
    decision = at_once(stage.asking(request()))
    assert (decision.chosen is not None, decision.scorer, len(stage.rooms)) == (True, "predicted", 2)
    assert (stage.room.inside, stage.line.depth(), stage.fleet.on_news) == ({}, {}, None)


async def test_a_bug_of_the_room_itself_loses_nobody() -> None:
    """All go where they would go without one."""
    stage = Stage()
    pairs = await stage.held(3)
    stage.room.bug = KeyError("a bug of ours")
    assert stage.fleet.on_news is not None
    stage.fleet.on_news()
    decisions = [await task for _, task in pairs]
    assert all(decision.chosen is not None and decision.scorer == "predicted" for decision in decisions)
    assert (len(stage.rooms), stage.line.depth()) == (2, {})
