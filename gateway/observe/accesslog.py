"""One JSON line per request, written by a thread of its own: a slow disk never holds up a token.

Control characters are escaped by JSON itself, so one request is one line; no prompt or answer
is in a Record. When the writer falls behind by QUEUE lines, further lines are dropped, counted
and said.
"""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from gateway.observe.record import Record
from gateway.strictjson import encode

QUEUE = 10_000  # lines


class AccessLog:
    """A sink of Records. `target`: stdout, stderr or a file's path, which is appended to."""

    def __init__(self, target: str) -> None:
        self.lost = 0
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE)
        self._out: BinaryIO = _open(target)
        self._thread = threading.Thread(target=self._write_forever, name="access-log", daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what is queued and stop."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _write_forever(self) -> None:
        while (record := self._queue.get()) is not None:
            lines = [_line(record)]
            while not self._queue.empty() and (record := self._queue.get()) is not None:
                lines.append(_line(record))
            if self.lost:
                lines.append(encode({"access_log_lines_lost": self.lost}) + b"\n")
                self.lost = 0
            self._out.write(b"".join(lines))
            self._out.flush()
            if record is None:
                return


def _line(record: Record) -> bytes:
    return encode(record.as_json()) + b"\n"


def _open(target: str) -> BinaryIO:
    if target == "stdout":
        return sys.stdout.buffer
    if target == "stderr":
        return sys.stderr.buffer
    return Path(target).open("ab")
