"""Work in crowds: in order, and no more in a turn of the event loop than the turn has time for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.upstream import dispatcher
from gateway.upstream.dispatcher import TURN, WorkQueue

pytestmark = pytest.mark.virtual_time


class Clock:
    """Time passes by the work alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(dispatcher, "monotonic", found)
    return found


class Log:
    """Work that takes `seconds` each; notes its number and the turn in which it was done."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.turn = clock, seconds, 0
        self.done: list[tuple[int, int]] = []

    def work(self, number: int) -> None:
        self.done.append((self.turn, number))
        self.clock.now += self.seconds

    async def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn += 1
            await asyncio.sleep(0)

    @property
    def by_turn(self) -> list[int]:
        """Works done in each turn."""
        turns = [turn for turn, _ in self.done]
        return [turns.count(turn) for turn in range(max(turns) + 1)]


async def test_work_is_done_at_once_while_the_turn_has_time(clock: Clock) -> None:
    """The loss of one connection waits for nothing."""
    log, queue = Log(clock, 0.0), WorkQueue()
    for number in range(1000):
        queue.do(log.work, number)
    assert log.done == [(0, number) for number in range(1000)]


async def test_a_crowd_is_spread_over_turns_in_order(clock: Clock) -> None:
    """Each turn has time for the work that begins within it; the rest waits."""
    log, queue = Log(clock, TURN / 2), WorkQueue()
    for number in range(10):
        queue.do(log.work, number)
    assert log.done == [(0, 0), (0, 1)]
    await log.turns(10)
    assert [number for _, number in log.done] == list(range(10))
    assert log.by_turn == [2] * 5


async def test_other_callbacks_run_between_two_turns_of_work(clock: Clock) -> None:
    """A thousand losses do not stall the requests that are well."""
    log, queue = Log(clock, TURN), WorkQueue()
    seen: list[int] = []
    for number in range(5):
        queue.do(log.work, number)
    for _ in range(6):
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(log.done)))
        await asyncio.sleep(0)
    assert seen[0] == 2
    assert sorted(set(seen)) == seen[: len(set(seen))]
    assert seen[-1] == 5


async def test_work_that_arrives_while_others_wait_goes_behind_them(clock: Clock) -> None:
    """A turn later there is time again, but not before those that wait."""
    log, queue = Log(clock, TURN), WorkQueue()
    for number in range(3):
        queue.do(log.work, number)
    await log.turns(1)
    queue.do(log.work, 3)
    await log.turns(5)
    assert [number for _, number in log.done] == [0, 1, 2, 3]


async def test_a_new_turn_has_its_whole_time(clock: Clock) -> None:
    """After a pause, work is done at once."""
    log, queue = Log(clock, TURN), WorkQueue()
    queue.do(log.work, 0)
    await log.turns(3)
    queue.do(log.work, 1)
    assert [number for _, number in log.done] == [0, 1]


async def test_an_error_of_one_work_does_not_lose_the_others(clock: Clock) -> None:
    """The error reaches the event loop; what waits is done in a later turn, before what arrives meanwhile."""
    log, queue, errors = Log(clock, TURN), WorkQueue(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail() -> None:
        raise RuntimeError("a bug of ours")

    works: list[Callable[[], None]] = [lambda: log.work(0), fail, lambda: log.work(1)]
    for work in works:
        queue.do(work)
    await log.turns(1)
    queue.do(log.work, 2)
    await log.turns(6)
    assert [number for _, number in log.done] == [0, 1, 2]
    assert [type(error) for error in errors] == [RuntimeError]
