"""State of the supervisor that its children read, in memory that they inherit: states of workers, and reloads."""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
class WorkerStatus:
    """`starts`: number of processes so far."""

    state: WorkerState
    starts: int


class SharedState:
    """State of the workers and of reloads, to be created before the fork: the supervisor writes, others read.

    `reloads`: as `gateway.reload.ReloadCounts` counts. `config`: the last reloaded configuration. `answer`: to a POST
    /reload. `retired`: counters of exited workers, written by the admin aggregator for a successor.
    """

    def __init__(self, workers: int) -> None:
        # 8 bytes per field, aligned: no reader sees half a field.
        self._workers = memoryview(mmap.mmap(-1, workers * 16)).cast("q")
        self.reloads = memoryview(mmap.mmap(-1, 24)).cast("d")
        self.config = SharedValue()
        self.answer = SharedValue()
        self.retired = SharedValue()

    def set_worker(self, worker: int, status: WorkerStatus) -> None:
        self._workers[2 * worker] = status.state.value
        self._workers[2 * worker + 1] = status.starts

    def is_running(self, worker: int) -> bool:
        return self._workers[2 * worker] != WorkerState.ENDED.value

    def workers(self) -> list[WorkerStatus]:
        fields = iter(self._workers.tolist())
        return [WorkerStatus(WorkerState(state), starts) for state, starts in zip(fields, fields, strict=True)]
