"""One JSON line per request, written by a thread of its own: a slow disk never holds up a token.

A line is a line to every reader: control characters are escaped by JSON itself, and everything
beyond ASCII where there is any. No prompt or answer is in a Record. Lines are made on the loop, a
few at a time (in the thread they would hold the interpreter for as long as they take), and go to
the thread every LINGER. When it falls behind by QUEUE lines, or its disk takes none, lines are
lost; how many is said in the log as soon as it can be written again.
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

from gateway.api.strict_json import encode
from gateway.observe.record import Record

log = logging.getLogger("firsttoken")

QUEUE = 10_000  # lines
BATCH = 16  # lines that are made at once: 0.1 ms
LINGER = 0.05  # s that a line may wait for others
CLOSING = 5.0  # s that the writer gets to write what is queued


class AccessLog:
    """A sink of Records, on one loop. `target`: stdout, stderr or a file's path, which is appended to.

    `lock`: a file to lock while writing, where several processes write to one log: a pipe takes more than 4 KiB
    (PIPE_BUF) in parts. The lock is the kernel's, so it ends with its process.
    """

    def __init__(self, target: str, lock: Path | None = None) -> None:
        self._lock: BinaryIO | None = None if lock is None else lock.open("ab")
        self._waiting: list[Record] = []
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._given = self._dropped = 0  # lines; counted where Records come from, the others by the writer
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
        """Lines of all Records that wait; those that the queue would not hold are not made."""
        records, self._waiting = self._waiting, []
        if self.behind + len(self._lines) + len(records) > QUEUE:
            self._dropped += len(records)
        else:
            self._lines += map(_line, records)

    def flush(self) -> None:
        """All that waits, to the writer."""
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
        """Lines that the writer was given and has yet to write."""
        return self._given - self._written - self._unwritten

    @property
    def lost(self) -> int:
        """Lines, since the start."""
        return self._dropped + self._unwritten

    def close(self) -> None:
        """Write what is queued and stop; a writer that is stuck is left behind."""
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
        """One line per change of state."""
        if not self._failing:
            log.error("the access log cannot be written: %s", error)
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
