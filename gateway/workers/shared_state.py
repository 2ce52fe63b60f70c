"""Shared memory of the workers and the admin process: inherited by fork, kept when a process is restarted."""

from __future__ import annotations

import os
import pickle
from typing import Any

from gateway.workers.heartbeats import Heartbeats


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

    `config`: the last reloaded configuration; `retired`: counters of exited workers; `beats`: of the workers, and last
    of the aggregator.
    """

    def __init__(self, workers: int) -> None:
        self.config, self.retired = SharedValue(), SharedValue()
        self.beats = Heartbeats(workers + 1)
