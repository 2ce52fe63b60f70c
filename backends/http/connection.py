"""An HTTP/1.1 connection to a backend, and the exchange on the wire.

Rules:
- Bytes go from `data_received` to the sink in a single call: nothing is awaited, queued or scheduled per chunk.
- A connection carries a single exchange at a time. The pool gets the connection back only after a complete reply and
  a completely written request, if the server keeps the connection alive and nothing followed the reply.
- A read of exactly one chunk is passed on with the framing, so a relay can write the read unchanged. Every token of a
  stream but the first arrives in this way.
- RFC 9112, 6.3 defines the end of a reply. The C parser applies the rule, except to replies without a body and to
  replies ended by the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from socket import socket
from time import monotonic
from typing import Protocol, cast

from httptools import HttpParserError, HttpResponseParser

from backends import failures
from backends.interface import Failure

BURST_GAP = 0.0002  # s; about the work for a request, so a loop without a pause coalesces


class WriteCoalescer:
    """Pending writes of the sockets of an event loop, coalesced under load.

    A write wakes the process at the other end; on the same host the wake-up is most of the cost of a write (15 of 20
    us on a virtual machine), and a process already awake need not be woken. Rules:
    - A write after a pause is made at once: a lone request never waits.
    - Other writes wait for the end of the event loop's turn and are then made in a row.
    - Writes to a socket keep their order and are joined.
    - A token in mid-stream does not wait: the reader is seldom asleep, and waiting costs 3 us. Its write goes to
      the transport itself, after a flush while anything is `pending`; `write_through` does both.
    """

    def __init__(self) -> None:
        self.pending: dict[asyncio.WriteTransport, list[bytes]] = {}
        self._last_write = -inf

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write now, or at the end of this turn of the loop."""
        now = monotonic()
        pending = self.pending.get(transport)
        if pending is not None:
            pending.append(data)
        elif now - self._last_write > BURST_GAP:
            if not transport.is_closing():  # uvloop raises for a socket that its peer has just reset
                transport.write(data)
        else:
            if not self.pending:
                asyncio.get_running_loop().call_soon(self.flush)
            self.pending[transport] = [data]
        self._last_write = now

    def write_through(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write now, after all pending bytes of this socket."""
        if self.pending:
            self.flush_to(transport)
        transport.write(data)

    def flush(self) -> None:
        """Write all pending bytes."""
        for transport in list(self.pending):
            self.flush_to(transport)

    def flush_to(self, transport: asyncio.WriteTransport) -> None:
        """Write the pending bytes of a socket; required before any other operation on the socket."""
        pending = self.pending.pop(transport, None)
        if pending is not None and not transport.is_closing():
            transport.write(b"".join(pending))


DRAIN_TIME, DRAIN_LIMIT = 1.0, 64 * 1024  # s and bytes for the end of a reply after the last event of its stream
HEAD_LIMIT = 64 * 1024  # bytes of headers, of trailers, of anything but body


class Sink(Protocol):
    """Receiver of a reply: `on_head`, any number of `on_body`, then exactly one of `on_end` and `on_failure`; nothing
    after the end and nothing after `Exchange.cancel`."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Header names are lower case. Interim (1xx) replies are not reported."""

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        """Body bytes of a read of the socket. `framed`: the same read with chunk size and line ends, if the read was
        exactly one chunk; else empty."""

    def on_end(self) -> None: ...

    def on_failure(self, failure: Failure) -> None: ...


@dataclass(slots=True, eq=False)
class Exchange:
    """Handle of a request and its reply. The carrier is a connection, or the task to make a new connection."""

    request: bytes  # head and body, kept until the reply's head: until then the request may be sent again
    sink: Sink
    bodyless: bool = False  # a reply to HEAD has no body, whatever the headers say
    reused: bool = False  # sent on a connection with earlier exchanges
    connect_seconds: float = 0.0
    sent_at: float = 0.0  # time.monotonic() after the request was written
    bytes_in: int = 0  # head and framing included
    carrier: Connection | asyncio.Task[None] | None = None

    def pause(self) -> None:
        """Stop reading: the server stops sending when the kernel's buffers are full."""
        if isinstance(self.carrier, Connection):
            self.carrier.pause()

    def resume(self) -> None:
        """Read again."""
        if isinstance(self.carrier, Connection):
            self.carrier.resume()

    def rest(self, seconds: float) -> None:
        """Read again later: what comes meanwhile is one read."""
        if isinstance(self.carrier, Connection):
            self.carrier.pause()
            asyncio.get_running_loop().call_later(seconds, self.resume)

    def cancel(self) -> None:
        """Close the connection at once, so the server notices; no effect after the end."""
        carrier, self.carrier = self.carrier, None
        if isinstance(carrier, Connection):
            carrier.abandon()
        elif carrier is not None:
            carrier.cancel()

    def drain(self) -> None:
        """Leave a reply of which only the end is missing: the connection is kept if it comes soon. The sink hears
        nothing more."""
        if isinstance(self.carrier, Connection):
            self.sink = _Drain(self)
            self.carrier.resume()


class _Drain:
    """Sink for the rest of a reply: reads and drops the bytes."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._most = exchange.bytes_in + DRAIN_LIMIT
        self._timer = asyncio.get_running_loop().call_later(DRAIN_TIME, exchange.cancel)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        if self._exchange.bytes_in > self._most:
            self._timer.cancel()
            self._exchange.cancel()

    def on_end(self) -> None:
        self._timer.cancel()

    def on_failure(self, failure: Failure) -> None:
        self._timer.cancel()


class ConnectionOwner(Protocol):
    """Events of a connection, reported to the pool."""

    coalescer: WriteCoalescer

    def opened(self) -> None: ...

    def release(self, connection: Connection) -> None:
        """The connection can carry another exchange."""

    def lost(self, connection: Connection) -> None: ...

    def resend(self, exchange: Exchange) -> bool:
        """The connection died before any reply. False: the exchange must not be sent again."""


class _InvalidReply(Exception):
    """Stops the parser from within a callback."""


class Connection(asyncio.Protocol):
    """The only upstream socket. Methods beginning with `on_` are callbacks of the parser."""

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self.born = monotonic()
        self.accepted = False  # the server has taken the connection, and a TLS handshake is to follow
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self._fields: dict[bytes, bytes] = {}  # the last of repeated ones counts; none in use may be repeated
        self._body_parts: list[bytes] = []  # of one read
        # The parser has read a chunk to the end, and nothing after the chunk: not empty.
        self._ended_chunk: list[bool] = []
        # Of the parser, all in C: a read may hold many chunks.
        self.on_header, self.on_body = self._fields.__setitem__, self._body_parts.append
        self.on_chunk_header, self.on_chunk_complete = self._ended_chunk.clear, partial(self._ended_chunk.append, True)
        self._parser = HttpResponseParser(self)
        self._expect_reply()

    def _expect_reply(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._fields.clear()  # of a trailer
        self._head_delivered = False
        self._complete = False
        self._keep_alive = False
        self._malformed = False
        self._overhead = 0  # bytes since the last head or body bytes
        self._ended_chunk.clear()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def socket(self) -> socket:
        assert self._transport is not None
        found: socket = self._transport.get_extra_info("socket")
        return found

    def send(self, exchange: Exchange) -> bool:
        """Write the request of `exchange`. False: the connection is about to close."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._exchange = exchange
        exchange.carrier = self
        self._expect_reply()
        self._pool.coalescer.write(self._transport, exchange.request)
        exchange.sent_at = monotonic()
        return True

    def pause(self) -> None:
        if self._transport is not None and self.usable:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None and self.usable:
                self._transport.resume_reading()

    def abandon(self) -> None:
        """Close at once; the sink hears nothing more."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.opened()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abandon()  # unsolicited: most often a proxy's 408 before closing an idle connection
            return
        try:
            exchange.bytes_in += len(data)
            if self._ended_chunk and data.endswith(b"\r\n"):
                # One chunk, plainly written? Its size must be in hexadecimal, with no leading zero and no extension
                # (RFC 9112, 7.1). Comparing with the size that the read implies needs no parsing.
                line, _, rest = data.partition(b"\r\n")
                size = len(rest) - 2
                if size > 0 and line.lower() == b"%x" % size:
                    exchange.sink.on_body(rest[:size], data)
                    return
            self._parse(exchange, data)
        except Exception as bug:
            self._on_bug(exchange, bug)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return  # never connected, or given up by the pool while connecting
        exchange, self._exchange = self._exchange, None
        self._transport = None
        self._parser = HttpResponseParser(None)  # the earlier parser and the connection reference each other
        self._pool.lost(self)
        if exchange is None:
            return
        exchange.carrier = None
        try:
            if self._status and self._ends_with_connection() and error is None:
                exchange.sink.on_end()
            elif exchange.bytes_in or not self._pool.resend(exchange):
                exchange.sink.on_failure(failures.CUT_SHORT if exchange.bytes_in else failures.UNANSWERED)
        except Exception as bug:
            self._on_bug(exchange, bug)

    def on_message_begin(self) -> None:
        if self._complete:
            raise _InvalidReply  # a second reply to a request

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100 or status == 101:
            raise _InvalidReply  # no upgrade is ever requested
        if status >= 200:
            self._status, fields = status, self._fields.items()
            self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in fields}
        self._fields.clear()

    def on_message_complete(self) -> None:
        self._ended_chunk.clear()
        if self._status:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    def _parse(self, exchange: Exchange, data: bytes) -> None:
        """Parse a read and report the result: the head, body bytes, the end, or a malformed reply."""
        self._ended_chunk.clear()
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._malformed = True
        if not data.endswith(b"\r\n"):  # part of the next chunk's size may have been read
            self._ended_chunk.clear()
        body = b"".join(self._body_parts)
        self._body_parts.clear()
        self._overhead += len(data)
        if self._status and not self._head_delivered:
            self._deliver_head(exchange)
        if body and self._exchange is exchange:
            self._overhead = 0
            exchange.sink.on_body(body)
        if self._exchange is not exchange:
            return  # the sink has cancelled
        if self._complete:
            self._finish(exchange)
        elif self._malformed or self._overhead > HEAD_LIMIT:
            self._fail(exchange)

    def _deliver_head(self, exchange: Exchange) -> None:
        self._head_delivered = True
        self._overhead = 0
        if self._status in (204, 304) or exchange.bodyless:
            self._complete = True
        exchange.request = b""
        exchange.sink.on_head(self._status, self._headers)

    def _ends_with_connection(self) -> bool:
        if "content-length" in self._headers:
            return False
        return self._headers.get("transfer-encoding", "").rpartition(",")[2].strip().lower() != "chunked"

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = exchange.carrier = None
        if self._paused:
            self.resume()
        transport = self._transport
        if not self._keep_alive or self._malformed or transport is None or transport.is_closing():
            self.abandon()
        elif transport.get_write_buffer_size() == 0:
            self._pool.release(self)
        else:  # an early refusal: the request is not written to its end
            self.abandon()
        exchange.sink.on_end()

    def _fail(self, exchange: Exchange) -> None:
        exchange.carrier = None
        self.abandon()
        exchange.sink.on_failure(failures.MALFORMED)

    def _on_bug(self, exchange: Exchange, bug: Exception) -> None:
        """An error of the sink is reported like a failure: nobody else would end the request."""
        context = {"message": "the gateway could not read a backend's reply", "exception": bug, "protocol": self}
        asyncio.get_running_loop().call_exception_handler(context)
        exchange.carrier = None
        if self._exchange is None or self._exchange is exchange:  # carries no later exchange
            self.abandon()
        exchange.sink.on_failure(failures.NOT_READ)
