"""One HTTP/1.1 connection of a caller: whole requests, one at a time.

Rules:
- A request is handed over once it is whole, as one value; a head that will be refused is not waited for.
- Nothing is decoded that could be read in two ways: llhttp is strict, and what it refuses is answered 400 in the
  OpenAI envelope and ends the connection.
- Everything of a caller is bounded: its head, its body, the time for either, the requests that it pipelines, and
  what is buffered of its answer (the handler is told when the socket fills and drains).
- A caller that leaves cancels its handler at once: that is how an engine hears of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Any, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from backends.http.headers import readable
from backends.http.write_coalescer import WriteCoalescer
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import HttpRequest, framing_error, rendered, too_large

log = logging.getLogger("firsttoken")

KEEP_ALIVE = 75.0  # s; above the idle timeout of the usual load balancers (60 s)
SEND_BUFFER = 64 * 1024  # bytes the kernel may hold for one reader (it doubles this); else up to 4 MB each
HIGH_WATER = 16 * 1024  # bytes buffered for one reader before its upstream is paused
HEADER_TIMEOUT = 15.0  # s that a request's head may take to arrive whole
BODY_TIMEOUT = 60.0  # s for the whole body to arrive
MAX_HEAD = 64 * 1024  # bytes of a request that are not body: head, chunk sizes, trailers
UNREAD = 60.0  # s that an answer may lie in the socket of a caller whose connection ends
LINGER = 2.0  # s that what a refused caller still sends is read and dropped, or it would lose the reply to a reset


class WriteFlowControl(Protocol):
    """Told when the client's socket buffer fills and drains."""

    def on_write_paused(self) -> None: ...

    def on_write_resumed(self) -> None: ...

    def gateway_stops(self) -> None: ...


class ConnectionHost(Protocol):
    """What connections share."""

    loop: asyncio.AbstractEventLoop
    connections: set[DownstreamConnection]
    handler: Callable[[HttpRequest], Awaitable[None]]
    screen: Callable[[HttpRequest], ApiError | None]
    outbox: WriteCoalescer
    max_body: Callable[[], int]


class DownstreamConnection(asyncio.Protocol):
    """One connection of a caller. Names beginning with `on_` are the parser's callbacks."""

    __slots__ = (
        "_arrival",
        "_ends_at",
        "_head_whole",
        "_idle_since",
        "_much",
        "_parser",
        "_pieces",
        "_queue",
        "_quiet",
        "_raw",
        "_reading",
        "_screened",
        "_server",
        "_shut",
        "_target",
        "_task",
        "full",
        "on_body",
        "on_header",
        "reader",
        "transport",
        "write",
        "write_on",
    )

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._raw: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._queue: deque[HttpRequest] = deque()  # pipelined behind the one in hand
        self._task: asyncio.Task[None] | None = None
        self._arrival: float | None = None  # of the request that is being read
        self._idle_since = monotonic()
        self._ends_at = 0.0  # when the connection is cut, come what may
        self._target = b""
        self._reading = self._head_whole = self._screened = False  # of the request that is being read
        self._quiet = 0  # bytes of it that were not body
        self._much = False  # the last read may have held a head that is too long
        self._shut = False  # nothing more is read
        self.transport: asyncio.Transport | None = None
        self.reader: WriteFlowControl | None = None
        self.full = False
        self._new_parser()

    # -- the socket ---------------------------------------------------------------------

    def flush(self) -> None:
        """What was written is the transport's now."""
        if self.transport is not None:
            self._server.outbox.flush_to(self.transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        outbox = self._server.outbox
        self.write = partial(outbox.write, self.transport)
        self.write_on = partial(outbox.write_on, self.transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER)
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        del self._parser, self.on_header, self.on_body  # the parser and we hold each other
        self._queue.clear()
        task, self._task = self._task, None  # it will hold the error that ends it, and that the frames that hold us
        if task is not None:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._shut:
            return
        if self._arrival is None and self._task is None:
            self._arrival = monotonic()
        held, self._much = len(self._pieces), len(data) > MAX_HEAD
        self._feed(data)
        if self._reading:
            self._quiet += 0 if len(self._pieces) > held else len(data)
            self._look_at_part()

    def pause_writing(self) -> None:
        self.full = True
        if self.reader is not None:
            self.reader.on_write_paused()

    def resume_writing(self) -> None:
        self.full = False
        if self.reader is not None:
            self.reader.on_write_resumed()

    # -- what the parser tells ------------------------------------------------------------

    def _new_parser(self) -> None:
        self.on_header, self.on_body = self._raw.__setitem__, self._pieces.append  # called by C, with no frame of ours
        self._parser: Any = HttpRequestParser(self)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as told:
            if self._parser.get_method() == b"CONNECT":  # of it a 200 would promise a tunnel
                self._give_up(ApiError(405, "This is no proxy of the kind that CONNECT asks for."))
            else:
                self._feed(self._without_upgrade() + data[told.args[0] :])
        except HttpParserError as error:
            self._give_up(_malformed(error))

    def _without_upgrade(self) -> bytes:
        """The head that asked for another protocol, as if it had not: servers may ignore that (RFC 9110, 7.8)."""
        method, kept = self._parser.get_method(), []
        for name, value in self._raw.items():
            if name.lower() not in (b"connection", b"upgrade", b"http2-settings"):
                kept.append(b"%b: %b\r\n" % (name, value))
        target, self._target = self._target, b""
        self._raw.clear()
        self._new_parser()
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(kept))

    def on_message_begin(self) -> None:
        self._reading, self._head_whole, self._screened, self._quiet = True, False, False, 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_headers_complete(self) -> None:
        self._head_whole = True

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._reading = False
        self._accept(self._request(body))

    def _request(self, body: bytes, fault: ApiError | None = None) -> HttpRequest:
        parser, arrival = self._parser, self._arrival
        headers = readable(self._raw)
        request = HttpRequest(
            self,
            parser.get_method().decode(),
            self._target.partition(b"?")[0].decode("latin-1"),
            headers,
            body,
            monotonic() if arrival is None else arrival,
            parser.get_http_version() != "1.0",
            parser.should_keep_alive(),
        )
        request.fault = fault or framing_error(headers, request.http11, len(body), self._server.max_body())
        if self._much and sum(map(len, (self._target, *self._raw, *self._raw.values()))) > MAX_HEAD:
            request.fault = _too_long()
        request.keep_alive = request.keep_alive and request.fault is None
        return request

    # -- requests, one after another --------------------------------------------------------

    def _accept(self, request: HttpRequest) -> None:
        self._raw.clear()
        self._target, self._arrival = b"", None
        if self._task is None:
            self._begin(request)
        elif not self._shut and self.transport is not None:
            self._queue.append(request)
            self.transport.pause_reading()

    def _begin(self, request: HttpRequest) -> None:
        self._task = self._server.loop.create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        try:
            await self._server.handler(request)
        except Exception as error:
            self._apologise(request, error)
        self._task = None
        if not request.keep_alive:
            self._hang_up()
        elif self._queue:
            self._turn(self._queue.popleft())
        elif self._shut:
            self._hang_up()
        else:
            self._idle_since = monotonic()

    def _turn(self, request: HttpRequest) -> None:
        """It had to wait for nothing of ours but the answer before it, which its caller asked for first."""
        request.arrival = monotonic()
        self._begin(request)
        if not self._queue and self.transport is not None:
            self.transport.resume_reading()

    def _apologise(self, request: HttpRequest, error: Exception) -> None:
        log.error("internal error", exc_info=error)
        request.keep_alive = False
        if not request.begun:
            request.refuse(ApiError(500, "The gateway failed; the fault is ours.", type="server_error", close=True))
        elif self.transport is not None:
            self.transport.abort()

    # -- what will be no request ----------------------------------------------------------------

    def _look_at_part(self) -> None:
        """Of a request that is not all there: is the rest worth waiting for?"""
        if self._quiet > MAX_HEAD:
            self._give_up(_too_long())
        elif self._head_whole and not self._screened:
            self._screen()
        elif sum(map(len, self._pieces)) > self._server.max_body():
            self._give_up(too_large(self._server.max_body()))

    def _screen(self) -> None:
        self._screened = True
        request = self._request(b"")
        declared, most = int(request.headers.get("content-length", 0)), self._server.max_body()
        fault = request.fault or framing_error({}, True, declared, most) or self._server.screen(request)
        if fault is not None:
            self._give_up(fault)
        elif request.headers.get("expect", "").lower() == "100-continue" and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _give_up(self, refusal: ApiError) -> None:
        """Read no more. What was asked before is answered; a head that is whole is refused by the handler."""
        self._shut = True
        self._reading = False
        refusal.close = True
        if self._task is not None:
            return
        if self._head_whole:
            self._accept(self._request(b"", refusal))
        else:
            self.write(rendered(refusal.status, refusal.body(), (), "", keep_alive=False))
            self._hang_up()

    def _hang_up(self) -> None:
        """What a refused caller still sends is read and dropped for a while, or it would lose the reply to a reset."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self.flush()
        if self._shut:
            self._ends_at = monotonic() + LINGER
            transport.resume_reading()
            transport.write_eof()
        else:
            self._shut, self._ends_at = True, monotonic() + UNREAD
            transport.close()

    # -- time -----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Cut off what takes too long to send a request, or has none."""
        if self.transport is None or self._task is not None:
            return
        if self._ends_at:
            if now > self._ends_at:
                self.transport.abort()
        elif self._arrival is None:
            if now - self._idle_since > KEEP_ALIVE:
                self.transport.close()
        elif self._head_whole and self._reading:
            if now - self._arrival > BODY_TIMEOUT:
                self._give_up(ApiError(408, f"The body did not arrive within {BODY_TIMEOUT:g} s."))
        elif now - self._arrival > HEADER_TIMEOUT:
            self.transport.abort()

    # -- the end of the server ----------------------------------------------------------------

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The request in hand."""
        return self._task

    def end_answer(self) -> None:
        """Of the request in hand, if it has begun."""
        if self.reader is not None:
            self.reader.gateway_stops()

    def close_if_idle(self) -> None:
        """Once what was written is sent."""
        if self._task is None and self.transport is not None:
            self.flush()
            self.transport.close()

    def cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _too_long() -> ApiError:
    return ApiError(431, f"Head, or framing, of more than {MAX_HEAD // 1024} KiB.", close=True)


def _malformed(error: HttpParserError) -> ApiError:
    first_line = (str(error).strip() or "it could not be parsed").splitlines()[0].rstrip(":.")
    return ApiError(400, f"The request is not valid HTTP: {first_line}.", close=True)
