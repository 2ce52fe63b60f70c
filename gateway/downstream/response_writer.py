"""Writing to the connection of a caller, without waiting; what waits to be read is reported to the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from backends.http.connection import WriteCoalescer


class WriteFlowControl(Protocol):
    """An answer in progress, with callbacks of its connection."""

    def on_write_paused(self) -> None: ...

    def on_write_resumed(self) -> None: ...

    def on_shutdown(self) -> None:
        """The server stops: end the answer now."""


class ResponseWriter:
    """Writes to one connection without waiting; a full socket buffer is reported to `flow_control`."""

    def __init__(self, transport: asyncio.Transport, coalescer: WriteCoalescer) -> None:
        self.transport = transport
        self.flow_control: WriteFlowControl | None = None
        self.paused = False
        self.pending = coalescer.pending  # bytes of all sockets that wait for the end of this turn
        self.write = partial(coalescer.write, transport)  # now, or with other sockets' data in this turn of the loop
        self.write_through = partial(coalescer.write_through, transport)  # now, after all earlier data
        self.flush = partial(coalescer.flush_to, transport)

    def unsent(self) -> int:
        """Bytes that wait for the caller to read."""
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:  # of a TLS connection that was closed twice, in asyncio of Python 3.11
            return 0

    async def drain(self, timeout: float) -> None:
        """Wait until the caller has read what is written, but for a socket's buffer. Aborts after `timeout` s."""
        self.flush()
        if not self.paused:
            return
        before = self.flow_control
        self.flow_control = drained = Drained(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout):
                await drained.future
        except TimeoutError:
            self.transport.abort()
        finally:
            self.flow_control = before

    def end(self) -> None:
        """Tell the caller that nothing follows. TLS knows no half-closed connection: there the close tells it."""
        self.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def on_write_paused(self) -> None:
        self.paused = True
        if self.flow_control is not None:
            self.flow_control.on_write_paused()

    def on_write_resumed(self) -> None:
        self.paused = False
        if self.flow_control is not None:
            self.flow_control.on_write_resumed()


@dataclass(slots=True, eq=False)
class Drained:
    """Flow control of a complete answer, in the buffer of its connection."""

    future: asyncio.Future[None]

    def on_write_paused(self) -> None: ...

    def on_write_resumed(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    on_shutdown = on_write_paused  # a shutdown leaves time to send written bytes
