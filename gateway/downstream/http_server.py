"""The data port: aiohttp parses requests and owns connections; complete requests go to the handler.

Path of a request: aiohttp -> `DownstreamConnection.serve` -> `HttpRequest` -> handler (`Proxy.handle`). Rules:
- The handler writes the answer through `HttpRequest.writer`; aiohttp is told only whether to keep the connection.
- The handler gets a request once the body is complete, or once a reason to refuse the request is known.
- Bounds for each caller: head, body, time for both, unread part of an answer.
- A disconnect cancels the handler at once, and with the handler all attempts upstream.
- Protocol errors are answered in OpenAI's error envelope; no content of a request is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Protocol, cast

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader
from aiohttp.web import BaseRequest, Server, StreamResponse
from aiohttp.web_protocol import RequestHandler

from backends.http.connection import WriteCoalescer
from gateway.api.api_error import REASONS, ApiError

log = logging.getLogger("firsttoken")

MAX_BODY = 32 * 1024 * 1024  # bytes, by default
MAX_LINE = 16 * 1024  # bytes of a request line or a header
MAX_HEADERS = 128
SEND_BUFFER = 64 * 1024  # bytes in the kernel for one reader (Linux doubles the value); the default grows to 4 MB
HIGH_WATER = 16 * 1024  # bytes buffered for one reader before the upstream is paused
SWEEP = 1.0  # s between checks of all connections; a timer per connection would cost more


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits for a caller, in seconds."""

    head: float = 15.0  # first to last byte of a head
    body: float = 60.0  # end of the head to end of the body
    idle: float = 75.0  # between requests; longer than idle timeouts of common load balancers (60 s)
    unread: float = 60.0  # to read the rest of the last answer
    linger: float = 2.0  # to stop sending after a refusal; closing at once resets the connection and loses the reply


# -- a request and its reply -------------------------------------------------------------------


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
        self.write = partial(coalescer.write, transport)  # now, or with other sockets' data in this turn of the loop
        self.write_through = partial(coalescer.write_through, transport)  # now, after all earlier data
        self.flush = partial(coalescer.flush_to, transport)

    def on_write_paused(self) -> None:
        self.paused = True
        if self.flow_control is not None:
            self.flow_control.on_write_paused()

    def on_write_resumed(self) -> None:
        self.paused = False
        if self.flow_control is not None:
            self.flow_control.on_write_resumed()


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A complete request; with `fault`, an incomplete one to be refused for that reason.

    `path` is percent-encoded as sent, without the query: decoding could hide another path. Header names are lower
    case; of repeated headers the last counts. `arrival` is the time of the first byte (monotonic, s).
    """

    method: str
    path: str
    headers: Mapping[str, str]
    arrival: float
    http11: bool
    keep_alive: bool
    writer: ResponseWriter
    body: bytes = b""
    fault: ApiError | None = None
    begun: bool = False  # part of the answer is written

    def respond(self, status: int, body: bytes, lines: Iterable[str] = ()) -> None:
        """Write a JSON reply with additional header lines."""
        self.begun = True
        self.writer.write(rendered(status, body, lines, self.method, self.keep_alive))

    def refuse(self, refusal: ApiError, lines: Iterable[str] = ()) -> None:
        """Write an error reply. The error may require the connection to close."""
        if refusal.close:
            self.keep_alive = False
        own = [f"{name}: {value}" for name, value in refusal.headers.items()]
        self.respond(refusal.status, refusal.body(), (*own, *lines))


def rendered(status: int, body: bytes, lines: Iterable[str], method: str, keep_alive: bool) -> bytes:
    """A complete reply; without the body in answer to HEAD."""
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "server: firsttoken",
        *lines,
        "" if keep_alive else "connection: close\r\n",
    ]
    return ("\r\n".join(head) + "\r\n").encode("latin-1") + (b"" if method == "HEAD" else body)


def framing_error(headers: Mapping[str, str], http11: bool, max_body: int) -> ApiError | None:
    """The reason to refuse a body by the head alone."""
    if "transfer-encoding" in headers and not http11:  # RFC 9112, section 6.1
        return ApiError(400, "Transfer-Encoding is not part of HTTP/1.0.", close=True)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "Compressed request bodies are not accepted; send it without Content-Encoding."
        return ApiError(415, message, close=True)
    return too_large(max_body) if int(headers.get("content-length", 0)) > max_body else None


def too_large(max_body: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_body} bytes.", code="request_too_large", close=True)


# -- the server --------------------------------------------------------------------------------


class _Written(StreamResponse):
    """Tells aiohttp to send nothing: the answer is written already. `linger`: s before the connection is closed."""

    def __init__(self, *, keep_alive: bool = False, linger: float = 0.0) -> None:
        super().__init__()
        self._keep_alive = keep_alive
        self._linger = linger

    async def prepare(self, request: BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if self._linger:
            await asyncio.sleep(self._linger)


KEEP_ALIVE, CLOSE = _Written(keep_alive=True), _Written()

Handler = Callable[[HttpRequest], Awaitable[None]]
Precheck = Callable[[HttpRequest], ApiError | None]


class HttpServer(Server):
    """Makes connections for `loop.create_server`. A disconnect cancels `handler`. `precheck` may refuse a request by
    the head alone, before the body has arrived. `max_body`, in bytes, may be set at any time."""

    def __init__(
        self,
        handler: Handler,
        *,
        max_body: int = MAX_BODY,
        precheck: Precheck = lambda request: None,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        super().__init__(lambda raw: cast("DownstreamConnection", raw.protocol).serve(raw), handler_cancellation=True)
        self.handler = handler
        self.max_body = max_body
        self.precheck = precheck
        self.timeouts = timeouts
        self.coalescer = WriteCoalescer()
        self._sweep()

    def __call__(self) -> DownstreamConnection:
        return DownstreamConnection(self, self._loop)

    def _sweep(self) -> None:
        now = monotonic()
        for connection in self.connections:
            cast("DownstreamConnection", connection).check_timeouts(now)
        self._sweep_timer = self._loop.call_later(SWEEP, self._sweep)

    async def shutdown(self, timeout: float | None = 0.0) -> None:
        """End streams with an error event. Other requests, and unread answers, get `timeout` seconds each."""
        self._sweep_timer.cancel()
        connections = cast("list[DownstreamConnection]", self.connections)
        for connection in connections:
            connection.stop()
        tasks = [connection._task_handler for connection in connections if connection._task_handler is not None]
        late = (await asyncio.wait(tasks, timeout=timeout))[1] if tasks else set()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await super().shutdown(timeout)
        if any(connection.writer.transport.get_write_buffer_size() for connection in connections):
            await asyncio.sleep(timeout or 0.0)
        for connection in connections:
            connection.writer.transport.abort()
        await asyncio.sleep(0)  # the loop reports each lost connection


class DownstreamConnection(RequestHandler):
    """One connection of a caller, with aiohttp's protocol as base."""

    writer: ResponseWriter

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=server.timeouts.idle,
            lingering_time=server.timeouts.linger,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
            logger=log,
        )
        self.server = server
        self.request: HttpRequest | None = None  # being served
        self._arrival: float | None = None  # first byte of the current or the next request
        self._body: StreamReader | None = None  # being read
        self._body_error: HttpProcessingError | None = None
        self._refused = False  # all further input is dropped
        self._closing_since: float | None = None

    # -- the socket ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast("asyncio.Transport", transport)
        tcp.set_write_buffer_limits(high=HIGH_WATER)
        tcp.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
        self.writer = ResponseWriter(tcp, self.server.coalescer)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._arrival is None:
            self._arrival = monotonic()
        super().data_received(data)
        if self._body is not None and self._messages:  # no request can follow an incomplete body, only a parser error
            self._body_error = cast("HttpProcessingError", self._messages[-1][0].exc)  # type: ignore[union-attr]
            self._body.feed_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writer.on_write_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writer.on_write_resumed()

    # -- requests, one at a time ------------------------------------------------------------

    async def serve(self, raw: BaseRequest) -> StreamResponse:
        """Read a request to the end and call the handler. Exceptions go to `handle_error`.

        A pipelined request arrives when the answer before is complete. A chunked request is the last of a connection:
        aiohttp 3.14 adds the last trailer to the headers of the next request.
        """
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw.raw_headers}
        request = self.request = HttpRequest(
            method=raw.method,
            path=raw.rel_url.raw_path,
            headers=headers,
            arrival=monotonic() if self._arrival is None else self._arrival,
            http11=raw.version >= (1, 1),
            keep_alive=raw.keep_alive and "transfer-encoding" not in headers,
            writer=self.writer,
        )
        try:
            request.body = await self._read_body(request, raw.content)
        except ApiError as fault:
            request.fault = fault
            request.keep_alive = False
        await self.server.handler(request)
        self.request = self._arrival = None
        if request.keep_alive:
            return KEEP_ALIVE
        self.writer.flush()
        return CLOSE

    async def _read_body(self, request: HttpRequest, content: StreamReader) -> bytes:
        """Raises ApiError for a body to be refused, before reading if possible."""
        max_body = self.server.max_body
        if request.method == "CONNECT":  # a 200 would promise a tunnel (RFC 9110, section 9.3.6)
            raise ApiError(405, "CONNECT is not supported.", close=True)
        if (fault := framing_error(request.headers, request.http11, max_body)) is not None:
            raise fault
        if content.is_eof():
            body = content.read_nowait()
            if len(body) > max_body:
                raise too_large(max_body)
            return body
        if (fault := self.server.precheck(request)) is not None:
            raise fault
        if request.headers.get("expect", "").lower() == "100-continue":  # RFC 9110, section 10.1.1
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await self._collect(content, max_body, self.server.timeouts.body)

    async def _collect(self, content: StreamReader, max_body: int, timeout: float) -> bytes:
        body = bytearray()
        self._body = content
        try:
            async with asyncio.timeout(timeout):
                while part := await content.readany():
                    body += part
                    if len(body) > max_body:
                        raise too_large(max_body)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {timeout:g} s.", close=True) from None
        finally:
            self._body = None
        if self._body_error is not None:
            raise self._body_error
        return bytes(body)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer a protocol error, or a bug of the gateway. An answer already begun is cut off."""
        if isinstance(exc, HttpProcessingError):
            refusal = _protocol_error(exc)
        else:
            log.error("internal error", exc_info=exc)
            refusal = ApiError(500, "The gateway failed; the fault is ours.", type="server_error")
        if self.request is not None and self.request.begun:
            self.writer.transport.abort()
            return CLOSE
        self._refused = True
        self.writer.write(rendered(refusal.status, refusal.body(), (), "", keep_alive=False))
        self.writer.flush()
        self.writer.transport.write_eof()
        return _Written(linger=self.server.timeouts.linger)

    # -- the end ----------------------------------------------------------------------------

    def check_timeouts(self, now: float) -> None:
        """Abort the connection for a head too slow, or an unread end of the last answer."""
        transport, timeouts = self.writer.transport, self.server.timeouts
        if transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > timeouts.unread:
                transport.abort()
        elif self.request is None and self._arrival is not None and now - self._arrival > timeouts.head:
            transport.abort()

    def stop(self) -> None:
        """End a stream now; any other request is the last of the connection."""
        if self.writer.flow_control is not None:
            self.writer.flow_control.on_shutdown()
        self.close()


def _protocol_error(error: HttpProcessingError) -> ApiError:
    """431 for a head too long, else 400 with the parser's reason."""
    if isinstance(error, LineTooLong) or error.message == "Too many headers received":
        limits = f"at most {MAX_LINE // 1024} KiB for the request line or a header, and {MAX_HEADERS} headers"
        return ApiError(431, f"The request head is too long: {limits}.")
    reason = (error.message.strip() or "it could not be parsed").splitlines()[0].rstrip(":.")
    return ApiError(400, f"The request is not valid HTTP: {reason}.")
