"""Where one process leaves a value for others, and tells them by the line that it is there.

The file is memory and has no name: a configuration holds keys, which do not go to disk. Linux has such files, and
workers are Linux's.
"""

from __future__ import annotations

import os
import pickle
from typing import Any


class SharedValue:
    """To be made before the processes are forked that use it. Read when told, by one; nothing is put until then."""

    def __init__(self) -> None:
        self._file = os.memfd_create("firsttoken")

    def put(self, value: object) -> None:
        kept = pickle.dumps(value)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, kept, 0)

    def get(self) -> Any:
        return pickle.loads(os.pread(self._file, os.fstat(self._file).st_size, 0))
