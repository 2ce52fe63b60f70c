"""The caller's socket: begin, write, pause, stall, end. Nothing is awaited per chunk.

The head is held until the first token, and both go out in one write. From then on every write is a chunk to the caller;
a read of exactly one chunk keeps its framing. A caller that reads nothing for STALL seconds is disconnected.
"""

from __future__ import annotations

import asyncio

from gateway.downstream.http_request import HttpRequest

STALL = 60.0  # s with a full buffer unread by the client


class Relay:
    """An answer on the way to a caller."""

    def __init__(self, http: HttpRequest) -> None:
        self.http = http
        self.begun = False
        self.stalled = ""  # the reason for which the caller was disconnected
        self.chunked = http.http11
        self._loop = asyncio.get_running_loop()
        self._writer = http.writer
        self._transport = http.writer.transport
        self._pending = http.writer.pending
        self._stall_timer: asyncio.TimerHandle | None = None

    @property
    def is_paused(self) -> bool:
        """The caller does not read."""
        return self._writer.paused

    def begin(self, head: bytes, first: bytes, length: int | None) -> None:
        """Write the head and the first bytes, in one write. `length`: of the body, where it is known."""
        http, self.begun = self.http, True
        self.chunked = http.http11 and length is None
        committed, http.comments = http.comments is not None and http.comments.stop(), None
        http.begun = True
        if not self._transport.is_closing():
            self._writer.write((b"" if committed else head) + self._frame(first))

    def write(self, data: bytes, framed: bytes = b"") -> None:
        """Write at once, unless the caller is gone. `framed`: the data with chunk framing; empty: without."""
        if self._transport.is_closing():
            return
        if self._pending:  # of any socket; pending bytes of this socket go first
            self._writer.flush()
        if framed and self.chunked:
            self._transport.write(framed)
        elif data:
            self._transport.write(self._frame(data))

    def end(self, last: bytes = b"") -> None:
        data = self._frame(last) + (b"0\r\n\r\n" if self.chunked else b"")
        if data and not self._transport.is_closing():
            self._writer.write(data)

    def abort(self) -> None:
        """End a body that is incomplete: JSON leaves no other sign."""
        self._writer.flush()
        self._transport.abort()

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self.chunked else data

    # -- a caller that does not read ------------------------------------------------------

    def pause(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self._loop.call_later(STALL, self._disconnect)

    def resume(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _disconnect(self) -> None:
        """The loss of the connection cancels the handler, which ends the upstream in turn."""
        self.stalled = f"the client read nothing for {STALL:g} s"
        self._transport.abort()

    def release(self) -> None:
        """Detach from the connection, which may serve another request next."""
        self._writer.flow_control = None
        if self._stall_timer is not None:
            self.resume()
