"""The data port: aiohttp parses requests and owns connections; a request that is whole goes to the handler.

The path of a request: aiohttp -> `HttpServer._serve` -> `HttpRequest` -> handler (`Proxy.handle`). Rules:
- The handler writes the answer itself, through `HttpRequest.writer`; aiohttp is only told that it was written.
- A request is handed over once its body is complete. One that will be refused by its head is not waited for.
- Everything of a caller is bounded: head, body, the time for both, and the unread part of an answer.
- A caller that disconnects cancels its handler at once, and with it the attempts upstream.
- An error of the protocol is answered in the OpenAI envelope, and no content of a request is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import cast

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader
from aiohttp.web import BaseRequest, Server, StreamResponse
from aiohttp.web_protocol import RequestHandler

from backends.http.headers import readable
from backends.http.write_coalescer import WriteCoalescer
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import HttpRequest, ResponseWriter, framing_error, rendered, too_large

log = logging.getLogger("firsttoken")

MAX_BODY = 32 * 1024 * 1024  # bytes, unless the server is told otherwise
MAX_LINE = 16 * 1024  # bytes of a request line, or of one header
MAX_HEADERS = 128
SEND_BUFFER = 64 * 1024  # bytes the kernel may hold for one reader (it doubles this); without a bound up to 4 MB each
HIGH_WATER = 16 * 1024  # bytes buffered for one reader before its upstream is paused
SWEEP = 1.0  # s between two checks of all connections; a timer for each would cost more than most checks
CLOSING = 0.01  # s between two checks, at shutdown, of whether all connections are closed

Handler = Callable[[HttpRequest], Awaitable[None]]
Precheck = Callable[[HttpRequest], ApiError | None]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a caller may take."""

    head: float = 15.0  # from its first byte to its last
    body: float = 60.0  # from the end of the head to the end of the body
    idle: float = 75.0  # between requests; above the idle timeout of the usual load balancers (60 s)
    unread: float = 60.0  # to read the end of an answer after which the connection closes
    linger: float = 2.0  # to stop sending after a refusal; closing at once resets the connection and loses the reply


class _Written(StreamResponse):
    """The answer is written to the transport already: aiohttp has nothing to send."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Refused(_Written):
    """The caller may still be sending: what comes is dropped until it has read the reply and disconnects."""

    def __init__(self, linger: float) -> None:
        super().__init__(keep_alive=False)
        self._linger = linger

    async def write_eof(self, data: bytes = b"") -> None:
        await asyncio.sleep(self._linger)


KEEP_ALIVE, CLOSE = _Written(keep_alive=True), _Written(keep_alive=False)


class HttpServer(Server):
    """Makes connections for `loop.create_server`. `handler` answers a request, and may be cancelled at any time;
    `precheck` may refuse a request by its head while its body is still on the way."""

    def __init__(
        self,
        handler: Handler,
        *,
        max_body: Callable[[], int] = lambda: MAX_BODY,
        precheck: Precheck = lambda request: None,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        super().__init__(self._serve, handler_cancellation=True)
        self.handler = handler
        self.max_body = max_body
        self.precheck = precheck
        self.timeouts = timeouts
        self.coalescer = WriteCoalescer()
        self._sweep_later()

    def __call__(self) -> DownstreamConnection:
        return DownstreamConnection(self, self._loop)

    async def _serve(self, raw: BaseRequest) -> StreamResponse:
        """Read one request to its end and have it answered. An error goes to `DownstreamConnection.handle_error`."""
        connection = cast("DownstreamConnection", raw.protocol)
        request = connection.begin(raw)
        try:
            await self._read_body(request, connection, raw.content)
        except ApiError as fault:
            request.fault = fault
            request.keep_alive = False
        await self.handler(request)
        connection.end()
        return KEEP_ALIVE if request.keep_alive else CLOSE

    async def _read_body(self, request: HttpRequest, connection: DownstreamConnection, content: StreamReader) -> None:
        if request.method == "CONNECT":  # a 200 would promise a tunnel (RFC 9110, section 9.3.6)
            raise ApiError(405, "CONNECT is not supported.", close=True)
        declared = int(request.headers.get("content-length", 0))
        if (fault := framing_error(request.headers, request.http11, declared, self.max_body())) is not None:
            raise fault
        if not content.is_eof():
            if (fault := self.precheck(request)) is not None:
                raise fault
            if request.headers.get("expect", "").lower() == "100-continue":  # RFC 9110, section 10.1.1
                request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.body = await connection.collect(content, self.max_body(), self.timeouts.body)
        elif len(body := content.read_nowait()) <= self.max_body():
            request.body = body
        else:
            raise too_large(self.max_body())

    def _sweep_later(self) -> None:
        self._sweep_timer = self._loop.call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        now = monotonic()
        for connection in self.connections:
            cast("DownstreamConnection", connection).check_timeouts(now, self.timeouts)
        self._sweep_later()

    async def shutdown(self, timeout: float | None = None) -> None:
        """End streams with an explicit error; give other requests, and replies that are not read, `timeout` seconds."""
        self._sweep_timer.cancel()
        connections = cast("list[DownstreamConnection]", self.connections)
        for connection in connections:
            connection.stop()
        tasks = [task for connection in connections if (task := connection.task) is not None]
        late = (await asyncio.wait(tasks, timeout=timeout))[1] if tasks else set()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await super().shutdown(timeout)
        ends = monotonic() + (timeout or 0.0)
        while not all(connection.lost for connection in connections) and monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(CLOSING)
        for connection in connections:
            connection.writer.transport.abort()
        await asyncio.sleep(0)  # the loop reports each loss


class DownstreamConnection(RequestHandler):
    """One connection of a caller: what aiohttp's own lacks."""

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
        self.coalescer = server.coalescer
        self.request: HttpRequest | None = None  # in hand
        self.lost = False
        self._arrival: float | None = None  # first byte of the request in hand, or of the next one
        self._body: StreamReader | None = None  # that is being read
        self._parser_error: HttpProcessingError | None = None  # in the middle of that body
        self._refused = False  # nothing more is read
        self._closing_since: float | None = None

    # -- the socket ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast("asyncio.Transport", transport)
        tcp.set_write_buffer_limits(high=HIGH_WATER)
        tcp.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
        self.writer = ResponseWriter(tcp, self.coalescer)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._arrival is None:
            self._arrival = monotonic()
        super().data_received(data)
        if self._body is not None and self._messages:  # behind half a body no request follows, only an error
            self._parser_error = cast("HttpProcessingError", self._messages[-1][0].exc)  # type: ignore[union-attr]
            self._body.feed_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writer.on_write_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writer.on_write_resumed()

    # -- one request ----------------------------------------------------------------------

    def begin(self, raw: BaseRequest) -> HttpRequest:
        """The request as a value, its body still to be read. One that was pipelined arrives when its turn comes.

        A chunked request is the last of its connection: aiohttp 3.14 takes a trailer for a header of the next request.
        """
        headers = readable(dict(raw.raw_headers))
        self.request = HttpRequest(
            method=raw.method,
            path=raw.rel_url.raw_path,
            headers=headers,
            arrival=monotonic() if self._arrival is None else self._arrival,
            http11=raw.version >= (1, 1),
            keep_alive=raw.keep_alive and "transfer-encoding" not in headers,
            writer=self.writer,
        )
        return self.request

    async def collect(self, body: StreamReader, max_body: int, timeout: float) -> bytes:
        """Read a body that is still on its way. Raises ApiError (413, 408)."""
        parts: list[bytes] = []
        size = 0
        self._body = body
        try:
            async with asyncio.timeout(timeout):
                while part := await body.readany():
                    size += len(part)
                    if size > max_body:
                        raise too_large(max_body)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {timeout:g} s.", close=True) from None
        finally:
            self._body = None
        if self._parser_error is not None:
            raise self._parser_error
        return b"".join(parts)

    def end(self) -> None:
        """The request is answered."""
        assert self.request is not None
        if not self.request.keep_alive:
            self.writer.flush()
        self.request = None
        self._arrival = None

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer what is not HTTP, or a bug of the gateway: where an answer has begun, by cutting it off."""
        if isinstance(exc, HttpProcessingError):
            refusal = _malformed(exc)
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
        return _Refused(self._lingering_time)

    # -- time and the end -----------------------------------------------------------------

    def check_timeouts(self, now: float, timeouts: Timeouts) -> None:
        """Cut off a head that does not end, and an answer's end that nobody reads."""
        transport = self.writer.transport
        if transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > timeouts.unread:
                transport.abort()
        elif self.request is None and self._arrival is not None and now - self._arrival > timeouts.head:
            transport.abort()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Ends with the connection's last request."""
        return self._task_handler

    def stop(self) -> None:
        """The request in hand is the last. A stream ends now."""
        if self.writer.flow_control is not None:
            self.writer.flow_control.on_shutdown()
        self.close()


def _malformed(error: HttpProcessingError) -> ApiError:
    """431 for a head that is too long, else 400 with the parser's reason."""
    if isinstance(error, LineTooLong) or error.message == "Too many headers received":
        limits = f"a request line and a header may have {MAX_LINE // 1024} KiB, and a request {MAX_HEADERS} headers"
        return ApiError(431, f"The head is too long: {limits}.")
    reason = (error.message.strip() or "it could not be parsed").splitlines()[0].rstrip(":.")
    return ApiError(400, f"The request is not valid HTTP: {reason}.")
