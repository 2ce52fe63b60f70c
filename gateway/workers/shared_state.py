"""Shared memory of the workers and the admin process: inherited by fork, kept when a process is restarted.

A heartbeat is a sign of life there: each worker writes the time at which its event loop last turned. Rules:
- A process that dies is noticed by its exit. A heartbeat tells of one that stands still: stopped, in a loop, or in a
  write to a hung disk. It keeps its share of new connections, as the kernel knows nothing of it.
- A stall is counted in ticks of the supervisor, so that a pause of the whole machine, or of all processes, is none.
- It is told after STALLED ticks. After KILLED ticks the process is killed and replaced: no page fault takes so long.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
from time import monotonic
from typing import Any

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


class SharedValue:
    """A pickled value in an unnamed memory file: a configuration holds API keys, which must not be written to disk.

    One process writes. Others read at their start, and when the writer asks them to apply the value.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("firsttoken")

    def put(self, value: object) -> None:
        pickled = pickle.dumps(value)
        os.pwrite(self._file, pickled, 0)
        os.ftruncate(self._file, len(pickled))

    def get(self) -> Any:
        """None before the first `put`."""
        size = os.fstat(self._file).st_size
        return pickle.loads(os.pread(self._file, size, 0)) if size else None


class SharedState:
    """Written by the admin aggregator, but for `beats`; to be created before the fork.

    `config`: the last reloaded configuration; `drained`: ids of endpoints that an operator has taken out; `retired`:
    counters of exited workers; `beats`: of the workers, and last of the aggregator.
    """

    def __init__(self, workers: int) -> None:
        self.config, self.drained = SharedValue(), SharedValue()
        self.retired = SharedValue()
        self.beats = Heartbeats(workers + 1)
