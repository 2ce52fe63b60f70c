"""A timer that takes no stall of this event loop for a silence of the other side.

Rules:
- A timer that fires late has met a stall of the loop. Sockets are read for a while (READ_FIRST) before the timer
  counts: what came in during the stall may set another time.
- A later time than the one set costs no new timer of the loop: the timer that fires early is set again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import ceil, inf
from time import monotonic

GRAIN = 0.001  # s, of uvloop's clock: a timer that fires early would be set again and again, in a busy loop
LATE = 0.005  # s of tolerated delay
READ_FIRST = 0.01  # s in which sockets are read after a stall of the event loop


class LoopAwareTimer:
    """Calls a function at the latest time set. `late`: seconds of delay from which the loop has stalled. `read_first`:
    seconds in which sockets are read then."""

    def __init__(self, late: float = LATE, read_first: float = READ_FIRST) -> None:
        self.stalled = False  # a stall was found at the latest time that was due
        self._late, self._read_first = late, read_first
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

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[Callable[[float], None]]:
        """Raise TimeoutError in the block after `seconds`, or at the time given to the yielded function last."""
        async with asyncio.timeout(None) as limit:

            def until(at: float) -> None:
                self.set(at, lambda: limit.reschedule(0.0))

            until(monotonic() + seconds)
            try:
                yield until
            finally:
                self.cancel()

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
            return
        self.stalled = sockets_read or now - due > self._late
        if self.stalled and not sockets_read:
            self._fires_at = due  # a time set during this wait restarts the wait only if earlier
            self._handle = asyncio.get_running_loop().call_later(self._read_first, self._fire, wake, True)
        else:
            wake()
