"""The way to one backend: a pool of its connections. Foreign errors become a `Failure` here, once.

Rules:
- `start` is synchronous where an idle connection exists; only connecting awaits.
- The most recently used idle connection is taken first, so that the others may age and be closed.
- Idle connections are closed before the server does it (vLLM: after 5 s, VLLM_HTTP_TIMEOUT_KEEP_ALIVE).
  Where it was quicker, and a reused connection dies soon after the request and before any byte of a reply,
  the request is sent once more on a fresh connection, and nobody notices.
- NODELAY is on, as both event loops have it: else a small write on a reused connection waits 40 ms for an ACK.
- A name is resolved anew with every connection, and a connection to one is not used for ever: where the name has
  moved, traffic follows.
- Redirects are never followed. The URL comes from configuration alone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from math import inf
from socket import SO_RCVBUF, SOL_SOCKET
from time import monotonic

from backends import failures
from backends.failures import TransportError
from backends.http.address import BackendAddress
from backends.http.connection import Connection
from backends.http.exchange import Exchange, Request, Sink
from backends.http.headers import lines
from backends.http.write_coalescer import WriteCoalescer
from backends.interface import Failure, HttpCall

__all__ = ["BufferedReply", "ConnectionPool", "TransportError"]

# A lost race with the server's idle timeout shows within a round trip. What dies later died at work:
# the request may have been billed, and another endpoint is the better bet.
_RACE = 1.0  # s
LONGEST = 300.0  # s that a connection to a name is used: the name may have another address by then
_TICK = 1e-3  # s, the grain of the loop's clock


@dataclass(frozen=True, slots=True)
class BufferedReply:
    """A whole reply, for probes."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ConnectionPool:
    """One endpoint's URL and the connections to it."""

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        idle_timeout: float = 4.0,
        tls: ssl.SSLContext | None = None,
        max_idle: int = 256,
        receive_buffer: int | None = None,
        outbox: WriteCoalescer | None = None,
        at: str = "",
    ) -> None:
        self.address = BackendAddress.parse(url)
        self._at = at or self.address.host  # one address of that name: to the server we ask for the name all the same
        self.outbox = outbox or WriteCoalescer()  # several origins may have one
        self.stale_retries = 0
        self._longest = inf if _is_address(self._at) else LONGEST
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._tls = (tls or _default_tls()) if self.address.tls else None
        self._max_idle = max_idle
        self._receive_buffer = receive_buffer  # bytes; None: the kernel's own choice
        self._idle: dict[Connection, float] = {}  # since when; the most recent last
        self._open = 0
        self._timer: asyncio.TimerHandle | None = None
        self._resends: set[asyncio.Task[None]] = set()
        self._closed = False
        self._starts: dict[tuple[str, str], str] = {}  # request line and host, by method and path

    def __repr__(self) -> str:
        return f"<Origin {self.address.authority} idle={self.idle} active={self.active}>"

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def active(self) -> int:
        """Connections that carry one, or are about to close."""
        return self._open - len(self._idle)

    # ----------------------------------------------------------------------- requests

    def start(self, call: HttpCall, sink: Sink) -> Exchange | None:
        """Send on an idle connection, at once; None if there is none."""
        connection = self._take()
        if connection is None:
            return None
        exchange = Exchange(self._render(call), sink, reused=True)
        connection.send(exchange)
        return exchange

    async def open(self, call: HttpCall, sink: Sink) -> Exchange:
        """Send, connecting if need be. Raises TransportError if that fails; later failures go to the sink."""
        exchange = self.start(call, sink)
        if exchange is None:
            request, began = self._render(call), monotonic()
            connection = await self._connect()
            exchange = Exchange(request, sink, reused=False, connect_seconds=monotonic() - began)
            connection.send(exchange)
        return exchange

    async def fetch(self, call: HttpCall, timeout: float, limit: int = 8 << 20) -> BufferedReply:
        """A whole reply of at most `limit` bytes within `timeout` seconds. Raises TransportError."""
        collector = _Collector(limit)
        try:
            async with asyncio.timeout(timeout):
                exchange = await self.open(call, collector)
                try:
                    return await collector.reply
                finally:
                    exchange.cancel()
        except TimeoutError:
            raise TransportError(failures.TIMED_OUT) from None

    async def close(self) -> None:
        """Close what is idle now, and what is busy as it ends: a reload breaks no stream."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._idle:
            self._idle.popitem()[0].abandon()
        await asyncio.sleep(0)  # one turn of the loop: the sockets are closed

    def _render(self, call: HttpCall) -> Request:
        start = self._starts.get((call.method, call.path)) or self._start(call.method, call.path)
        length = f"content-length: {len(call.body)}\r\n" if call.body or call.method not in ("GET", "HEAD") else ""
        head = f"{start}{call.fixed}{lines(call.headers)}{length}\r\n"
        return Request(head.encode("utf-8", "surrogateescape"), call.body, call.method == "HEAD")

    def _start(self, method: str, path: str) -> str:
        """Of every request for this path; there are as many as a backend has operations."""
        start = f"{method} {self.address.target(path)} HTTP/1.1\r\nhost: {self.address.authority}\r\n"
        self._starts[method, path] = start
        return start

    # ----------------------------------------------------------------------- connections

    def _take(self) -> Connection | None:
        """The most recently used idle connection. An old one means that all are old."""
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.usable and monotonic() - since < self._idle_timeout:
                return connection
            connection.abandon()
        return None

    async def _connect(self) -> Connection:
        address, loop, connection = self.address, asyncio.get_running_loop(), Connection(self)
        name = address.host if address.tls else None
        try:
            async with asyncio.timeout(self._connect_timeout):
                transport, _ = await loop.create_connection(
                    lambda: connection, self._at, address.port, ssl=self._tls, server_hostname=name
                )
            if not connection.usable:
                raise ConnectionAbortedError  # it hung up, or spoke first, before we could
        except (OSError, UnicodeError) as error:
            connection.connection_lost(error)
            raise TransportError(failures.of_connect(error)) from error
        except asyncio.CancelledError:  # it may have been made in this very moment: uvloop then ends it without a word
            connection.connection_lost(None)
            raise
        if self._receive_buffer is not None:
            transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, self._receive_buffer)
        return connection

    def _expire(self) -> None:
        """Close what has been idle too long. One timer per origin, however many connections."""
        now = monotonic()
        while self._idle:
            connection, since = next(iter(self._idle.items()))  # the oldest
            if since + self._idle_timeout > now + _TICK:
                break
            del self._idle[connection]
            connection.abandon()
        self._timer = None
        self._watch()

    def _watch(self) -> None:
        if self._timer is None and self._idle:
            ends = next(iter(self._idle.values())) + self._idle_timeout
            self._timer = asyncio.get_running_loop().call_later(max(ends - monotonic(), 0.0), self._expire)

    # ----------------------------------------------------------------------- what connections tell

    def made(self) -> None:
        self._open += 1

    def release(self, connection: Connection) -> None:
        now = monotonic()
        if self._closed or len(self._idle) >= self._max_idle or now - connection.born > self._longest:
            connection.abandon()
            return
        self._idle[connection] = now
        if self._timer is None:
            self._watch()

    def lost(self, connection: Connection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)

    def resend(self, exchange: Exchange) -> bool:
        if not exchange.reused or monotonic() - exchange.sent_at > _RACE:
            return False
        self.stale_retries += 1
        task = asyncio.get_running_loop().create_task(self._send_again(exchange))
        exchange.carrier = task
        self._resends.add(task)
        task.add_done_callback(self._resends.discard)
        return True

    async def _send_again(self, exchange: Exchange) -> None:
        began = monotonic()
        try:
            connection = await self._connect()
        except TransportError as error:
            exchange.sink.on_failure(error.failure)
            return
        exchange.reused, exchange.connect_seconds = False, monotonic() - began
        connection.send(exchange)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _Collector:
    """The sink of a fetch."""

    def __init__(self, limit: int) -> None:
        self.reply: asyncio.Future[BufferedReply] = asyncio.get_running_loop().create_future()
        self._room = limit
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._pieces: list[bytes] = []

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room >= 0:
            self._pieces.append(data)
        elif not self.reply.done():
            self.reply.set_exception(TransportError(failures.TOO_LARGE))

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        self.on_body(data)

    def on_end(self) -> None:
        if not self.reply.done():
            self.reply.set_result(BufferedReply(self._status, self._headers, b"".join(self._pieces)))

    def on_failure(self, failure: Failure) -> None:
        if not self.reply.done():
            self.reply.set_exception(TransportError(failure))


@cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the system's certificates takes some 20 ms
