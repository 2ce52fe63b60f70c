"""Detection of changed files by looking at them from time to time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

CHECK_INTERVAL = 1.0  # s between two looks

FileState = tuple[int, int, int] | None  # mtime in ns, size, inode; None: no such file


class FileWatch:
    """Reports each version of the files once, when two looks in a row have found it: the first look may find a file
    half written. To be created before the files are read. Follows links: Kubernetes swaps the files of a ConfigMap
    behind one."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self.files = files
        self._read = self._seen = self._state()

    def begin_read(self) -> None:
        """The version of this moment is about to be read, and is not reported again."""
        self._read = self._state()

    def changed(self) -> bool:
        before, self._seen = self._seen, self._state()
        return self._seen == before and self._seen != self._read

    def _state(self) -> tuple[FileState, ...]:
        return tuple(map(_file_state, self.files))


def _file_state(path: Path) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
