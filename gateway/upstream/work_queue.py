"""Work that arrives in crowds, spread over turns of the event loop.

An engine that dies loses a thousand connections within one turn. Each loss means another attempt: done in a row, these
would stall all other requests for as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

TURN = 0.004  # s of such work in one turn of the loop


class WorkQueue:
    """Does work at once while the turn has time for it, and the rest in later turns, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._spent = 0.0  # s in this turn
        self._scheduled = False
        self._working = False

    def do(self, work: Callable[..., None], *given: Any) -> None:
        self._waiting.append(partial(work, *given))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._work()

    def _work(self) -> None:
        while self._waiting and self._spent < TURN and not self._working:
            began, self._working = monotonic(), True
            try:
                self._waiting.popleft()()
            finally:
                self._working = False
                self._spent += monotonic() - began

    def _next_turn(self) -> None:
        self._spent, self._scheduled = 0.0, bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._work()
