"""One HTTP/1.1 connection to a backend.

Rules:
- Nothing is awaited, queued or scheduled per chunk: bytes go from `data_received` to the sink in one call.
- A connection carries one exchange at a time. It goes back to its pool only if the reply was complete, the
  server means to keep it, nothing came after the reply, and the request was read to its end.
- A read that is one whole chunk, behind another whole chunk, tells the parser nothing: it is passed on as it is framed.
  All tokens but the first of a stream come so, and a relay can write them without framing them anew.
- What makes a reply complete is said by RFC 9112, 6.3; the C parser does all of it but replies that end
  with the connection, and replies without a body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from time import monotonic
from typing import Protocol, cast

from httptools import HttpParserError, HttpResponseParser

from backends import failures
from backends.http.exchange import Exchange
from backends.http.headers import readable
from backends.http.write_coalescer import WriteCoalescer

SIZES = 65536  # of chunks, that are remembered as they are written: reading one costs 1 us
HEX = re.compile(rb"[0-9a-fA-F]{1,4}")
HEAD_LIMIT = 64 * 1024  # bytes of headers, of trailers, of anything that is not body

_sizes: dict[bytes, int] = {}


class ConnectionOwner(Protocol):
    """What a connection tells its owner."""

    outbox: WriteCoalescer

    def made(self) -> None: ...

    def release(self, connection: Connection) -> None:
        """It can carry another exchange."""
        ...

    def lost(self, connection: Connection) -> None: ...

    def resend(self, exchange: Exchange) -> bool:
        """An exchange's connection died before any reply. False: it is not to be sent again."""
        ...


def _size_of(line: bytes) -> int:
    """Bytes of the chunk that is announced so; -1 for what the parser had better see: extensions, the last chunk."""
    size = int(line, 16) if HEX.fullmatch(line) else 0
    return _sizes.setdefault(line, size or -1) if len(_sizes) < SIZES else size or -1


class _Nonsense(Exception):
    """Raised inside the parser's callbacks: stop, this is no reply of ours."""


class Connection(asyncio.Protocol):
    """The only upstream socket. Names beginning with `on_` are the parser's callbacks."""

    __slots__ = (
        "_between",
        "_complete",
        "_exchange",
        "_feed",
        "_headers",
        "_malformed",
        "_news",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_quiet",
        "_raw",
        "_reusable",
        "_status",
        "_told",
        "_transport",
        "born",
        "on_body",
        "on_header",
    )

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self.born = monotonic()
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self._pieces: list[bytes] = []
        self._raw: dict[bytes, bytes] = {}
        self.on_body, self.on_header = self._pieces.append, self._raw.__setitem__  # called by C, with no frame of ours
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._expect()

    def _expect(self) -> None:
        """A reply may begin."""
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._raw.clear()
        self._quiet = 0
        self._between = False  # the parser has read a chunk to its end, and nothing behind it
        self._news = self._told = self._complete = self._reusable = self._malformed = False

    # ----------------------------------------------------------------------- what the exchange asks

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange) -> None:
        """Write the request and wait for its reply."""
        transport, request = self._transport, exchange.request
        assert transport is not None
        assert request is not None
        self._exchange = exchange
        exchange.carrier = self
        self._expect()
        outbox = self._pool.outbox
        if len(request.data) == 1:
            outbox.write(transport, request.data[0])
        else:
            outbox.flush_to(transport)
            transport.writelines(request.data)
        exchange.sent_at = monotonic()

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
        """Close at once; whoever waits hears nothing more."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # ----------------------------------------------------------------------- what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.made()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abandon()  # unasked: most often a proxy's 408 before it closes an idle connection
            return
        size = len(data)
        exchange.bytes_in += size
        if self._between:
            start = data.find(b"\r\n", 1, 5) + 2
            line = data[: start - 2]
            if (_sizes.get(line) or _size_of(line)) == size - start - 2 and data.endswith(b"\r\n"):
                exchange.sink.on_chunk(data[start:-2], data)
                return
        self._parse(exchange, data)

    def _parse(self, exchange: Exchange, data: bytes) -> None:
        self._between = False
        try:
            self._feed(data)
        except HttpParserError:
            self._malformed = self._news = True
        self._between = self._between and data.endswith(b"\r\n")  # else it has read some of the next one's size
        pieces = self._pieces
        if self._news:
            self._advance(exchange)
        elif pieces:
            self._quiet = 0
            body = b"".join(pieces)  # of one piece: that piece, not a copy
            pieces.clear()
            exchange.sink.on_body(body)
        else:
            self._hear_nothing(exchange, len(data))

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return  # it was never made, or was given up by whoever had it made
        exchange, self._exchange = self._exchange, None
        self._transport = None
        del self._feed, self._parser, self.on_body, self.on_header  # the parser and we hold each other
        self._pool.lost(self)
        if exchange is None:
            return
        exchange.carrier = None
        if self._status and self._ends_with_connection() and error is None:
            exchange.sink.on_end()
        elif exchange.bytes_in or not self._pool.resend(exchange):
            exchange.sink.on_failure(failures.of_loss(answered=exchange.bytes_in > 0))

    # ----------------------------------------------------------------------- what the parser tells

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Nonsense  # a second reply to one request

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100 or status == 101:
            raise _Nonsense  # we never ask for an upgrade
        if status >= 200:
            self._headers = readable(self._raw)
            self._status = status
            self._news = True
        self._raw.clear()

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._between = False
        if self._status:
            self._complete = self._news = True
            self._reusable = self._parser.should_keep_alive()

    # ----------------------------------------------------------------------- what follows

    def _advance(self, exchange: Exchange) -> None:
        """Tell what a read brought beside body: the head, the end, or that it made no sense."""
        self._news = False
        if self._status and not self._told:
            self._told = True
            self._complete = self._complete or self._has_no_body(exchange)
            exchange.request = None
            exchange.sink.on_head(self._status, self._headers)
        body = b"".join(self._pieces)
        self._pieces.clear()
        if body and self._exchange is exchange:
            exchange.sink.on_body(body)
        if self._exchange is not exchange:
            return  # the sink cancelled
        if self._complete:
            self._finish(exchange)
        elif self._malformed:
            self._fail(exchange)

    def _has_no_body(self, exchange: Exchange) -> bool:
        request = exchange.request
        return self._status in (204, 304) or (request is not None and request.bodyless)

    def _ends_with_connection(self) -> bool:
        if "content-length" in self._headers:
            return False
        return self._headers.get("transfer-encoding", "").rpartition(",")[2].strip().lower() != "chunked"

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = exchange.carrier = None
        self.resume()
        transport = self._transport
        read = transport is not None and transport.get_write_buffer_size() == 0  # else an early refusal
        if self._reusable and read and not self._malformed and self.usable:
            self._pool.release(self)
        else:
            self.abandon()
        exchange.sink.on_end()

    def _fail(self, exchange: Exchange) -> None:
        exchange.carrier = None
        self.abandon()
        exchange.sink.on_failure(failures.MALFORMED)

    def _hear_nothing(self, exchange: Exchange, size: int) -> None:
        """Bytes that are neither body nor end: a head, trailers, framing. There is only so much to say there."""
        self._quiet += size
        if self._quiet > HEAD_LIMIT:
            self._fail(exchange)
