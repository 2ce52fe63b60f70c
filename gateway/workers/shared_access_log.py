"""One access log of several processes: a line is written whole, wherever it goes.

A pipe takes more than 4 KiB (PIPE_BUF) in parts, and another process may come in between. So who writes holds a lock;
it is the kernel's, so that a process that dies lets it go.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from gateway.observe.access_log import AccessLog


class SharedAccessLog(AccessLog):
    """`lock`: a file, the same to all of them."""

    def __init__(self, target: str, lock: Path) -> None:
        self._lock = lock.open("ab")
        super().__init__(target)

    def _write(self, lines: list[bytes]) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            super()._write(lines)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
