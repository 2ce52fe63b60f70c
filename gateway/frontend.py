"""The caller's side of the wire: aiohttp's HTTP server with the seams that a relay needs.

`ClientConnection` adds three things to aiohttp's connection and changes none: the time at which
a request's first byte was read, a call when the socket's buffer fills or drains, and errors in
the dialect of the port. `Written` is a response whose bytes have already gone to the transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Any, Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.refusal import Refusal

log = logging.getLogger("firsttoken")

KEEP_ALIVE = 75.0  # s; above the idle timeout of the usual load balancers (60 s)
SEND_BUFFER = 64 * 1024  # bytes the kernel may hold for one reader (it doubles this); else up to 4 MB each
HIGH_WATER = 16 * 1024  # bytes buffered for one reader before its upstream is paused
HEADER_TIMEOUT = 15.0  # s that a request's head may take to arrive whole
MAX_HEADER = 16 * 1024  # bytes of one header line


class Reader(Protocol):
    """Told when the client's socket buffer fills and drains."""

    def client_full(self) -> None: ...

    def client_drained(self) -> None: ...


class ClientConnection(RequestHandler):
    """One connection of a caller."""

    __slots__ = ("arrival", "busy", "full", "reader", "watchdog")

    def __init__(self, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.arrival: float | None = None
        self.busy = False  # a handler is at work: what arrives is its body, or a pipelined request
        self.reader: Reader | None = None
        self.full = False
        self.watchdog: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)  # type: ignore[attr-defined]
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
        self._watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None
        super().connection_lost(exc)

    def _watch(self) -> None:
        """A head that drips in holds a connection for ever otherwise. One timer, not one per request."""
        if self.arrival is not None and not self.busy and monotonic() - self.arrival > HEADER_TIMEOUT:
            self.force_close()
        else:
            self.watchdog = self._loop.call_later(HEADER_TIMEOUT / 3, self._watch)

    def data_received(self, data: bytes) -> None:
        if self.arrival is None and not self.busy:
            self.arrival = monotonic()
        super().data_received(data)

    def begin(self) -> float:
        """When the first byte of the request in hand was read. A pipelined one arrives when its turn comes."""
        arrival, self.arrival, self.busy = self.arrival, None, True
        return monotonic() if arrival is None else arrival

    def end(self) -> None:
        """The next byte begins the next request."""
        self.busy = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True
        if self.reader is not None:
            self.reader.client_full()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False
        if self.reader is not None:
            self.reader.client_drained()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp's parser refuses (status 400), or a bug of ours (500), in the OpenAI envelope."""
        if status >= 500:
            log.error("internal error", exc_info=exc)
            return reply(Refusal(500, "The gateway failed; the fault is ours.", type="server_error", close=True))
        first_line = (message or "it could not be parsed").strip().splitlines()[0].rstrip(":.")
        return reply(Refusal(status, f"The request is not valid HTTP: {first_line}.", close=True))


class FrontServer(web.Server):
    """aiohttp's low-level server with our connections. A caller that leaves cancels its handler."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        return ClientConnection(
            self,
            loop=self._loop,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
            auto_decompress=False,
            lingering_time=2.0,
            read_bufsize=2**18,
        )


class Written:
    """What a handler returns once its answer has gone to the transport: the little that aiohttp asks of a response."""

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self) -> None:
        return None


def reply(refusal: Refusal) -> web.Response:
    """An error as a response; it closes the connection where the refusal says so."""
    return respond(refusal.status, refusal.body(), refusal.headers, close=refusal.close)


def respond(status: int, body: bytes, headers: dict[str, str] | None = None, *, close: bool = False) -> web.Response:
    response = web.Response(status=status, body=body, headers=headers)
    response.content_type = "application/json"
    response.headers["server"] = "firsttoken"
    if close:
        response.force_close()
    return response
