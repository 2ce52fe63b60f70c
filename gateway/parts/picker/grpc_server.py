"""gRPC over HTTP/2, as a server: calls with messages in both directions.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. A message is a prefix of five bytes (compressed or not,
length) and its content. Frames and windows are those of `h2`, by way of `backends.http2.server`. Rules:
- One task serves a call. A reset, or the loss of the connection, cancels it.
- Bytes of a peer are acknowledged (flow control) when the call has read them and wants more, and while the peer reads
  the answers: an unread call holds one window, in each direction.
- Bounds: calls of a connection, bytes of a message, and of messages not yet whole of all calls (`Intake`), resets, and
  frames (`Http2Server`); a peer beyond them loses the call, or the connection.
- A peer that does not read what is written is not read.
- No call and no connection keeps the loop: others are served between MESSAGES messages of a call, fewer where they are
  long, and between FRAMES frames of a connection (`backends.http2.frame_walk`).
- GOAWAY (`drain`) keeps new calls away and lets those in progress end; the connection is closed behind the last one.
- Compressed messages are refused: Envoy sends none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from time import monotonic
from typing import cast
from urllib.parse import quote

from h2.errors import ErrorCodes
from hpack import NeverIndexedHeaderTuple

from backends.http2.frame_walk import Http2Error
from backends.http2.server import (
    AnswerSent,
    DataReceived,
    Event,
    Headers,
    Http2Server,
    PeerLeaves,
    PingAcknowledged,
    RequestEnded,
    RequestReceived,
    StreamReset,
)
from gateway.downstream.limits import Intake
from gateway.parts.picker.connection_table import ConnectionTable

log = logging.getLogger("firsttoken")

MAX_CALLS = 1_000  # of a connection at a time
MAX_MESSAGE = 1 << 20  # bytes, unless the handler of a call allows more
MESSAGES, KB = 100, 1 << 10  # of a call, handled in a turn of the loop; each counts once more for every KB
WINDOW = 1 << 20  # bytes that a call, and 16 times as many that a connection may send unread
CHECK = 5.0  # s
PREFACE_WITHIN, PING_AFTER, DEAD_AFTER, IDLE = 1, 6, 12, 60  # checks: without a byte of the peer; without a call
PREFIX = 5  # bytes before a message
PRESENT_PING, DRAIN_PING = b"present?", b"draining"  # the latter is answered when the peer has read GOAWAY
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 3, 8, 12, 13, 14  # grpc-status
HEADERS = ((":status", "200"), ("content-type", "application/grpc"))
TRAILERS = (("grpc-status", str(OK)),)
PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class GrpcError(Exception):
    """The end of a call other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageTooLongError(GrpcError):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(RESOURCE_EXHAUSTED, f"a message of {size} bytes is longer than {limit}")


class Call:
    """One call: messages in by iteration, out by `send`. Settings of the handler: `max_message`, bytes; `has_no_end`:
    nobody waits for its end."""

    def __init__(self, connection: GrpcConnection, stream: int, path: str) -> None:
        self.path = path
        self.max_message = MAX_MESSAGE
        self.has_no_end = False
        self.is_ended = False  # for the peer; its handler may go on
        self._connection = connection
        self._stream = stream
        self._received = bytearray()
        self._unacknowledged = 0
        self._is_over = False  # the peer sends no more
        self._news: asyncio.Future[None] | None = None  # awaited by the handler

    def send(self, message: bytes) -> None:
        self._connection.write(self._stream, b"\x00" + len(message).to_bytes(4, "big") + message)

    def end(self) -> None:
        """Ends the call with OK. What the peer still sends is not read; the handler goes on, until the connection is
        lost."""
        self.is_ended = True
        self._connection.end(self._stream)
        self.release()

    @property
    def peer(self) -> object:
        """The same for all calls of a connection."""
        return self._connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises GrpcError."""
        count = 0
        while True:
            if (message := self._next()) is not None:
                yield message
                if (count := count + 1 + len(message) // KB) >= MESSAGES:
                    count = 0
                    await asyncio.sleep(0)
            elif self._is_over:
                return
            else:
                self._news = asyncio.get_running_loop().create_future()
                await self._news

    def _next(self) -> bytes | None:
        received = self._received
        if len(received) < PREFIX:
            self._acknowledge()
            return None
        if received[0]:
            raise GrpcError(UNIMPLEMENTED, "compressed messages are not taken")
        size = int.from_bytes(received[1:PREFIX], "big")
        if size > self.max_message:
            raise MessageTooLongError(size, self.max_message)
        if len(received) < PREFIX + size:
            if (busy := self._connection.intake.too_many_bytes(size)) is not None:
                raise GrpcError(RESOURCE_EXHAUSTED, busy.message)
            self._acknowledge()
            return None
        message = bytes(received[PREFIX : PREFIX + size])
        self._drop(PREFIX + size)
        if not received:  # else what is left would be acknowledged unread
            self._acknowledge()
        return message

    def _drop(self, size: int) -> None:
        self._connection.intake.body_bytes -= size
        del self._received[:size]

    def _acknowledge(self) -> None:
        """Lets the peer send more, unless too many answers wait for it."""
        if self._unacknowledged and self._connection.unsent(self._stream) <= WINDOW:
            self._return_window()

    def _return_window(self) -> None:
        if self._unacknowledged:
            self._connection.acknowledge(self._stream, self._unacknowledged)
            self._unacknowledged = 0

    # -- of the connection --------------------------------------------------------------

    def feed(self, data: bytes, flow_controlled: int) -> None:
        self._unacknowledged += flow_controlled
        if self.is_ended:
            self._return_window()
            return
        self._received += data
        self._connection.intake.body_bytes += len(data)
        self._wake()

    def feed_eof(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def on_sent(self) -> None:
        """The peer has read some of the answers."""
        if self._news is not None and not self._news.done():  # the call has read all, and waits
            self._acknowledge()

    def release(self) -> None:
        """The call is over: its unread bytes go back to the window of the connection."""
        self._drop(len(self._received))
        self._return_window()


def trailers(status: int, message: str) -> Headers:
    """Of a call that fails. The message is percent-encoded: it may quote the peer. No table of header compression keeps
    it: the peer says how large that may be."""
    quoted = quote(message, safe=PRINTABLE)
    return (("grpc-status", str(status)), NeverIndexedHeaderTuple("grpc-message", quoted))


class ConnectionState(Enum):
    """DRAINING: GOAWAY is sent. DRAINED: the peer has read it, and begins no call."""

    OPEN = "open"
    DRAINING = "draining"
    DRAINED = "drained"


Handler = Callable[[Call], Awaitable[None]]


class GrpcConnection(asyncio.Protocol):
    """One connection of a peer. `handler`: serves a call."""

    def __init__(self, handler: Handler, connections: ConnectionTable[GrpcConnection], intake: Intake) -> None:
        self.intake = intake
        self._handler = handler
        self._connections = connections
        self._http2 = Http2Server(MAX_CALLS, WINDOW, 16 * WINDOW)
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._state = ConnectionState.OPEN
        self._silent_for = self._idle_for = 0  # checks
        self._has_begun = self._flush_due = self._is_rest_due = False
        self._is_read_paused = self._is_write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._connections.admit(self, (transport.get_extra_info("peername") or ("",))[0]):
            self.intake.count_refused("connections")
            transport.close()
            return
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._http2.start()
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._has_begun:
            self._silent_for = 0
        self._handle(data)

    def _handle(self, data: bytes) -> None:
        """Handles as many frames as a turn of the loop may."""
        try:
            for event in self._http2.receive(data, monotonic()):
                self._on_event(event)
        except Http2Error as error:
            log.info("picker: a peer breaks HTTP/2: %s", error)
            self.close(error.code)
            return
        if not self._has_begun and self._http2.has_preface:
            self._has_begun = True
            self._connections.begin(self)
        self._flush_soon()  # behind the calls that were woken
        self._close_if_drained()
        self._read_on()

    def _handle_rest(self) -> None:
        self._is_rest_due = False
        if self._transport is not None and not self._transport.is_closing():
            self._handle(b"")

    def _read_on(self) -> None:
        """Unless frames wait, or answers that the peer does not read."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._http2.is_behind and not self._is_rest_due:
            self._is_rest_due = True
            asyncio.get_running_loop().call_soon(self._handle_rest)
        must_pause = self._http2.is_behind or self._is_write_paused
        if must_pause is not self._is_read_paused:
            self._is_read_paused = must_pause
            (self._transport.pause_reading if must_pause else self._transport.resume_reading)()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._read_on()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        for task in self._tasks.values():
            task.cancel()

    def drain(self) -> None:
        """The peer begins no more calls here. The connection is closed behind the last one, once the peer knows."""
        if self._state is ConnectionState.OPEN and self._transport is not None:
            self._state = ConnectionState.DRAINING
            self._http2.drain()
            self._http2.ping(DRAIN_PING)
            self._flush()

    def check(self) -> None:
        """Called every CHECK seconds: by number of checks, a stopped process takes no peer for dead."""
        self._silent_for += 1
        self._idle_for = 0 if self._tasks else self._idle_for + 1
        if self._silent_for > (DEAD_AFTER if self._has_begun else PREFACE_WITHIN):
            self.abort()
        elif self._silent_for > PING_AFTER:
            self._http2.ping(PRESENT_PING)
            self._flush()
        if self._idle_for > IDLE:
            self.drain()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self, error: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._http2.close(error)
            self._flush()
            self._transport.close()

    def _close_if_drained(self) -> None:
        if self._state is ConnectionState.DRAINED and not self.tasks and not self._http2.has_unsent:
            self.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the calls whose end is to be waited for."""
        return [task for stream, task in self._tasks.items() if not self._calls[stream].has_no_end]

    def _on_event(self, event: Event) -> None:
        match event:
            case DataReceived():
                if (call := self._calls.get(event.stream)) is not None:
                    call.feed(event.data, event.size)
                else:
                    self._http2.acknowledge(event.stream, event.size)
            case RequestEnded():
                if (call := self._calls.get(event.stream)) is not None:
                    call.feed_eof()
            case RequestReceived():
                self._begin(event)
            case AnswerSent():
                if (call := self._calls.get(event.stream)) is not None:
                    call.on_sent()
            case StreamReset():
                if (task := self._tasks.get(event.stream)) is not None and not self._calls[event.stream].is_ended:
                    task.cancel()
            case PingAcknowledged():
                if event.data == DRAIN_PING:
                    self._state = ConnectionState.DRAINED
            case PeerLeaves():
                self._state = ConnectionState.DRAINED

    def _begin(self, event: RequestReceived) -> None:
        stream = event.stream
        call = self._calls[stream] = Call(self, stream, event.path)
        task = self._tasks[stream] = asyncio.get_running_loop().create_task(self._serve(stream, call))
        task.add_done_callback(partial(self._on_served, stream))

    async def _serve(self, stream: int, call: Call) -> None:
        status, message = OK, ""
        self._http2.headers(stream, HEADERS)
        try:
            await self._handler(call)
        except GrpcError as error:
            status, message = error.status, str(error)
        except Exception:
            log.exception("picker: internal error")
            status, message = INTERNAL, "internal error"
        self.end(stream, status, message)

    def end(self, stream: int, status: int = OK, message: str = "") -> None:
        self._http2.end(stream, TRAILERS if status == OK else trailers(status, message))
        self._flush_soon()

    def _on_served(self, stream: int, task: asyncio.Task[None]) -> None:
        with suppress(asyncio.CancelledError):
            task.exception()  # kept by a cancelled task till it is asked for, with frames that may refer to the task
        self._tasks.pop(stream, None)
        if (call := self._calls.pop(stream, None)) is not None:
            call.release()
        self._idle_for = 0
        self._close_if_drained()

    # -- out ----------------------------------------------------------------------------

    def write(self, stream: int, data: bytes) -> None:
        self._http2.data(stream, data)
        self._flush_soon()

    def unsent(self, stream: int) -> int:
        return self._http2.unsent(stream)

    def acknowledge(self, stream: int, size: int) -> None:
        self._http2.acknowledge(stream, size)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """One write for all that is sent in a turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        data = self._http2.take()
        if data and self._transport is not None:
            self._transport.write(data)
