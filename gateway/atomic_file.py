"""Files that hold either their old contents or their new ones, whatever happens."""

from __future__ import annotations

import os
import stat
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
