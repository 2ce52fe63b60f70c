"""What the supervisor knows of its workers, in memory that it shares with the one who speaks for all.

One writer, the supervisor. A field is 8 bytes and aligned, so that no reader sees half of one.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import Enum

FIELDS = 2  # 8 bytes each


class WorkerState(Enum):
    STARTING = 0
    SERVING = 1
    DRAINING = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker's place. `starts` counts the processes that have had it."""

    state: WorkerState
    starts: int


class WorkerRegister:
    """To be made before the processes are forked that read it."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._cells = memoryview(mmap.mmap(-1, max(places * FIELDS * 8, 1))).cast("q")
        self.reloads = memoryview(mmap.mmap(-1, 24)).cast("d")  # of the configuration, as `Reloads` counts them

    def set(self, place: int, entry: Entry) -> None:
        self._cells[place * FIELDS], self._cells[place * FIELDS + 1] = entry.state.value, entry.starts

    def get(self, place: int) -> Entry:
        return Entry(WorkerState(self._cells[place * FIELDS]), self._cells[place * FIELDS + 1])

    def all(self) -> list[Entry]:
        return [self.get(place) for place in range(self.places)]
