"""Signs of life of the worker processes in shared memory: each writes the time at which its event loop last turned.

Rules:
- A process that dies is noticed by its exit. A heartbeat tells of one that stands still: stopped, in a loop, or in a
  write to a hung disk. It keeps its share of new connections, as the kernel knows nothing of it.
- A stall is counted in ticks of the supervisor, so that a pause of the whole machine, or of all processes, is none.
- It is told after STALLED ticks. After KILLED ticks the process is killed and replaced: no page fault takes so long.
"""

from __future__ import annotations

import asyncio
import mmap
from time import monotonic

BEAT = 0.5  # s
TICK = 1.0  # s
STALLED, KILLED = 5, 30  # ticks without a heartbeat
NEVER = 0.0


class Heartbeats:
    """Last heartbeat by slot. To be created before the fork; each process writes its own, the supervisor any."""

    def __init__(self, slots: int) -> None:
        self._times = memoryview(mmap.mmap(-1, 8 * max(slots, 1))).cast("d")

    def last(self, slot: int) -> float:
        """As of `monotonic`, which all processes share; NEVER: the process has not begun."""
        return self._times[slot]

    def clear(self, slot: int) -> None:
        self._times[slot] = NEVER

    def is_stalled(self, slot: int) -> bool:
        last = self.last(slot)
        return last != NEVER and monotonic() - last > STALLED * TICK

    async def beat_forever(self, slot: int) -> None:
        while True:
            self._times[slot] = monotonic()
            await asyncio.sleep(BEAT)


class StallWatch:
    """Ticks without a heartbeat of one process."""

    def __init__(self) -> None:
        self.ticks = 0
        self._last = NEVER

    def tick(self, last: float) -> int:
        """Called once a tick. Returns for how many ticks the process stood still, where it goes on from now; else 0."""
        goes_on = last not in (self._last, NEVER)
        stood_still = self.ticks if goes_on and self.ticks >= STALLED else 0
        self.ticks = self.ticks + 1 if last == self._last != NEVER else 0
        self._last = last
        return stood_still
