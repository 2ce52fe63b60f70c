"""The timers of all attempt machines.

A request sets a timer, and nearly always ends before it is due: a timer of the event loop for each would take 15 us of
a small request. So all timers that are due within a GRAIN share one, and work that falls due at a time is spread over
turns of the loop. Most timers are moved to a later time before the first is due: the timer that fires early is set
again. After a stall of this event loop, sockets are read before a timer counts: the stall is no silence of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil, inf
from time import monotonic

from gateway.upstream.work_queue import WorkQueue

GRAIN = 0.005  # s by which a timer may fire late
CLOCK_GRAIN = 0.001  # s, of uvloop's clock: a timer that fires early would be set again and again, in a busy loop
LATE = 0.005  # s of tolerated delay, of a shared timer
READ_FIRST = 0.01  # s in which sockets are read after a stall of the event loop


class TimerWheel:
    """Timers of all requests, by the number of the GRAIN in which each is due. `queue`: spreads timers due together."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._due: dict[int, dict[WakeTimer, None]] = {}

    def add(self, timer: WakeTimer, at: float) -> int:
        """Fire `timer` at the end of the GRAIN that holds `at`, monotonic seconds. Returns the number of the GRAIN."""
        number = int(at / GRAIN) + 1
        timers = self._due.get(number)
        if timers is None:
            timers = self._due[number] = {}
            delay = ceil(max(number * GRAIN - monotonic(), 0.0) / CLOCK_GRAIN) * CLOCK_GRAIN + CLOCK_GRAIN
            asyncio.get_running_loop().call_later(delay, self._fire, number)
        timers[timer] = None
        return number

    def remove(self, timer: WakeTimer, number: int) -> None:
        if (timers := self._due.get(number)) is not None:
            timers.pop(timer, None)

    def _fire(self, number: int) -> None:
        """A call of the loop for each: the error of one loses no other."""
        loop = asyncio.get_running_loop()
        for timer in self._due.pop(number):
            loop.call_soon(self._queue.do, timer.fire)


class WakeTimer:
    """Calls a function at the latest time set."""

    def __init__(self, wheel: TimerWheel) -> None:
        self._wheel = wheel
        self._at: float | None = None
        self._wake: Callable[[], None] | None = None
        self._number = 0  # of the wheel
        self._fires_at = inf
        self._reading: asyncio.TimerHandle | None = None  # sockets are read after a stall

    def set(self, at: float | None, wake: Callable[[], None]) -> None:
        """Call `wake` at `at`, in monotonic seconds; None: never."""
        self._at, self._wake = at, wake
        if at is not None and at < self._fires_at:
            self._stop()
            self._start(at)

    def cancel(self) -> None:
        """Drop the function, which holds a reference to the request."""
        self._at = self._wake = None
        self._stop()

    def fire(self, sockets_read: bool = False) -> None:
        due, at, wake, now = self._fires_at, self._at, self._wake, monotonic()
        self._reading, self._fires_at = None, inf
        if at is None or wake is None:
            return
        if at > due:
            self._start(at)
        elif now - due > GRAIN + LATE and not sockets_read:
            self._fires_at = due  # a time set during this wait restarts the wait only if earlier
            self._reading = asyncio.get_running_loop().call_later(READ_FIRST, self.fire, True)
        else:
            wake()

    def _start(self, at: float) -> None:
        self._fires_at = at
        self._number = self._wheel.add(self, at)

    def _stop(self) -> None:
        if self._fires_at == inf:
            return
        self._fires_at = inf
        self._wheel.remove(self, self._number)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
