"""A timer that no stall of the event loop deceives: on time, never early, and moved on without a new timer of the
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from socket import socket, socketpair
from time import monotonic
from typing import Any

import pytest

from backends.http.loop_aware_timer import LATE, READ_FIRST, LoopAwareTimer
from gateway.process import loop_factory
from lab.virtual_time import stall

pytestmark = pytest.mark.virtual_time


class Watched:
    """A timer, and the times at which it has woken."""

    def __init__(self) -> None:
        self.timer, self.woken, self.handles = LoopAwareTimer(), list[float](), 0

    def wake(self) -> None:
        self.woken.append(monotonic())

    def set(self, at: float | None) -> None:
        before = self.timer._handle
        self.timer.set(at, self.wake)
        self.handles += self.timer._handle is not before


async def test_it_wakes_once_at_the_earlier_of_two_times() -> None:
    watched, now = Watched(), monotonic()
    watched.set(now + 0.5)
    watched.set(now + 0.01)
    await asyncio.sleep(0.1)
    assert len(watched.woken) == 1
    assert now + 0.01 <= watched.woken[0] < now + 0.1


async def test_a_later_time_counts_and_needs_no_timer_of_the_loop() -> None:
    watched, now = Watched(), monotonic()
    for moved in range(5):
        watched.set(now + 0.01 + moved * 0.01)
    assert watched.handles == 1
    await asyncio.sleep(0.15)
    assert len(watched.woken) == 1
    assert watched.woken[0] >= now + 0.05


@pytest.mark.parametrize("end", ["none", "cancelled"])
async def test_it_wakes_no_more_once_it_is_unset(end: str) -> None:
    watched = Watched()
    watched.set(monotonic() + 0.005)
    if end == "none":
        watched.set(None)
    else:
        watched.timer.cancel()
    await asyncio.sleep(0.05)
    assert watched.woken == []


async def test_after_a_stall_sockets_are_read_first() -> None:
    watched, now = Watched(), monotonic()
    watched.set(now + 0.005)
    stall(0.03)
    stalled = monotonic()
    await asyncio.sleep(0.1)
    assert len(watched.woken) == 1
    assert watched.woken[0] >= stalled + READ_FIRST / 2


async def stalled() -> Watched:
    """A timer that is due, and waits for the sockets to be read."""
    watched = Watched()
    watched.set(monotonic() + 0.005)
    stall(0.03)
    await asyncio.sleep(0.001)
    assert watched.woken == []
    return watched


@pytest.mark.parametrize("moved", [None, 0.05])
async def test_what_is_read_after_a_stall_unsets_the_timer_or_moves_it_on(moved: float | None) -> None:
    watched, now = await stalled(), monotonic()
    watched.set(None if moved is None else now + moved)
    await asyncio.sleep(0.1)
    assert len(watched.woken) == (moved is not None)
    assert all(at >= now + 0.05 for at in watched.woken)


async def test_events_after_a_stall_do_not_put_the_timer_off_for_ever() -> None:
    """Each event sets the time that has passed again."""
    watched, due = await stalled(), monotonic() - 0.02
    began = monotonic()
    while monotonic() < began + 0.1:
        watched.set(due)
        await asyncio.sleep(0.002)
    assert watched.woken


@pytest.mark.real_time
def test_it_never_wakes_early_on_the_loop_of_the_product() -> None:
    """uvloop rounds to milliseconds. A timer that fires early would be set again and again until it is due."""
    early: list[Any] = []

    async def many() -> None:
        async def one(delay: float) -> None:
            watched, due = Watched(), monotonic() + delay
            watched.set(due)
            await asyncio.sleep(delay + 0.02)
            early.extend(at for at in watched.woken if at < due)

        await asyncio.gather(*(one(0.0003 * number) for number in range(100)))

    factory = loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(many())
    assert early == []


# --------------------------------------------------------------------------- time-outs


PATIENT = 10.0  # s of delay that no test reaches


async def silent(timer: LoopAwareTimer, then: Callable[[], None] = lambda: None) -> None:
    """A block that hears nothing. `then`: called in the next turn of the loop."""
    async with timer.timeout(0.02):
        asyncio.get_running_loop().call_soon(then)
        await asyncio.sleep(PATIENT)


async def test_a_block_is_ended_when_the_time_is_up_and_not_before() -> None:
    timer, began = LoopAwareTimer(late=PATIENT), monotonic()
    with pytest.raises(TimeoutError):
        await silent(timer)
    assert monotonic() - began >= 0.02
    assert (timer.stalled, timer._handle) == (False, None)


async def test_a_block_that_ends_in_time_is_never_interrupted() -> None:
    timer = LoopAwareTimer()
    async with timer.timeout(0.005):
        pass
    await asyncio.sleep(0.02)
    assert timer._handle is None


@pytest.mark.parametrize("comes", [True, False])
async def test_a_block_may_go_on_by_what_came_in_during_a_stall(comes: bool) -> None:
    """A byte that was in the socket when the loop went on is read before the time is up; without one it is up."""
    ours, theirs = socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        timer, read = LoopAwareTimer(), b""
        with suppress(TimeoutError):
            async with timer.timeout(0.005):
                asyncio.get_running_loop().call_soon(stall_with, theirs if comes else None)
                read = await reader.read(1)
        assert (read, timer.stalled) == (b"x" if comes else b"", True)
        writer.close()


def stall_with(answering: socket | None) -> None:
    """A stall, during which a byte comes in."""
    stall(0.02 + 4 * LATE)
    if answering is not None:
        answering.send(b"x")


@pytest.mark.parametrize(("late", "stalled"), [(LATE, True), (PATIENT, False)])
async def test_the_delay_that_counts_as_a_stall_is_the_users(late: float, stalled: bool) -> None:
    timer = LoopAwareTimer(late)
    with pytest.raises(TimeoutError):
        await silent(timer, lambda: stall_with(None))
    assert timer.stalled is stalled
