"""The access log, one line per request, and the format of the gateway's own log lines on stderr.

Access log:
- A line is JSON; on a terminal it is a short line for people (`gateway.observe.terminal_log`).
- A separate thread writes, so a slow disk never delays a token. The loop encodes lines a few at a time (a thread would
  hold the interpreter meanwhile) and hands the lines to the writer every LINGER. With more than QUEUE lines behind, or
  a full disk, lines are lost; the next successful write logs the number.
- On SIGHUP a file is opened again by its name, as `logrotate` expects after a rename. Lines before the signal are in
  the renamed file, later ones in the new file. A file that cannot be opened changes nothing.
- A line is a single line for every reader: JSON escapes control characters, and non-ASCII text is escaped too. Records
  hold no prompt and no answer.

Stderr: events of the gateway, never data of requests. The message of an exception may quote a header, a prompt or a
key. So only the types and frames of an exception are logged, and the message only under FIRSTTOKEN_DEBUG=1. Frames are
lines of source, without values.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, BinaryIO

from gateway.observe.record import Record
from gateway.observe.terminal_log import terminal_line
from gateway.strict_json import encode

log = logging.getLogger("firsttoken")

QUEUE = 10_000  # lines
BATCH = 16  # lines encoded in one batch: 0.1 ms
STANDARD = ("stdout", "stderr")  # targets that are no files
LINGER = 0.05  # s until queued lines are handed to the writer
CLOSING = 5.0  # s for the writer to write queued lines at shutdown


class Command(Enum):
    """Given to the writer in the order of lines."""

    REOPEN, STOP = "reopen", "stop"


class AccessLog:
    """Sink of Records on one loop. `target`: stdout, stderr, or the path of a file to append to.

    `lock`: file to lock during writes, for several processes with one log: a pipe splits writes above 4 KiB
    (PIPE_BUF). The kernel releases the lock with the process.
    """

    def __init__(self, target: str, lock: Path | None = None) -> None:
        self._lock: BinaryIO | None = None if lock is None else lock.open("ab")
        self._waiting: list[Record] = []
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._given = self._dropped = 0  # lines; counted on the loop, the counts below by the writer
        self._written = self._unwritten = self._said = 0
        self._failing = False
        self._queue: SimpleQueue[list[bytes] | Command] = SimpleQueue()
        self._target = target
        self._out: BinaryIO = _open(target)
        self._line = terminal_line if self._out.isatty() else _json_line
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
            self._lines += map(self._line, records)

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

    def reopen(self) -> None:
        """Open the file of this name for all lines from now on."""
        self.flush()
        self._queue.put(Command.REOPEN)

    def close(self) -> None:
        """Write queued lines and stop; a stuck writer is abandoned after CLOSING."""
        self.flush()
        self._queue.put(Command.STOP)
        self._thread.join(CLOSING)

    def _write_forever(self) -> None:
        while (lines := self._queue.get()) is not Command.STOP:
            if lines is Command.REOPEN:
                self._reopen()
                continue
            try:
                self._write(lines)
            except OSError as error:
                self._unwritten += len(lines)
                self._fails(error)
            else:
                self._written += len(lines)
                self._failing = False

    def _reopen(self) -> None:
        before = self._out
        if self._target in STANDARD:
            return
        try:
            self._out = _open(self._target)
        except OSError as error:
            log.error("access log could not be opened again, and goes on in the file before: %s", error)
        else:
            with suppress(OSError):  # a full disk: the unwritten lines have been counted
                before.close()

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


def _json_line(record: Record) -> bytes:
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


FORMAT = "%(asctime)s %(levelname)s %(message)s"
DEBUG = os.environ.get("FIRSTTOKEN_DEBUG") == "1"

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Formatter(logging.Formatter):
    """Of every line on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """Ignore an exception text cached in the record by another handler."""
        others, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = others

    def formatException(self, ei: _Raised) -> str:
        return super().formatException(ei) if DEBUG or ei[1] is None else described(ei[1])


def described(error: BaseException, seen: frozenset[int] = frozenset()) -> str:
    """Type and frames of an exception, below the causes."""
    seen |= {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = [] if cause is None or id(cause) in seen else [described(cause, seen), "which led to:"]
    parts += ["".join(traceback.format_tb(error.__traceback__)).rstrip(), type(error).__qualname__]
    if isinstance(error, BaseExceptionGroup):
        parts += [f"in it: {described(each, seen)}" for each in error.exceptions]
    return "\n".join(filter(None, parts))


def to_stderr(prefix: str = "") -> None:
    """Log to stderr from now on. `prefix`: tells processes apart."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    form = Formatter(FORMAT.replace("%(message)s", f"{prefix}%(message)s"))
    for handler in logging.getLogger().handlers:
        handler.setFormatter(form)


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of an event loop: asyncio's own shows the task, and with the task the exception's message."""
    error = context.get("exception")
    log.error("%s", context.get("message", "an exception was never retrieved"), exc_info=error)
