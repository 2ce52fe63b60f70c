"""The data port: aiohttp parses requests and owns connections; complete requests go to the handler.

Path of a request: aiohttp -> `DownstreamConnection.serve` -> `HttpRequest` -> handler (`Proxy.handle`). Rules:
- The handler writes the answer through `HttpRequest.writer`; aiohttp is told only whether to keep the connection.
- The handler gets a request once the body is complete, or once a reason to refuse the request is known.
- Bounds for each caller, and for all callers together: `gateway.downstream.limits`, and the unread part of an answer.
- A request that is refused by its head has no body read: input is dropped unparsed from then on.
- A disconnect cancels the handler at once, and with the handler all attempts upstream. The end of a caller's input is
  the end of the caller.
- Protocol errors are answered in OpenAI's error envelope; no content of a request is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import cast

from aiohttp import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from aiohttp.web import BaseRequest, RequestHandler, Server, StreamResponse

from backends.http.connection import WriteCoalescer
from backends.http.loop_aware_timer import LoopAwareTimer
from gateway.api.api_error import ApiError
from gateway.downstream.body_reader import BodyReader, Bounds, Precheck
from gateway.downstream.http_request import HttpRequest, ResponseWriter, WebSocket, refuse_repeated_keys, rendered
from gateway.downstream.limits import (
    DEFAULT_TIMEOUTS,
    LINGERING,
    MAX_BODY,
    MAX_HEAD,
    MAX_HEADERS,
    MAX_LINE,
    Intake,
    Timeouts,
    head_too_long,
    is_mostly_framing,
    protocol_error,
    too_much_framing,
)

log = logging.getLogger("firsttoken")

READ_BUFFER = 64 * 1024  # bytes of body parsed ahead; of one-byte chunks, 4096 at a time take 4 ms
SEND_BUFFER = 64 * 1024  # bytes in the kernel for one reader (Linux doubles the value); the default grows to 4 MB
HIGH_WATER = 16 * 1024  # bytes buffered for one reader before the upstream is paused
MAX_BEHIND = 64 * 1024  # bytes read ahead behind a request in hand
SWEEP = 1.0  # s between checks of all connections; a timer per connection would cost more
ABORTS, ABORT_PAUSE = 16, 0.01  # connections aborted at a time (30 us each), and s until the sweep goes on


# -- the server --------------------------------------------------------------------------------


class _Written(StreamResponse):
    """Tells aiohttp to send nothing: the answer is written already. `linger`: s before the connection is closed."""

    def __init__(self, *, kept: bool = False, linger: float = 0.0) -> None:
        super().__init__()
        self.kept, self.linger = kept, linger

    @property
    def keep_alive(self) -> bool:
        return self.kept

    async def prepare(self, request: BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if self.linger:
            await asyncio.sleep(self.linger)


KEEP_ALIVE, CLOSE = _Written(kept=True), _Written()

Handler = Callable[[HttpRequest], Awaitable[None]]


class HttpServer(Server):
    """Makes connections for `loop.create_server`. A disconnect cancels `handler`."""

    def __init__(
        self,
        handler: Handler,
        *,
        max_body: int = MAX_BODY,
        precheck: Precheck = lambda request: None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        intake: Intake | None = None,
    ) -> None:
        super().__init__(lambda raw: cast("DownstreamConnection", raw.protocol).serve(raw), handler_cancellation=True)
        self.handler = handler
        self.bounds = Bounds(max_body, precheck, timeouts, Intake() if intake is None else intake)
        self.coalescer = WriteCoalescer()
        self.loop = asyncio.get_running_loop()
        self._sweep_timer = LoopAwareTimer()  # bytes that arrived while the loop stood still are read before the check
        self._unchecked: list[DownstreamConnection] = []  # of the sweep in progress
        self._sweep()

    def __call__(self) -> DownstreamConnection:
        return DownstreamConnection(self)

    def _sweep(self) -> None:
        """Check all connections. Of thousands opened together, and so timed out together, a few are aborted per turn of
        the event loop: other callers do not wait."""
        now, aborted = monotonic(), 0
        unchecked = self._unchecked = self._unchecked or cast("list[DownstreamConnection]", list(self.connections))
        while unchecked and aborted < ABORTS:
            aborted += unchecked.pop().check_timeouts(now)
        self._sweep_timer.set(monotonic() + (ABORT_PAUSE if unchecked else SWEEP), self._sweep)

    async def shutdown(self, timeout: float | None = 0.0) -> None:
        """End streams with an error event. Other requests, and unread answers, get `timeout` seconds each."""
        self._sweep_timer.cancel()
        connections = cast("list[DownstreamConnection]", self.connections)
        for connection in connections:
            connection.stop()
        tasks = [connection.task for connection in connections if connection.task is not None]
        late = (await asyncio.wait(tasks, timeout=timeout))[1] if tasks else set()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await super().shutdown(timeout)
        if any(connection.writer.unsent() for connection in connections):
            await asyncio.sleep(timeout or 0.0)
        for connection in connections:
            connection.writer.transport.abort()
        await asyncio.sleep(0)  # the loop reports each lost connection


class DownstreamConnection(RequestHandler):
    """One connection of a caller, with aiohttp's protocol as base."""

    writer: ResponseWriter

    def __init__(self, server: HttpServer) -> None:
        super().__init__(
            server,
            loop=server.loop,
            keepalive_timeout=server.bounds.timeouts.idle,
            lingering_time=server.bounds.timeouts.linger,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
            read_bufsize=READ_BUFFER,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
            logger=log,
        )
        self.server, self.bounds = server, server.bounds
        self.loop = server.loop
        self._bodies = BodyReader(server.bounds)
        self.request: HttpRequest | None = None  # being served
        self.task: asyncio.Task[None] | None = None  # which serves it
        self._arrival: float | None = None  # first byte of the current or the next request
        self._received = 0  # bytes since then; once a request is complete, bytes behind it
        self._long_head: float | None = None  # arrival of a head that was too long at the last check
        self._refused = False  # all further input is dropped
        self._closing_since: float | None = None

    # -- the socket ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast("asyncio.Transport", transport)
        tcp.set_write_buffer_limits(high=HIGH_WATER)
        tcp.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
        self.writer = ResponseWriter(tcp, self.server.coalescer)
        intake = self.bounds.intake
        intake.connections += 1
        if intake.connections <= intake.max_connections:
            super().connection_made(transport)
        elif intake.connections <= intake.max_connections + LINGERING:
            self._turn_away(intake.too_many_connections())
        else:
            tcp.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.bounds.intake.connections -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._arrival is None:
            self._arrival = monotonic()
        self._received += len(data)
        super().data_received(data)
        if self._bodies.content is not None:
            self._check_body(self._bodies.content)
        elif self.request is not None:
            self._check_behind(self.request, len(data))

    def _check_behind(self, request: HttpRequest, size: int) -> None:
        """Bound what a caller sends behind the request in hand: the rest waits in its socket. A caller that leaves then
        is noticed once the answer is written."""
        if request.websocket is not None:
            request.websocket.on_bytes(size)
        elif self._received > MAX_BEHIND:
            self.writer.transport.pause_reading()

    def _check_body(self, body: StreamReader) -> None:
        """End a body with too much framing. While reading is paused the parser holds bytes."""
        if body.is_eof() or not self.writer.transport.is_reading():  # complete: what follows is the next request
            return
        if is_mostly_framing(self._received, body.total_bytes):
            self._refused = True
            self._bodies.break_off(too_much_framing())

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this for each piece of a body, 15 us each, though reading is paused for few."""
        if not self.writer.transport.is_reading():
            super().resume_reading(resume_parser)

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
            query=raw.rel_url.raw_query_string,
        )
        if headers.get("upgrade", "").lower() == "websocket":
            request.websocket = WebSocket(raw, self.writer, self.bounds.max_body, self._bodies.hold)
        self.task = raw.task
        try:
            await self._receive(request, raw)
            self._received = 0
            await self.server.handler(request)
        finally:
            self._bodies.hold(0)
            self.task = None
        if self._received > MAX_BEHIND:
            self.resume_reading(resume_parser=False)
        self.request = self._arrival = None
        self._received = 0
        if request.keep_alive:
            return KEEP_ALIVE
        if self._refused:
            self.writer.end()
        self.writer.flush()
        return _Written(linger=self.bounds.timeouts.linger) if self._refused and raw.content.is_eof() else CLOSE

    async def _receive(self, request: HttpRequest, raw: BaseRequest) -> None:
        """Read the body, or set the fault for which no more is read."""
        try:
            if self._received > MAX_HEAD and sum(len(name) + len(value) for name, value in raw.raw_headers) > MAX_HEAD:
                raise head_too_long()
            if raw.version not in (HttpVersion10, HttpVersion11):
                raise ApiError(400, "The request is neither HTTP/1.1 nor HTTP/1.0.", close=True)
            if len(request.headers) < len(raw.raw_headers):
                refuse_repeated_keys(name.decode("latin-1").lower() for name, _ in raw.raw_headers)
            request.body = await self._bodies.read(request, raw.content, self._received)
        except ApiError as fault:
            self._bodies.hold(0)
            self._drop_input()
            request.fault = fault.with_traceback(None)  # the traceback refers to the request
            request.keep_alive = False

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer a protocol error, or a bug of the gateway. An answer already begun is cut off."""
        if isinstance(exc, HttpProcessingError):
            refusal = protocol_error(exc)
        else:
            log.error("internal error", exc_info=exc)
            refusal = ApiError(500, "The gateway failed; the fault is ours.", type="server_error")
        if self.request is not None and self.request.begun:
            self.writer.transport.abort()
            return CLOSE
        self._write_last(refusal)
        return _Written(linger=self.bounds.timeouts.linger)

    def _turn_away(self, refusal: ApiError) -> None:
        """Refuse outside of a request. The caller has `linger` seconds to read the reply."""
        self._write_last(refusal)
        self.loop.call_later(self.bounds.timeouts.linger, self.writer.transport.abort)

    def _write_last(self, refusal: ApiError) -> None:
        self._drop_input()
        lines = [f"{name}: {value}" for name, value in refusal.headers.items()]
        self.writer.write(rendered(refusal.status, refusal.body(), lines, "", keep_alive=False))
        self.writer.end()

    def _drop_input(self) -> None:
        """Neither parse nor keep what the caller sends from now on."""
        self._refused = True
        with suppress(RuntimeError):  # of uvloop, where the transport is closed
            self.writer.transport.resume_reading()

    # -- the end ----------------------------------------------------------------------------

    def check_timeouts(self, now: float) -> bool:
        """Abort the connection for a head too slow or without end, or an unread answer's end. True: aborted."""
        transport, timeouts = self.writer.transport, self.bounds.timeouts
        if transport.is_closing():
            self._closing_since = self._closing_since or now
            overdue = now - self._closing_since > timeouts.unread
        elif self.request is not None and self.request.websocket is not None:
            overdue = self.request.websocket.is_overdue(now, timeouts.body)
        else:
            overdue = self.request is None and self._arrival is not None and self._is_overdue(self._arrival, now)
        if overdue:
            transport.abort()
        return overdue

    def _is_overdue(self, arrival: float, now: float) -> bool:
        """A head is too slow, or was too long at two checks in a row: a complete one would be a request by then."""
        was_long = self._long_head == arrival
        self._long_head = arrival if self._received > MAX_HEAD else None
        return was_long or now - arrival > self.bounds.timeouts.head

    def stop(self) -> None:
        """End a stream now; any other request is the last of the connection."""
        if self.writer.flow_control is not None:
            self.writer.flow_control.on_shutdown()
        self.close()
