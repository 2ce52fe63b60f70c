"""One answer under way: the tokens of the engine become bytes on the caller's socket.

The engine's driver calls `begin`, `token` and `finish` from its own task, and writes go straight to
the transport, framed as HTTP/1.1 chunks (RFC 9112, section 7.1): no task is woken per token, so that
hundreds of streams cost little. A caller that does not read is buffered, up to the whole answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from backends.simulated.error_replies import error_event
from backends.simulated.faults import StreamFault
from backends.simulated.reply_writer import DONE, GARBAGE, ReplyWriter, Timing, usage


class AnswerWriter:
    """Counts tokens and keeps times (of the engine's clock); `done` is set when nothing more will come."""

    def __init__(self, prompt_tokens: int, submitted_at: float, fault: StreamFault | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.tokens = 0
        self.broken = False  # by a fault of ours, not by the caller
        self.done = asyncio.Event()
        self._submitted_at = self._first_at = self._last_at = submitted_at
        self._queue_time = 0.0
        self._fault = fault
        self._held: list[bytes] | None = None  # what came while stalled
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._writer: ReplyWriter | None = None

    def stream_to(self, transport: asyncio.Transport, writer: ReplyWriter) -> None:
        """Write the tokens as they come; an answer without this is only timed."""
        self._transport, self._writer = transport, writer

    @property
    def timing(self) -> Timing:
        return Timing(
            self._first_at - self._submitted_at, self._queue_time, self._last_at - self._first_at, self.tokens
        )

    @property
    def usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.tokens, self.cached_tokens)

    def begin(self, at: float, queue_time: float, cached_tokens: int) -> None:
        """The first token is about to come."""
        self._first_at, self._queue_time, self.cached_tokens = at, queue_time, cached_tokens

    def token(self, at: float) -> None:
        """One more token."""
        index = self.tokens
        self.tokens, self._last_at = index + 1, at
        fault = self._fault
        if fault is not None and index == fault.after:
            self._suffer(fault)
        if self._writer is not None:
            struck = fault is not None and fault.kind == "garbage" and index == fault.after
            self._write(GARBAGE if struck else self._writer.token(index))

    def finish(self) -> None:
        """That was the last token."""
        if self._writer is not None:
            self._write(self._writer.ending(self.usage, self.timing))
        self._ended = True
        if self._held is None:
            self.done.set()

    def _write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif data and self._transport is not None and not self.broken and not self._transport.is_closing():
            # uvloop raises where asyncio only warns, and the engine's one task would end of it
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _suffer(self, fault: StreamFault) -> None:
        if fault.kind == "stall":
            self._held = []
            if fault.seconds is not None:
                asyncio.get_running_loop().call_later(fault.seconds, self._resume)
        elif fault.kind == "error":
            self._write(error_event("the engine failed (simulated)") + DONE)
            self._break()
        elif fault.kind == "cut":
            if self._transport is not None:
                self._transport.abort()
            self._break()

    def _break(self) -> None:
        self.broken = True
        self.done.set()

    def _resume(self) -> None:
        held, self._held = self._held or [], None
        for data in held:
            self._write(data)
        if self._ended:
            self.done.set()
