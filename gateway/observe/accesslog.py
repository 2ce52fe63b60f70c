"""One JSON line per request, written by a thread of its own: a slow disk never holds up a token.

A line is a line to every reader: control characters are escaped by JSON itself, and everything
beyond ASCII where there is any. No prompt or answer is in a Record. When the writer falls behind
by QUEUE lines, or its disk takes none, lines are lost; how many is said in the log as soon as it
can be written again.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from gateway.observe.record import Record
from gateway.strictjson import encode

log = logging.getLogger("firsttoken")

QUEUE = 10_000  # lines
CLOSING = 5.0  # s that the writer gets to write what is queued


class AccessLog:
    """A sink of Records. `target`: stdout, stderr or a file's path, which is appended to."""

    def __init__(self, target: str) -> None:
        self._dropped = 0  # counted where Records come from, the others by the writer
        self._unwritten = self._said = 0
        self._failing = False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE)
        self._out: BinaryIO = _open(target)
        self._thread = threading.Thread(target=self._write_forever, name="access-log", daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    @property
    def lost(self) -> int:
        """Lines, since the start."""
        return self._dropped + self._unwritten

    def close(self) -> None:
        """Write what is queued and stop; a writer that is stuck is left behind."""
        try:
            self._queue.put(None, timeout=CLOSING)
        except queue.Full:
            return
        self._thread.join(CLOSING)

    def _write_forever(self) -> None:
        more = True
        while more:
            records, more = self._take()
            try:
                self._write(records)
            except Exception as error:
                self._unwritten += len(records)
                self._fails(error)
            else:
                self._failing = False

    def _take(self) -> tuple[list[Record], bool]:
        """All that is queued, and whether more may come."""
        records: list[Record] = []
        while (record := self._queue.get()) is not None:
            records.append(record)
            if self._queue.empty():
                return records, True
        return records, False

    def _write(self, records: list[Record]) -> None:
        lines, lost = [_line(record) for record in records], self.lost
        if lost > self._said:
            lines.append(encode({"access_log_lines_lost": lost - self._said}) + b"\n")
        self._out.write(b"".join(lines))
        self._out.flush()
        self._said = lost

    def _fails(self, error: Exception) -> None:
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
