"""A request of the data port and the writing of its reply: values without a connection's rules.

Rules:
- A reply is written without waiting. Every reply has a `date`; none names a library or a version.
- An error reply is in the caller's dialect.
- What waits to be read by the caller is reported to the answer.

Of a WebSocket, aiohttp opens it and reads its messages; frames are written without waiting:
- Messages are text; no compression, no subprotocol. A message has at most the size of a body, is counted with all
  bodies, and must arrive as fast as a body.
- Pings keep balancers from closing a connection that is silent. No answer is asked for: many clients answer only while
  they wait for a message, and run tools for minutes between two.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache, partial
from ipaddress import IPv6Address, IPv6Network
from time import monotonic, time
from typing import Protocol

from aiohttp import WSCloseCode, WSMsgType
from aiohttp.web import BaseRequest, WebSocketResponse

from backends.http.connection import WriteCoalescer
from backends.interface import Failure, FailureKind
from gateway.api.api_error import REASONS, ApiError
from gateway.api.dialects import error_event, error_reply
from gateway.api.inference_request import KEY_HEADERS
from gateway.api.same_origin import HOST
from gateway.downstream.limits import SMALL_BODY, body_deadline


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
        self.pending = coalescer.pending  # bytes of all sockets that wait for the end of this turn
        self.write = partial(coalescer.write, transport)  # now, or with other sockets' data in this turn of the loop
        self.write_through = partial(coalescer.write_through, transport)  # now, after all earlier data
        self.flush = partial(coalescer.flush_to, transport)

    def unsent(self) -> int:
        """Bytes that wait for the caller to read."""
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:  # of a TLS connection that was closed twice, in asyncio of Python 3.11
            return 0

    async def drain(self, timeout: float) -> None:
        """Wait until the caller has read what is written, but for a socket's buffer. Aborts after `timeout` s."""
        self.flush()
        if not self.paused:
            return
        before = self.flow_control
        self.flow_control = drained = Drained(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout):
                await drained.future
        except TimeoutError:
            self.transport.abort()
        finally:
            self.flow_control = before

    def end(self) -> None:
        """Tell the caller that nothing follows. TLS knows no half-closed connection: there the close tells it."""
        self.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def on_write_paused(self) -> None:
        self.paused = True
        if self.flow_control is not None:
            self.flow_control.on_write_paused()

    def on_write_resumed(self) -> None:
        self.paused = False
        if self.flow_control is not None:
            self.flow_control.on_write_resumed()


@dataclass(slots=True, eq=False)
class Drained:
    """Flow control of a complete answer, in the buffer of its connection."""

    future: asyncio.Future[None]

    def on_write_paused(self) -> None: ...

    def on_write_resumed(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    on_shutdown = on_write_paused  # a shutdown leaves time to send written bytes


PING = 30.0  # s between pings
CLOSE_WAIT = 1.0  # s for the peer's close frame
_TEXT = 0x81  # first byte of an unfragmented text frame (RFC 6455, section 5.2)
_PING = b"\x89\x00"

logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)  # its warnings quote subprotocols, which may hold a key


class WebSocket:
    """A caller's offer to open a WebSocket, and the socket once opened. `hold(size)` counts `size` bytes for this
    connection; it raises ApiError where all callers together hold too many."""

    def __init__(self, raw: BaseRequest, writer: ResponseWriter, max_message: int, hold: Callable[[int], None]) -> None:
        self.writer, self.max_message = writer, max_message
        self._raw = raw
        self._hold = hold
        self._opened = False
        self._kept = 0  # bytes of complete messages that wait or are served
        self._arriving = 0  # bytes since the last complete message
        self._began = self._latest = 0.0  # of an incomplete message that is large: when it became so, and its last byte
        self._socket = WebSocketResponse(
            timeout=CLOSE_WAIT, compress=False, max_msg_size=max_message, decode_text=False
        )
        self._socket.headers["server"] = "firsttoken"
        self._pings: asyncio.TimerHandle | None = None

    @property
    def is_acceptable(self) -> bool:
        """The offer is complete: a proxy in front may have taken away a part."""
        return bool(self._socket.can_prepare(self._raw))

    async def open(self) -> None:
        self.writer.flush()
        self._opened = True
        await self._socket.prepare(self._raw)
        self._pings = asyncio.get_running_loop().call_later(PING, self._ping)

    def _ping(self) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write_through(_PING)
            self._pings = asyncio.get_running_loop().call_later(PING, self._ping)

    def end(self) -> None:
        """The socket is closed, or its caller gone."""
        if self._pings is not None:
            self._pings.cancel()

    # -- messages -------------------------------------------------------------------------------

    async def receive(self) -> bytes | None:
        """The next message; None: the socket is closed. A message that is no text closes the socket."""
        message = await self._socket.receive()
        if message.type is WSMsgType.TEXT:
            self._kept, self._arriving = self._kept + len(message.data), 0
            return bytes(message.data)
        if message.type is WSMsgType.BINARY:
            await self.close(WSCloseCode.UNSUPPORTED_DATA)
        return None

    def on_bytes(self, size: int) -> None:
        """Count bytes of a message. Where all callers together hold too many, the connection is lost."""
        if not self._opened:
            return
        self._latest = monotonic()
        if self._arriving <= SMALL_BODY:
            self._began = self._latest
        self._arriving += size
        try:
            self._hold(self._kept + self._arriving)
        except ApiError:
            self.writer.transport.abort()

    def release(self, waiting: int) -> None:
        """A message has been served; `waiting`: bytes of the next one, if it has come meanwhile."""
        self._kept = waiting
        with suppress(ApiError):  # all others hold too many; these bytes are here already
            self._hold(self._kept + self._arriving)

    def is_overdue(self, now: float, limit: float) -> bool:
        """A large message has stopped or drips."""
        large = self._arriving > SMALL_BODY
        return large and now > body_deadline(limit, self._began, self._latest, self._arriving)

    def send(self, data: bytes) -> None:
        """Write a text message, unless the caller is gone."""
        if not self.writer.transport.is_closing():
            self.writer.write_through(_head(len(data)) + data)

    async def close(self, code: WSCloseCode) -> None:
        self.writer.flush()
        await self._socket.close(code=code)


def _head(size: int) -> bytes:
    """The head of a frame from a server (RFC 6455, section 5.2)."""
    if size < 126:
        return bytes((_TEXT, size))
    if size < 1 << 16:
        return bytes((_TEXT, 126)) + size.to_bytes(2, "big")
    return bytes((_TEXT, 127)) + size.to_bytes(8, "big")


UNKNOWN = "?"  # address of a caller


class PendingStream(Protocol):
    """A stream before its first token."""

    def stop(self) -> bool:
        """Write no more comments. True: the head is written."""

    def end(self, event: bytes) -> None:
        """Write the last event of a stream whose head is written."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A complete request; with `fault`, an incomplete one to be refused for that reason.

    `path` is percent-encoded as sent, without the query: decoding could hide another path. Header names are lower
    case; of repeated headers the last counts. `arrival` is the time of the first byte (monotonic, s). `model`: named by
    the path, or the id of a stored response. `query` is percent-encoded. `lines`: header lines of every answer.
    `comments`: written until the answer begins. `websocket`: offered by the caller, to be opened in place of an answer.
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
    model: str = ""
    lines: tuple[str, ...] = ()
    comments: PendingStream | None = None
    query: str = ""
    websocket: WebSocket | None = None

    def respond(self, status: int, body: bytes, lines: Iterable[str] = ()) -> None:
        """Write a JSON reply with additional header lines."""
        self.begun = True
        self.writer.write(rendered(status, body, (*self.lines, *lines), self.method, self.keep_alive))

    def refuse(self, refusal: ApiError, lines: Iterable[str] = (), request_id: str = "") -> None:
        """Write an error reply in the caller's dialect. The error may require the connection to close."""
        if refusal.close:
            self.keep_alive = False
        if self.comments is not None and self.comments.stop():
            self.comments.end(error_event(failure_of(refusal), self.path))
            return
        own = [f"{name}: {value}" for name, value in refusal.headers.items()]
        status, body = error_reply(refusal, self.path, self.headers, request_id)
        self.respond(status, body, (*own, *lines))

    @property
    def answering(self) -> bool:
        """Part of the answer itself is written: an error can no longer take its place."""
        return self.begun and self.comments is None


def caller_address(transport: asyncio.BaseTransport | None) -> str:
    """The address of a connection's other side; of IPv6 the network, which one host may fill with addresses of its
    own."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return _network(str(peer[0])) if isinstance(peer, tuple) and peer else UNKNOWN


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    if ":" not in address:
        return address
    known = IPv6Address(address)
    return str(known.ipv4_mapped or IPv6Network((known.packed, 64), strict=False))


def failure_of(refusal: ApiError) -> Failure:
    return Failure(
        FailureKind.SERVER, refusal.message, refusal.status, refusal.type, code=refusal.code, param=refusal.param
    )


def rendered(status: int, body: bytes, lines: Iterable[str], method: str, keep_alive: bool) -> bytes:
    """A complete reply; without the body in answer to HEAD."""
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        date_line(),
        "content-type: application/json",
        f"content-length: {len(body)}",
        "server: firsttoken",
        *lines,
        "" if keep_alive else "connection: close\r\n",
    ]
    return ("\r\n".join(head) + "\r\n").encode("latin-1") + (b"" if method == "HEAD" else body)


def date_line() -> str:
    """The header of every reply (RFC 9110, section 6.6.1)."""
    return _date_line(int(time()))


@lru_cache(1)
def _date_line(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}"


def framing_error(headers: Mapping[str, str], http11: bool, max_body: int) -> ApiError | None:
    """The reason to refuse a body by the head alone."""
    if (host := headers.get("host")) is not None and HOST.fullmatch(host) is None:
        return ApiError(400, "The request is not valid HTTP: invalid Host header.", close=True)
    coding = headers.get("transfer-encoding")
    if coding is not None and not http11:  # RFC 9112, section 6.1
        return ApiError(400, "Transfer-Encoding is not part of HTTP/1.0.", close=True)
    if coding is not None and coding.lower() != "chunked":
        return ApiError(400, "The only Transfer-Encoding accepted is chunked.", close=True)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "Compressed request bodies are not accepted; send it without Content-Encoding."
        return ApiError(415, message, close=True)
    return too_large(max_body) if int(headers.get("content-length", 0)) > max_body else None


def refuse_repeated_keys(names: Iterable[str]) -> None:
    """Raises ApiError for a second header with an API key: a proxy in front may have checked the first."""
    for name, times in Counter(names).items():
        if times > 1 and name in KEY_HEADERS:
            raise ApiError(400, f"The header {name} is there {times} times; send it once.", close=True)


def too_large(max_body: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_body} bytes.", code="request_too_large", close=True)
