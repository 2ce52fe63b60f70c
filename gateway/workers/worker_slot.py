"""One thing that the supervisor keeps running: it outlives the processes that do it, and knows when to replace them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gateway.workers.child_process import Child

YOUNG = 10.0  # s: one that ends sooner than this, twice in a row, is not replaced at once
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # s


class WorkerSlot:
    """`work` runs in a process of its own, with its end of the line to the supervisor, and returns its exit code."""

    def __init__(self, name: str, work: Callable[[socket.socket], int]) -> None:
        self.name, self.work = name, work
        self.child: Child | None = None
        self.prepared = self.serving = False
        self.starts = 0  # processes so far
        self.due: float | None = None  # when the next one is to start
        self._young = 0  # of the latest, in a row, that ended young

    def began(self, child: Child) -> None:
        self.child, self.due = child, None
        self.starts += 1

    def tell(self, order: bytes) -> None:
        if self.child is not None:
            self.child.tell(order)

    def ended(self, now: float) -> float:
        """Its process is gone. Seconds until the next one should start."""
        assert self.child is not None
        self._young = self._young + 1 if now - self.child.born < YOUNG else 0
        self.child.line.close()
        self.child, self.prepared, self.serving = None, False, False
        return 0.0 if self._young < 2 else min(FIRST_WAIT * 2.0 ** (self._young - 2), LONGEST_WAIT)
