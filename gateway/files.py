"""Files that are read, written whole (they hold either their old contents or their new ones, whatever happens), and
looked at from time to time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path


class NotAFile(Exception):
    """The path is that of a directory, a pipe or a device."""


def read_regular(path: Path, most: int) -> bytes | None:
    """`most` bytes and one more, so that a longer file is noticed; None without a file. Raises NotAFile, OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotAFile("not a regular file")
        return opened.read(most + 1)


def replace_file(path: Path, raw: bytes) -> None:
    """Readable for this user alone; makes the directory. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, or a pipe that would block
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as opened:
            opened.write(raw)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
