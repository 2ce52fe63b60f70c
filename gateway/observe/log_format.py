"""Format of the gateway's log lines on stderr: events of the gateway, never data of requests.

The message of an exception may quote a header, a prompt or a key. So only the types and frames of an exception are
logged, and its message only under FIRSTTOKEN_DEBUG=1. Frames are lines of source, without values.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Any

log = logging.getLogger("firsttoken")

FORMAT = "%(asctime)s %(levelname)s %(message)s"
DEBUG = os.environ.get("FIRSTTOKEN_DEBUG") == "1"

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Formatter(logging.Formatter):
    """Of every line on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """Ignore the exception text that another handler may have cached in the record."""
        others, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = others

    def formatException(self, ei: _Raised) -> str:
        return super().formatException(ei) if DEBUG or ei[1] is None else described(ei[1])


def described(error: BaseException, seen: frozenset[int] = frozenset()) -> str:
    """Type and frames of an exception, below those of its causes."""
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
