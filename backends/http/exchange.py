"""One request and its reply, for whoever asks: what is sent, who hears, and the handle between them.

Rules:
- A sink hears `on_head`, `on_body` ..., then exactly one of `on_end` and `on_failure`; nothing after that,
  and nothing after `cancel`.
- An exchange is carried by one connection at a time, or by a task that has one made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from backends.interface import Failure

if TYPE_CHECKING:
    from backends.http.connection import Connection

_JOIN_LIMIT = 64 * 1024  # bytes up to which copying a body behind its head is cheaper than a second buffer


class Sink(Protocol):
    """Where a reply goes. Header names are lower case; interim (1xx) replies are not told."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def on_body(self, data: bytes) -> None:
        """Body bytes without their framing: one call per read of the socket."""
        ...

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        """The same, of a read that was one chunk: `framed` is the read, with the chunk's size and line ends."""
        ...

    def on_end(self) -> None: ...

    def on_failure(self, failure: Failure) -> None: ...


class Request:
    """A rendered request, ready to be written, perhaps twice."""

    __slots__ = ("bodyless", "data")

    def __init__(self, head: bytes, body: bytes, bodyless: bool) -> None:
        self.data = (head + body,) if len(body) <= _JOIN_LIMIT else (head, body)
        self.bodyless = bodyless  # a reply to HEAD has no body, whatever its headers say


class Exchange:
    """One request and its reply: the handle by which who asked steers it."""

    __slots__ = ("bytes_in", "carrier", "connect_seconds", "request", "reused", "sent_at", "sink")

    def __init__(self, request: Request, sink: Sink, reused: bool, connect_seconds: float = 0.0) -> None:
        self.sink = sink
        self.reused = reused  # on a connection that had carried others
        self.connect_seconds = connect_seconds
        self.sent_at = 0.0  # time.monotonic() after the request was written
        self.bytes_in = 0  # head and framing included
        self.request: Request | None = request  # kept until it can no longer be needed again
        self.carrier: Connection | asyncio.Task[None] | None = None  # a task: connecting once more

    def pause(self) -> None:
        """Stop reading: the server stops sending when the kernel's buffers are full."""
        carrier = self.carrier
        if carrier is not None and not isinstance(carrier, asyncio.Task):
            carrier.pause()

    def resume(self) -> None:
        carrier = self.carrier
        if carrier is not None and not isinstance(carrier, asyncio.Task):
            carrier.resume()

    def cancel(self) -> None:
        """Close the connection at once, so that the server sees it; after the end, nothing."""
        carrier, self.carrier = self.carrier, None
        if isinstance(carrier, asyncio.Task):
            carrier.cancel()
        elif carrier is not None:
            carrier.abandon()
