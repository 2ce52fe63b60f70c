"""The access log, one line per request, and the format of the gateway's own log lines on stderr.

Access log:
- A line is JSON; on a terminal it is a short line for people (`terminal_line`).
- A thread writes (`gateway.observe.record_writer`), so a slow disk never delays a token. With more than QUEUE lines
  behind, or a full disk, lines are lost; the next successful write logs the number.
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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gateway.observe.record import STREAM, Record, RequestOutcome
from gateway.observe.record_columns import RECORD
from gateway.observe.record_writer import RecordWriter
from gateway.strict_json import encode

log = logging.getLogger("firsttoken")

QUEUE = 10_000  # lines
STANDARD = ("stdout", "stderr")  # targets that are no files
LINGER = 0.05  # s until queued lines are handed to the writer


class AccessLog(RecordWriter[bytes]):
    """Sink of Records on one loop. `target`: stdout, stderr, or the path of a file to append to.

    `lock`: file to lock during writes, for several processes with one log: a pipe splits writes above 4 KiB
    (PIPE_BUF). The kernel releases the lock with the process.
    """

    def __init__(self, target: str, lock: Path | None = None) -> None:
        self._lock: BinaryIO | None = None if lock is None else lock.open("ab")
        self._told = 0  # lost lines, by the log itself
        self._target = target
        self._out: BinaryIO = _open(target)
        self._line = terminal_line if self._out.isatty() else _json_line
        super().__init__("access-log", LINGER, QUEUE)

    def encode(self, record: Record) -> bytes:
        return self._line(record)

    def reopen(self) -> None:
        """Open the file of this name for all lines from now on."""
        self.after_all(self._reopen)

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

    def write(self, items: list[bytes]) -> None:
        lost = self.lost
        if lost > self._told:
            items = [*items, encode({"access_log_lines_lost": lost - self._told}) + b"\n"]
        with self._locked():
            self._out.write(b"".join(items))
            self._out.flush()
        self._told = lost

    def on_failure(self, error: Exception) -> None:
        log.error("access log write failed: %s", error if isinstance(error, OSError) else type(error).__name__)

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


def _json_line(record: Record) -> bytes:
    shown = RECORD.view(record)
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


# -- a Record at a terminal ------------------------------------------------------------------------
#
# A Record as one short line for people at a terminal.
#
# The time is ISO 8601, of the arrival, in the time zone of the machine. Names and errors come from callers and servers:
# all but printable ASCII is escaped, so that no terminal obeys them.


def terminal_line(record: Record) -> bytes:
    """`2026-11-23T18:40:12.345+01:00 200 chat small/a first token 182 ms of 800 ms, 87 tokens in 1.20 s, req_1`."""
    at = datetime.fromtimestamp(record.wall).astimezone().isoformat(timespec="milliseconds")
    head = f"{at} {record.status} {record.route.name} {record.endpoint.id}"
    parts = [*_first_token(record), _rest(record), *_troubles(record), record.request_id]
    return f"{head} {', '.join(parts)}".encode("unicode_escape") + b"\n"


def _first_token(record: Record) -> list[str]:
    if record.promised is None or not record.asked.stream:
        return []
    budget = f" of {_time(record.budgets.ttft)}" if record.budgets.ttft is not None else ""
    stages = [(spent, stage.name.lower()) for stage, spent in record.stages.items() if stage is not STREAM]
    spent, longest = max(stages, default=(0.0, ""))
    late = f", late by {longest} {_time(spent)}" if record.ttft_met is False else ""
    return [f"first token {_time(record.promised)}{budget}{late}"]


def _rest(record: Record) -> str:
    tokens = "" if record.answer.output_tokens is None else f"{record.answer.output_tokens} tokens in "
    return f"{tokens}{_time(record.total)}"


def _troubles(record: Record) -> list[str]:
    """End of a request that was not completed, and the failures on the way."""
    ended = [] if record.end is RequestOutcome.COMPLETED else [f"{record.end.value}: {record.error}".rstrip(": ")]
    return ended + [f"attempt {one.number} at {one.endpoint}: {one.cause}" for one in record.attempts if one.cause]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
