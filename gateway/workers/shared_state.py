"""Small values that forked processes share: created before the fork, written by one process, read by others."""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass
from enum import Enum
from typing import Any

FIELDS = 2  # of an Entry, 8 bytes each and aligned: no reader sees half of one


class SharedValue:
    """A pickled value in an unnamed memory file: a configuration holds keys, which do not go to disk.

    The reader is told through a control channel when there is a new value; nothing else is put until then.
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


class WorkerState(Enum):
    STARTING = 0
    SERVING = 1
    DRAINING = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker's state. `starts` counts its processes."""

    state: WorkerState
    starts: int


class WorkerRegister:
    """State of every worker and counts of reloads: the supervisor writes, the admin aggregator reads."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._cells = memoryview(mmap.mmap(-1, workers * FIELDS * 8)).cast("q")
        self.reloads = memoryview(mmap.mmap(-1, 24)).cast("d")  # as `gateway.reload.ReloadCounts` counts

    def set(self, worker: int, entry: Entry) -> None:
        self._cells[worker * FIELDS] = entry.state.value
        self._cells[worker * FIELDS + 1] = entry.starts

    def all(self) -> list[Entry]:
        cells = self._cells
        return [Entry(WorkerState(cells[at]), cells[at + 1]) for at in range(0, self._workers * FIELDS, FIELDS)]
