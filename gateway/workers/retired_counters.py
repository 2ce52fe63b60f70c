"""The counts of workers that are no more, where they outlast the desk's own process too."""

from __future__ import annotations

import os
from tempfile import TemporaryFile

import msgspec

from gateway.workers.merged_stats import Families


class RetiredCounters:
    """An unnamed file, to be made before the processes are forked that use it. One at a time does."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - for as long as we live

    def read(self) -> Families:
        file = self._file.fileno()
        kept = os.pread(file, os.fstat(file).st_size, 0)
        return msgspec.json.decode(kept, type=Families) if kept else []

    def write(self, families: Families) -> None:
        kept, file = msgspec.json.encode(families), self._file.fileno()
        os.pwrite(file, kept, 0)
        os.ftruncate(file, len(kept))
