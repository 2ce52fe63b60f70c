"""gRPC over HTTP/2, as a server: calls with messages in both directions, on `h2`.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. A message is five bytes (compressed or not, length) and
its own. Rules:
- One task serves a call. A reset, or the loss of the connection, cancels it.
- What a peer sends is acknowledged (flow control) when the call has read it, and while the peer reads the answers: an
  unread call holds one window, in each direction.
- Bounds: calls of a connection, bytes of a message, and of messages not yet whole of all calls (`Intake`), resets; a
  peer beyond them loses the call, or the connection.
- A peer that does not read what is written is not read.
- Compressed messages are refused: Envoy sends none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes

from gateway.downstream.intake import Intake

log = logging.getLogger("firsttoken")

MAX_CALLS = 10_000  # of a connection at a time
MAX_MESSAGE = 64 << 20  # bytes
WINDOW = 1 << 20  # bytes that a call, and 16 times as many that a connection may send unread
MAX_RESETS, RESET_PERIOD = 5_000, 10.0  # calls given up by the peer within so many s: a flood
PREFIX = 5  # bytes before a message
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13  # grpc-status


class GrpcError(Exception):
    """The end of a call other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Call:
    """One call: messages in by iteration, out by `send`."""

    def __init__(self, connection: GrpcConnection, stream: int, path: str) -> None:
        self.path = path
        self._connection = connection
        self._stream = stream
        self._received = bytearray()
        self._unacknowledged = 0
        self._is_over = False  # the peer sends no more
        self._news = asyncio.Event()

    def send(self, message: bytes) -> None:
        self._connection.write(self._stream, b"\x00" + len(message).to_bytes(4, "big") + message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises GrpcError."""
        while True:
            if (message := self._next()) is not None:
                yield message
            elif self._is_over:
                return
            else:
                self._news.clear()
                await self._news.wait()

    def _next(self) -> bytes | None:
        received = self._received
        if len(received) < PREFIX:
            self._acknowledge()
            return None
        if received[0]:
            raise GrpcError(UNIMPLEMENTED, "compressed messages are not taken")
        size = int.from_bytes(received[1:PREFIX], "big")
        if size > MAX_MESSAGE:
            raise GrpcError(RESOURCE_EXHAUSTED, f"a message is longer than {MAX_MESSAGE} bytes")
        if len(received) < PREFIX + size:
            if (busy := self._connection.intake.too_many_bytes(size)) is not None:
                raise GrpcError(RESOURCE_EXHAUSTED, busy.message)
            self._acknowledge()
            return None
        message = bytes(received[PREFIX : PREFIX + size])
        self._drop(PREFIX + size)
        self._acknowledge()
        return message

    def _drop(self, size: int) -> None:
        self._connection.intake.body_bytes -= size
        del self._received[:size]

    def _acknowledge(self) -> None:
        """The rest of a message that is begun may come."""
        if self._unacknowledged and self._connection.unsent(self._stream) <= WINDOW:
            self._connection.acknowledge(self._stream, self._unacknowledged)
            self._unacknowledged = 0

    # -- of the connection --------------------------------------------------------------

    def feed(self, data: bytes, flow_controlled: int) -> None:
        self._received += data
        self._connection.intake.body_bytes += len(data)
        self._unacknowledged += flow_controlled
        self._news.set()

    def feed_eof(self) -> None:
        self._is_over = True
        self._news.set()

    def on_sent(self) -> None:
        """The peer has read some of the answers."""
        self._acknowledge()

    def release(self) -> None:
        """The call is over: what was not read counts for the connection's window."""
        self._drop(len(self._received))
        if self._unacknowledged:
            self._connection.acknowledge(self._stream, self._unacknowledged)
            self._unacknowledged = 0


@dataclass(slots=True)
class Outbox:
    """Messages that wait for the peer's window, and the end."""

    data: deque[bytes] = field(default_factory=deque)
    size: int = 0
    trailers: list[tuple[str, str]] | None = None


Handler = Callable[[Call], Awaitable[None]]


class GrpcConnection(asyncio.Protocol):
    """One connection of a peer. `handler`: serves a call."""

    def __init__(self, handler: Handler, connections: set[GrpcConnection], intake: Intake) -> None:
        self.intake = intake
        self._handler = handler
        self._connections = connections
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1", logger=None))
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._resets: deque[float] = deque()
        self._flush_due = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._h2.initiate_connection()
        self._h2.update_settings(
            {SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CALLS, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW}
        )
        self._h2.increment_flow_control_window(16 * WINDOW)
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._on_event(event)
        except ProtocolError as error:
            log.info("picker: a peer breaks HTTP/2: %s", error)
            self._flush()
            self.close()
        else:
            self._flush()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        for task in self._tasks.values():
            task.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self._tasks.values()]

    def _on_event(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived(stream_id=stream, data=data, flow_controlled_length=size):
                if (call := self._calls.get(stream or 0)) is not None:
                    call.feed(data or b"", size or 0)
                elif size:
                    self._h2.acknowledge_received_data(size, stream or 0)
            case StreamEnded(stream_id=stream):
                if (call := self._calls.get(stream or 0)) is not None:
                    call.feed_eof()
            case StreamReset(stream_id=stream):
                self._on_reset(stream or 0)
            case WindowUpdated(stream_id=stream):
                for waiting in [stream] if stream else [*self._outboxes]:
                    self._pump(waiting)
            case ConnectionTerminated():
                self.close()

    def _begin(self, event: RequestReceived) -> None:
        stream = event.stream_id or 0
        headers = {str(name): str(value) for name, value in event.headers or ()}
        call = self._calls[stream] = Call(self, stream, headers.get(":path", ""))
        self._outboxes[stream] = Outbox()
        task = self._tasks[stream] = asyncio.get_running_loop().create_task(self._serve(stream, call))
        task.add_done_callback(lambda _: self._on_served(stream))

    def _on_reset(self, stream: int) -> None:
        """The peer has given a call up."""
        if (task := self._tasks.get(stream)) is not None:
            task.cancel()
        now = monotonic()
        self._resets.append(now)
        while self._resets and now - self._resets[0] > RESET_PERIOD:
            self._resets.popleft()
        if len(self._resets) > MAX_RESETS:
            log.warning(
                "picker: a peer gave up %d calls within %g s; its connection is closed", MAX_RESETS, RESET_PERIOD
            )
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._flush()
            self.close()

    async def _serve(self, stream: int, call: Call) -> None:
        status, message = OK, ""
        try:
            self._h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            await self._handler(call)
        except GrpcError as error:
            status, message = error.status, str(error)
        except H2Error:  # the peer has given the call up
            return
        except Exception:
            log.exception("picker: internal error")
            status, message = INTERNAL, "internal error"
        if (outbox := self._outboxes.get(stream)) is not None:
            outbox.trailers = [("grpc-status", str(status)), *([("grpc-message", message)] if message else [])]
            self._pump(stream)

    def _on_served(self, stream: int) -> None:
        self._tasks.pop(stream, None)
        if (outbox := self._outboxes.get(stream)) is not None and outbox.trailers is None:
            del self._outboxes[stream]  # cancelled
        if (call := self._calls.pop(stream, None)) is not None:
            call.release()

    # -- out ----------------------------------------------------------------------------

    def write(self, stream: int, data: bytes) -> None:
        """Send as much as the peer's window allows; the rest follows."""
        if (outbox := self._outboxes.get(stream)) is not None:
            outbox.data.append(data)
            outbox.size += len(data)
            self._pump(stream)

    def unsent(self, stream: int) -> int:
        outbox = self._outboxes.get(stream)
        return 0 if outbox is None else outbox.size

    def acknowledge(self, stream: int, size: int) -> None:
        with suppress(H2Error):  # the stream is over
            self._h2.acknowledge_received_data(size, stream)
        self._flush_soon()

    def _pump(self, stream: int) -> None:
        if (outbox := self._outboxes.get(stream)) is None:
            return
        try:
            self._send(stream, outbox)
        except H2Error:  # the peer has given the call up
            del self._outboxes[stream]
        if outbox.trailers is not None and not outbox.data:
            self._outboxes.pop(stream, None)
        elif (call := self._calls.get(stream)) is not None:
            call.on_sent()
        self._flush_soon()

    def _send(self, stream: int, outbox: Outbox) -> None:
        while outbox.data:
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            piece = outbox.data.popleft()
            if len(piece) > room:
                outbox.data.appendleft(piece[room:])
                piece = piece[:room]
            outbox.size -= len(piece)
            self._h2.send_data(stream, piece)
        if outbox.trailers is not None:
            self._h2.send_headers(stream, outbox.trailers, end_stream=True)

    def _flush_soon(self) -> None:
        """One write for all that is sent in a turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        data = self._h2.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)


class GrpcServer:
    """Makes connections for `loop.create_server`."""

    def __init__(self, handler: Handler, intake: Intake) -> None:
        self._handler = handler
        self._intake = intake
        self._connections: set[GrpcConnection] = set()

    def __call__(self) -> GrpcConnection:
        return GrpcConnection(self._handler, self._connections, self._intake)

    async def shutdown(self, grace: float) -> None:
        """Calls in progress have `grace` seconds; the health service keeps new ones away."""
        if tasks := [task for connection in self._connections for task in connection.tasks]:
            await asyncio.wait(tasks, timeout=grace)
        for connection in [*self._connections]:
            connection.close()
