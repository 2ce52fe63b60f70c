"""Files: read with a limit, replaced whole (old or new contents, never a part of both), watched for changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from tempfile import mkstemp
from time import time


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
    """Readable for this user alone; makes the directory. Raises OSError.

    The temporary file has a random name: in containers that share a volume, processes have the same id.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _remove_orphans(path)
    file, name = mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with open(file, "wb") as opened:
            opened.write(raw)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _remove_orphans(path: Path) -> None:
    """Remove temporary files of processes that were killed long ago."""
    for orphan in path.parent.glob(f".{escape(path.name)}.*"):
        with suppress(OSError):
            if time() - orphan.lstat().st_mtime > ORPHAN_AGE:
                orphan.unlink()


def _sync_directory(path: Path) -> None:
    """The new name survives a loss of power. Some file systems of networks cannot sync a directory."""
    with suppress(OSError):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


ORPHAN_AGE = 3600.0  # s
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
