"""HTTP/2 as a server of gRPC on `h2`, without I/O: bytes in and events out.

Rules:
- `h2` has the protocol: frames, header compression, states of streams, windows. Bounds that it lacks are here and in
  `FrameWalk`: work in a turn of the loop, header blocks, floods.
- `receive` turns bytes into events; `take` returns the bytes to write. A peer that breaks the protocol or a bound loses
  the connection (`Http2Error`: the caller closes it behind `close`).
- Bytes of a stream are acknowledged by its reader (`acknowledge`). Answers beyond a window wait here.
- GOAWAY, of the peer and of `drain`, is kept from `h2`, which would end all streams: calls in progress end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from h2 import events as h2
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hpack import NeverIndexedHeaderTuple

from backends.http2.frame_walk import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    PERIOD,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    Flood,
    FloodMeter,
    FrameHead,
    FrameWalk,
    Http2Error,
)

FIRST_WINDOW = 65_535  # bytes of a connection, by RFC 9113
MAX_LIST = 1 << 16  # SETTINGS_MAX_HEADER_LIST_SIZE: bytes of all headers of a block, decoded
ACK = 0x1
_EMPTY = {PRIORITY, SETTINGS, PING, GOAWAY}  # and unknown types; DATA is counted by its content
_OF_STREAMS = (DATA, HEADERS, RST_STREAM)  # that a peer may still send of a stream that is over
_GOAWAY = b"\x00\x00\x08\x07\x00" + bytes(4) + b"\x7f\xff\xff\xff" + bytes(4)  # no error, and any stream is served
Headers = Sequence[tuple[str, str] | NeverIndexedHeaderTuple]


@dataclass(slots=True)
class RequestReceived:
    stream: int
    path: str


@dataclass(slots=True)
class DataReceived:
    """`size`: bytes to be acknowledged, padding included."""

    stream: int
    data: bytes
    size: int


@dataclass(slots=True)
class RequestEnded:
    stream: int


@dataclass(slots=True)
class StreamReset:
    """By the peer, or for an error of the peer."""

    stream: int


@dataclass(slots=True)
class AnswerSent:
    """More of an answer that waited for a window."""

    stream: int


@dataclass(slots=True)
class PingAcknowledged:
    data: bytes


@dataclass(slots=True)
class PeerLeaves:
    """GOAWAY: the peer begins no more streams."""


Event = RequestReceived | DataReceived | RequestEnded | StreamReset | AnswerSent | PingAcknowledged | PeerLeaves


@dataclass(slots=True)
class Stream:
    """`outbox`: waits for a window. `trailers`: the end of the answer, behind the outbox."""

    id: int
    outbox: deque[bytes] = field(default_factory=deque)
    unsent: int = 0  # bytes in the outbox
    trailers: Headers | None = None
    is_answered: bool = False  # with DATA, if only in part
    is_read: bool = False  # the peer has ended its side (END_STREAM)
    is_ended: bool = False  # the server has ended its side


class Http2Server:
    """State of one connection.

    `max_streams`: open at a time. `window`: bytes that one stream may send unread; `connection_window`: all streams.
    """

    def __init__(self, max_streams: int, window: int, connection_window: int) -> None:
        self._h2 = H2Connection(
            H2Configuration(client_side=False, validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        settings = {
            SettingCodes.MAX_CONCURRENT_STREAMS: max_streams,
            SettingCodes.INITIAL_WINDOW_SIZE: window,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_LIST,
        }
        self._h2.local_settings = Settings(client=False, initial_values=settings)  # hold before the peer has read them
        self._connection_window = connection_window
        self._walk = FrameWalk()
        self._floods = FloodMeter()
        self._streams: dict[int, Stream] = {}  # that are open in a direction
        self._waiting: dict[int, Stream] = {}  # for a window
        self._last = 0  # stream begun by the peer
        self._now = 0.0
        self._is_closed = self._has_begun = False
        self._control = b""  # frames of ours beside those of h2

    def start(self) -> None:
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(self._connection_window - FIRST_WINDOW)

    def take(self) -> bytes:
        """Bytes to write."""
        data, self._control = self._control + self._h2.data_to_send(), b""
        return data

    # -- in -------------------------------------------------------------------------------

    @property
    def has_preface(self) -> bool:
        """The connection preface of HTTP/2 has arrived (RFC 9113, section 3.4)."""
        return self._walk.has_preface

    @property
    def is_behind(self) -> bool:
        """Frames wait for another `receive`, of no new bytes."""
        return self._walk.is_behind

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Events of as many frames as a turn of the loop may handle. Raises Http2Error."""
        self._now = now
        frames, heads = self._walk.read(data)
        if self._walk.has_preface and not self._has_begun:
            self._has_begun, frames = True, PREFACE + frames
        found, is_widened = list[Event](), False
        for each in self._received(frames, heads):
            is_widened = is_widened or isinstance(each, (h2.WindowUpdated, h2.RemoteSettingsChanged))
            self._translate(each, found)
        found += [PeerLeaves() for head in heads if head.kind == GOAWAY]
        return found + self._pump() if is_widened else found

    def _received(self, frames: bytes, heads: Sequence[FrameHead]) -> list[h2.Event]:
        for head in heads:
            self._count_head(head)
        if any(head.kind == GOAWAY for head in heads):
            frames = _without_goaway(frames, heads)
        try:
            return self._h2.receive_data(frames)
        except ProtocolError as error:
            self._is_closed = True  # h2 has sent GOAWAY
            raise Http2Error(error.error_code, f"{type(error).__name__}: {error}") from None

    def _translate(self, event: h2.Event, found: list[Event]) -> None:
        match event:
            case h2.DataReceived():
                if not event.data and event.stream_ended is None:
                    self._count(Flood.EMPTY)
                if event.flow_controlled_length:
                    found.append(DataReceived(event.stream_id, event.data, event.flow_controlled_length))
            case h2.RequestReceived():
                self._last = event.stream_id
                self._streams[event.stream_id] = Stream(event.stream_id)
                path = next((bytes(value) for name, value in event.headers if name == b":path"), b"")
                found.append(RequestReceived(event.stream_id, path.decode("latin-1")))
            case h2.StreamEnded():
                self._streams[event.stream_id].is_read = True
                self._forget_if_closed(self._streams[event.stream_id])
                found.append(RequestEnded(event.stream_id))
            case h2.StreamReset():
                self._on_reset(event)
                found.append(StreamReset(event.stream_id))
            case h2.PingAckReceived():
                found.append(PingAcknowledged(event.ping_data))

    def _on_reset(self, event: h2.StreamReset) -> None:
        """A peer that has read enough of an answer may end it so."""
        stream = self._streams.pop(event.stream_id, None)
        self._waiting.pop(event.stream_id, None)
        if not event.remote_reset or (stream is not None and not stream.is_ended and not stream.is_answered):
            self._count(Flood.RESETS)

    def _count_head(self, head: FrameHead) -> None:
        is_over = head.kind in _OF_STREAMS and head.stream <= self._last and head.stream not in self._streams
        if head.kind == SETTINGS and not head.flags & ACK:
            self._count(Flood.SETTINGS)
        elif is_over and head.kind != RST_STREAM:  # h2 resets the stream again
            self._count(Flood.RESETS)
        elif is_over or head.kind in _EMPTY or head.kind > CONTINUATION:
            self._count(Flood.EMPTY)

    def _count(self, kind: Flood) -> None:
        if self._floods.add(kind, self._now):
            message = f"{LIMITS[kind]} {kind.value} within {PERIOD:g} s"
            raise Http2Error(ErrorCodes.ENHANCE_YOUR_CALM, message)

    def acknowledge(self, number: int, size: int) -> None:
        """The reader of a stream has read so many bytes of it."""
        if not self._is_closed:
            self._h2.acknowledge_received_data(size, number)

    # -- out ------------------------------------------------------------------------------
    # A stream that was reset takes nothing.

    def headers(self, number: int, headers: Headers) -> None:
        if number in self._streams and not self._is_closed:
            self._h2.send_headers(number, headers)

    def data(self, number: int, data: bytes) -> None:
        """Sends as much as the windows allow; the rest follows."""
        stream = self._streams.get(number)
        if stream is not None and stream.trailers is None and not self._is_closed:
            stream.is_answered = True
            stream.outbox.append(data)
            stream.unsent += len(data)
            self._send(stream)

    def end(self, number: int, trailers: Headers) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.trailers is None and not self._is_closed:
            stream.trailers = trailers
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        while stream.outbox and (room := self._room(stream)) > 0:
            piece = stream.outbox.popleft()
            if len(piece) > room:
                stream.outbox.appendleft(piece[room:])
                piece = piece[:room]
            stream.unsent -= len(piece)
            self._h2.send_data(stream.id, piece)
        if stream.outbox:
            self._waiting[stream.id] = stream
            return
        self._waiting.pop(stream.id, None)
        if stream.trailers is not None:
            self._h2.send_headers(stream.id, stream.trailers, end_stream=True)
            stream.is_ended = True
            self._forget_if_closed(stream)

    def _forget_if_closed(self, stream: Stream) -> None:
        if stream.is_read and stream.is_ended:
            del self._streams[stream.id]

    def _room(self, stream: Stream) -> int:
        return min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size)

    def _pump(self) -> list[Event]:
        """Streams of which more was sent, since windows are wider. Called once for all frames of a read: a flood of
        WINDOW_UPDATE costs its frames alone."""
        before = [(stream, stream.unsent) for stream in self._waiting.values()]
        for stream, _ in before:
            self._send(stream)
        return [AnswerSent(stream.id) for stream, unsent in before if stream.unsent < unsent]

    def unsent(self, number: int) -> int:
        """Bytes that wait for a window."""
        stream = self._streams.get(number)
        return 0 if stream is None else stream.unsent

    @property
    def has_unsent(self) -> bool:
        """An answer, or its end, waits for a window."""
        return bool(self._waiting)

    def ping(self, data: bytes) -> None:
        """`data`: 8 bytes."""
        if not self._is_closed:
            self._h2.ping(data)

    def drain(self) -> None:
        """Tells the peer to begin no more streams; those on their way are served."""
        self._control += _GOAWAY

    def close(self, code: ErrorCodes) -> None:
        """Tells the peer why the connection ends."""
        if not self._is_closed:
            self._is_closed = True
            self._h2.close_connection(code)


def _without_goaway(frames: bytes, heads: Sequence[FrameHead]) -> bytes:
    begins = [0, *(head.end for head in heads)]
    return b"".join(frames[begin : head.end] for begin, head in zip(begins, heads, strict=False) if head.kind != GOAWAY)
