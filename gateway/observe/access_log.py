"""One JSON line per request, written by a separate thread: a slow disk never delays a token.

Lines are single lines for every reader: JSON escapes control characters, and non-ASCII text is escaped too. Records
hold no prompt and no answer. The loop encodes lines a few at a time (a thread would hold the interpreter meanwhile) and
hands them to the writer every LINGER. With more than QUEUE lines behind, or a full disk, lines are lost; the next
successful write logs their number.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from gateway.observe.record import Record
from gateway.strict_json import encode

log = logging.getLogger("firsttoken")

QUEUE = 10_000  # lines
BATCH = 16  # lines encoded in one batch: 0.1 ms
LINGER = 0.05  # s until queued lines are handed to the writer
CLOSING = 5.0  # s for the writer to write queued lines at shutdown


class AccessLog:
    """Sink of Records on one loop. `target`: stdout, stderr, or the path of a file to append to.

    `lock`: file to lock during writes, for several processes with one log: a pipe splits writes above 4 KiB
    (PIPE_BUF). The
    kernel releases the lock with the process.
    """

    def __init__(self, target: str, lock: Path | None = None) -> None:
        self._lock: BinaryIO | None = None if lock is None else lock.open("ab")
        self._waiting: list[Record] = []
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._given = self._dropped = 0  # lines; counted on the loop, the counts below by the writer
        self._written = self._unwritten = self._said = 0
        self._failing = False
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._out: BinaryIO = _open(target)
        self._thread = threading.Thread(target=self._write_forever, name="access-log", daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self._render()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER, self.flush)

    def _render(self) -> None:
        """Encode all waiting Records, or drop them where the queue is full."""
        records, self._waiting = self._waiting, []
        if self.behind + len(self._lines) + len(records) > QUEUE:
            self._dropped += len(records)
        else:
            self._lines += map(_line, records)

    def flush(self) -> None:
        """Hand all waiting lines to the writer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._render()
        if self._lines:
            lines, self._lines = self._lines, []
            self._given += len(lines)
            self._queue.put(lines)

    @property
    def behind(self) -> int:
        """Lines handed to the writer and not yet written."""
        return self._given - self._written - self._unwritten

    @property
    def lost(self) -> int:
        """Lines, since the start."""
        return self._dropped + self._unwritten

    def close(self) -> None:
        """Write queued lines and stop; a stuck writer is abandoned after CLOSING."""
        self.flush()
        self._queue.put(None)
        self._thread.join(CLOSING)

    def _write_forever(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                self._write(lines)
            except OSError as error:
                self._unwritten += len(lines)
                self._fails(error)
            else:
                self._written += len(lines)
                self._failing = False

    def _write(self, lines: list[bytes]) -> None:
        lost = self.lost
        if lost > self._said:
            lines = [*lines, encode({"access_log_lines_lost": lost - self._said}) + b"\n"]
        with self._locked():
            self._out.write(b"".join(lines))
            self._out.flush()
        self._said = lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _fails(self, error: OSError) -> None:
        """Log each change of state once."""
        if not self._failing:
            log.error("access log write failed: %s", error)
        self._failing = True


def _line(record: Record) -> bytes:
    shown = record.as_json()
    try:
        line = encode(shown)
    except UnicodeEncodeError:  # a lone surrogate, in an error of a backend's
        return _escaped(shown)
    return line + b"\n" if line.isascii() else _escaped(shown)


def _escaped(shown: dict[str, Any]) -> bytes:
    """U+2028 ends a line to some readers, U+009B begins a terminal's command."""
    return json.dumps(shown).encode() + b"\n"


def _open(target: str) -> BinaryIO:
    if target == "stdout":
        return sys.stdout.buffer
    if target == "stderr":
        return sys.stderr.buffer
    return Path(target).open("ab")
