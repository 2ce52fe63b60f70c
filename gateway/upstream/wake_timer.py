"""The timer of one attempt machine.

Most timers are moved to a later time before the first is due. A later time sets no new timer of the event loop: the
timer that fires early is set again. After a stall of this event loop, sockets are read before the timer counts: the
stall is no silence of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil, inf
from time import monotonic

GRAIN = 0.001  # s, of uvloop's clock: a timer that fires early would be set again and again, in a busy loop
LATE = 0.005  # s of tolerated delay
READ_FIRST = 0.01  # s in which sockets are read after a stall of the event loop


class WakeTimer:
    """Calls a function at the latest time set."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._fires_at = inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None, wake: Callable[[], None]) -> None:
        """Call `wake` at `at`, in monotonic seconds; None: never."""
        self._at = at
        if at is not None and at < self._fires_at:
            if self._handle is not None:
                self._handle.cancel()
            self._start(at, wake)

    def cancel(self) -> None:
        """Drop the function, which holds a reference to the request."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._fires_at = None, inf

    def _start(self, at: float, wake: Callable[[], None]) -> None:
        self._at = self._fires_at = at
        delay = ceil(max(at - monotonic(), 0.0) / GRAIN) * GRAIN + GRAIN
        self._handle = asyncio.get_running_loop().call_later(delay, self._fire, wake)

    def _fire(self, wake: Callable[[], None], sockets_read: bool = False) -> None:
        due, at, now = self._fires_at, self._at, monotonic()
        self._handle, self._fires_at = None, inf
        if at is None:
            return
        if at > due:
            self._start(at, wake)
        elif now - due > LATE and not sockets_read:
            self._fires_at = due  # a time set during this wait restarts the wait only if earlier
            self._handle = asyncio.get_running_loop().call_later(READ_FIRST, self._fire, wake, True)
        else:
            wake()
