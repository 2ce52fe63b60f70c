"""Pool of HTTP/1.1 connections to a backend. Foreign exceptions become a `Failure` here, once.

Rules:
- `start` is synchronous where an idle connection exists; only connecting awaits.
- The most recently used idle connection is taken first, so the others age and are closed.
- Idle connections are closed before the server's own timeout (vLLM: 5 s, VLLM_HTTP_TIMEOUT_KEEP_ALIVE). If the server
  was quicker, and a reused connection dies soon after the request and before any byte of a reply, the request is sent
  again on a new connection.
- TCP_NODELAY is on, by default in both event loops: else a small write on a reused connection waits 40 ms for an ACK.
- A host name is resolved anew for every connection, and connections to a name have a maximum age: traffic follows a
  change of DNS. Several addresses of a name race (`address_race`).
- Connecting and a whole reply take several turns of the event loop: where the loop has stalled, the server has its time
  again.
- Redirects are never followed. The URL comes from configuration alone, and the addresses of a name are judged before a
  connection is opened (`allowed_addresses`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import ip_address
from math import inf
from socket import IPPROTO_TCP, SO_KEEPALIVE, SO_RCVBUF, SOL_SOCKET, TCP_KEEPCNT, TCP_KEEPINTVL
from time import monotonic
from urllib.parse import urlsplit

from backends import failures
from backends.failures import TransportError
from backends.http.allowed_addresses import is_allowed
from backends.http.connection import Connection, Exchange, Sink, WriteCoalescer
from backends.http.loop_aware_timer import LoopAwareTimer
from backends.http.name_lookup import connected_socket
from backends.http.network_time import NetworkTime
from backends.http.tunnel import ProxyAddress, open_tunnel
from backends.interface import Failure, HttpCall

TCP_KEEPIDLE: int = getattr(socket, "TCP_KEEPIDLE", 0x10)  # macOS: TCP_KEEPALIVE
KEEP_ALIVE = (  # a host that vanishes without a word is noticed within 30 s (tcp(7))
    (SOL_SOCKET, SO_KEEPALIVE, 1),
    (IPPROTO_TCP, TCP_KEEPIDLE, 15),  # s
    (IPPROTO_TCP, TCP_KEEPINTVL, 5),  # s
    (IPPROTO_TCP, TCP_KEEPCNT, 3),
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """A parsed base URL.

    **A URL with a path names the API, a URL without a path means `/v1`.** `http://10.0.0.11:8000` and
    `http://10.0.0.11:8000/v1` are the same server; `https://api.groq.com/openai/v1` is complete, as for OpenAI's
    SDKs.
    """

    host: str
    port: int
    tls: bool
    authority: str  # for the Host header
    api: str  # path in place of /v1
    root: str  # path prefix of the server's own pages

    @classmethod
    def parse(cls, url: str) -> BackendAddress:
        """Parse a base URL. Raises ValueError, with the correction in its message."""
        if "@" in url:
            raise ValueError("a backend's URL holds credentials; put the key into api_key")
        try:
            parts = urlsplit(url)
            default = _PORTS[parts.scheme]
            host, port = parts.hostname, default if parts.port is None else parts.port
        except (ValueError, KeyError):
            host, port = None, 0
        if not host or not port or any(character <= " " or character == "\x7f" for character in url):
            raise ValueError(f"{url!r} is not a server's URL; write it like http://10.0.0.11:8000")
        if parts.query or parts.fragment:
            raise ValueError("the URL has a query or a fragment; end it with the path of the API, like /v1")
        path = parts.path.rstrip("/") or "/v1"
        return cls(host, port, parts.scheme == "https", parts.netloc, path, path.removesuffix("/v1"))

    def target(self, path: str) -> str:
        """Request target for the path of a call: `/v1/...` is the API, any other path belongs to the server."""
        return self.api + path[3:] if path.startswith("/v1/") else self.root + path


# A lost race with the server's idle timeout shows within a round trip. A connection that dies later died at work:
# the request may have been billed, and another endpoint is the better choice.
RESEND_WINDOW = 1.0  # s
MAX_AGE = 300.0  # s, of a reused connection to a host name
_LONGEST_NUMBER = 20  # digits
STALL = 0.05  # s of delay of a time limit, from which the event loop has stalled
_CLOCK_GRAIN = 1e-3  # s, of the event loop


class BufferedReply:
    """Sink for a whole reply of at most `limit` bytes, for probes. A longer one is refused by its length where the
    server tells it. After a failure nothing is held: the exception that tells of it may refer to the reply."""

    def __init__(self, limit: int) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = b""
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Failure | None = None  # `complete` is then done
        self._limit = limit
        self._received = bytearray()

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < _LONGEST_NUMBER and int(length) > self._limit:
            self.on_failure(failures.TOO_LARGE)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        if self.failure is None and len(self._received) + len(data) <= self._limit:
            self._received += data
        else:
            self.on_failure(failures.TOO_LARGE)

    def on_end(self) -> None:
        if not self.complete.done():
            self.body, self._received = bytes(self._received), bytearray()
            self.complete.set_result(None)

    def on_failure(self, failure: Failure) -> None:
        """A value: an exception in the future would be part of a cycle with the frame that awaits it."""
        if not self.complete.done():
            self.failure, self._received = failure, bytearray()
            self.complete.set_result(None)


class ConnectionPool:
    """The connections to an endpoint's URL.

    `connect_to`: IP address to use instead of resolving the URL's host; Host header and TLS name stay the URL's.
    `receive_buffer`: bytes; None: the kernel's choice. `coalescer`: may be shared by several pools. `proxy`: every
    connection is a tunnel through this proxy, which resolves the host.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        idle_timeout: float = 4.0,
        max_age: float = MAX_AGE,
        tls: ssl.SSLContext | None = None,
        max_idle: int = 256,
        receive_buffer: int | None = None,
        coalescer: WriteCoalescer | None = None,
        connect_to: str = "",
        proxy: ProxyAddress | None = None,
    ) -> None:
        self.address = BackendAddress.parse(url)
        self.coalescer = coalescer or WriteCoalescer()
        self.stale_retries = 0
        self.network = NetworkTime(measures=proxy is None)
        self._connect_to = connect_to or self.address.host
        self._proxy = proxy
        self._by_name = not _is_ip_address(self._connect_to)
        self._max_age = max_age if self._by_name else inf
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._tls = (tls or _default_tls()) if self.address.tls else None
        self._max_idle = max_idle
        self._receive_buffer = receive_buffer
        self._idle: dict[Connection, float] = {}  # idle since; the most recent last
        self._open = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._resends: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<ConnectionPool {self.address.authority} idle={self.idle} active={self.active}>"

    @property
    def idle(self) -> int:
        """Connections without a request."""
        return len(self._idle)

    @property
    def active(self) -> int:
        """Connections with a request, or about to close."""
        return self._open - len(self._idle)

    def network_s(self) -> tuple[float, float]:
        """Seconds of a round trip, 0 where not known; and until a request sent now is on the wire: of a new connection,
        0 while one is idle."""
        return self.network.rtt, 0.0 if self._idle else self.network.setup_s

    def start(self, call: HttpCall, sink: Sink) -> Exchange | None:
        """Send on an idle connection, at once; None if there is none."""
        exchange = self._exchange(call, sink)
        return exchange if self._send_on_idle(exchange) else None

    async def open(self, call: HttpCall, sink: Sink) -> Exchange:
        """Send, connecting if need be. Raises TransportError if connecting fails; later failures go to the sink."""
        exchange = self._exchange(call, sink)
        if not self._send_on_idle(exchange):
            await self._send_on_new(exchange)
        return exchange

    async def fetch(self, call: HttpCall, timeout: float, limit: int = 8 << 20) -> BufferedReply:
        """A whole reply of at most `limit` bytes within `timeout` seconds. Raises TransportError."""
        reply = BufferedReply(limit)
        try:
            async with self._limit(timeout):
                exchange = await self.open(call, reply)
                try:
                    await reply.complete
                finally:
                    exchange.cancel()
        except TimeoutError:
            raise TransportError(failures.of_silence(timeout)) from None
        if reply.failure is not None:
            raise TransportError(reply.failure)
        return reply

    @staticmethod
    def _limit(seconds: float) -> AbstractAsyncContextManager[object]:
        return LoopAwareTimer(STALL, read_first=seconds).timeout(seconds)

    async def close(self) -> None:
        """Close idle connections now, and busy connections at their end: a reload breaks no stream."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        while self._idle:
            self._idle.popitem()[0].abandon()
        await asyncio.sleep(0)  # a turn of the loop: the sockets are closed

    def _exchange(self, call: HttpCall, sink: Sink) -> Exchange:
        """Render a request. Raises ValueError for a line break within a header (header injection)."""
        address = self.address
        head = f"{call.method} {address.target(call.path)} HTTP/1.1\r\nhost: {address.authority}\r\n"
        for name, value in call.headers.items():
            field = f"{name}: {value}"
            if "\n" in field or "\r" in field:
                raise ValueError("a header of this request holds a line break")
            head += field + "\r\n"
        if call.body or call.method not in ("GET", "HEAD"):
            head += f"content-length: {len(call.body)}\r\n"
        request = f"{head}\r\n".encode("utf-8", "surrogateescape") + call.body
        return Exchange(request, sink, bodyless=call.method == "HEAD")

    def _send_on_idle(self, exchange: Exchange) -> bool:
        """Send on the most recently used idle connection. If too old, all are."""
        while self._idle:
            connection, since = self._idle.popitem()
            if monotonic() - since < self._idle_timeout and connection.send(exchange):
                exchange.reused = True
                return True
            connection.abandon()
        return False

    async def _send_on_new(self, exchange: Exchange) -> None:
        began = monotonic()
        connection = await self._connect()
        exchange.reused = False
        now = monotonic()
        exchange.connect_seconds = now - began
        self.network.on_connected(connection.socket, now - began, tls=self._tls is not None, now=now)
        connection.send(exchange)

    async def _connect(self) -> Connection:
        connection = Connection(self)
        try:
            async with self._limit(self._connect_timeout):
                transport = await (
                    self._connect_directly(connection) if self._proxy is None else self._tunnel(connection)
                )
            if not connection.usable:
                raise ConnectionAbortedError  # closed by the server, or bytes arrived, before the request
        except (OSError, UnicodeError) as error:
            connection.connection_lost(error)
            raise TransportError(
                failures.of_connect(error, self._connect_timeout, accepted=connection.accepted)
            ) from error
        except asyncio.CancelledError:
            connection.connection_lost(None)  # uvloop may have connected just now, and ends this without a callback
            raise
        self._set_options(transport.get_extra_info("socket"))
        return connection

    async def _connect_directly(self, connection: Connection) -> asyncio.Transport:
        host, port = self._connect_to, self.address.port
        name = self.address.host if self.address.tls else None
        loop = asyncio.get_running_loop()
        connect = partial(loop.create_connection, lambda: connection, ssl=self._tls, server_hostname=name)
        if self._by_name:
            sock = await connected_socket(host, port, self._connect_timeout, partial(is_allowed, host))
            connection.accepted = self._tls is not None
            transport, _ = await connect(sock=sock)
        else:
            transport, _ = await connect(host, port)
        return transport

    async def _tunnel(self, connection: Connection) -> asyncio.Transport:
        assert self._proxy is not None
        host = f"[{self._connect_to}]" if ":" in self._connect_to else self._connect_to
        transport = await open_tunnel(self._proxy, f"{host}:{self.address.port}", self._connect_timeout)
        try:
            if self._tls is not None:
                name = self.address.host
                loop = asyncio.get_running_loop()
                secured = await loop.start_tls(transport, connection, self._tls, server_hostname=name)
                if secured is None:
                    raise ConnectionAbortedError
                transport = secured
            else:
                transport.set_protocol(connection)
        except BaseException:
            transport.abort()
            raise
        connection.connection_made(transport)
        if self._tls is None:
            transport.resume_reading()
        return transport

    def _set_options(self, sock: socket.socket) -> None:
        for level, option, value in KEEP_ALIVE:
            sock.setsockopt(level, option, value)
        if self._receive_buffer is not None:
            sock.setsockopt(SOL_SOCKET, SO_RCVBUF, self._receive_buffer)

    def _expire(self) -> None:
        """Close connections idle too long. A single timer per pool."""
        self._expiry = None
        now = monotonic()
        while self._idle:
            oldest, since = next(iter(self._idle.items()))
            if since + self._idle_timeout > now + _CLOCK_GRAIN:
                delay = since + self._idle_timeout - now
                self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)
                return
            del self._idle[oldest]
            oldest.abandon()

    def opened(self) -> None:
        self._open += 1

    def release(self, connection: Connection) -> None:
        now = monotonic()
        if self._closed or len(self._idle) >= self._max_idle or now - connection.born > self._max_age:
            connection.abandon()
            return
        self._idle[connection] = now
        if now >= self.network.read_at:
            self.network.on_idle(connection.socket, now)
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._idle_timeout, self._expire)

    def lost(self, connection: Connection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)

    def resend(self, exchange: Exchange) -> bool:
        if not exchange.reused or monotonic() - exchange.sent_at > RESEND_WINDOW:
            return False
        self.stale_retries += 1
        task = asyncio.get_running_loop().create_task(self._send_again(exchange))
        exchange.carrier = task
        self._resends.add(task)
        task.add_done_callback(self._resends.discard)
        return True

    async def _send_again(self, exchange: Exchange) -> None:
        try:
            await self._send_on_new(exchange)
        except TransportError as error:
            exchange.sink.on_failure(error.failure)


def _is_ip_address(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


@cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the system's certificates takes some 20 ms
