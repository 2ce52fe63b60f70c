"""HTTP/2 as a server of gRPC: a state machine without I/O, bytes in and events out (RFC 9113).

Rules:
- `receive` turns bytes into events; `take` returns the bytes to write. A peer that breaks the protocol loses the stream
  (RST_STREAM), or the connection (`Http2Error`: the caller sends GOAWAY by `close`, and closes).
- Flow control: bytes of a stream are acknowledged by its reader (`acknowledge`). The peer is told once half of a window
  is free again.
- Frames of a stream that is over are ignored: they were on their way. Its DATA counts in the window of the connection,
  and is acknowledged at once.
- Priorities and padding are ignored, as RFC 9113 allows. Nothing is pushed; `content-length` is not compared.
- Bounds: frames and header blocks (`FrameReader`), headers (`HeaderDecoder`), floods (`FloodMeter`), streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

from backends.http2.flood import LIMITS, PERIOD, Flood, FloodMeter
from backends.http2.frame_reader import Frame, FrameReader
from backends.http2.frames import (
    ACK,
    END_STREAM,
    MAX_FRAME,
    MAX_STREAM,
    MAX_WINDOW,
    PADDED,
    ErrorCode,
    FrameType,
    Http2Error,
    Http2StreamError,
    Setting,
    frame,
    goaway,
    rst_stream,
    settings_frame,
    window_update,
    without_padding,
)
from backends.http2.header_blocks import MAX_LIST, HeaderDecoder, require_valid
from backends.http2.outbound import FIRST_WINDOW, Outbound
from backends.http2.stream import Half, Stream

EARLY = 4  # times the streams that are allowed, before the peer has read how many these are


@dataclass(slots=True)
class RequestReceived:
    stream: int
    path: str
    is_last: bool


@dataclass(slots=True)
class DataReceived:
    """`size`: bytes to be acknowledged, padding included."""

    stream: int
    data: bytes
    size: int
    is_last: bool


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


Event = RequestReceived | DataReceived | StreamReset | AnswerSent | PingAcknowledged | PeerLeaves


class Http2Server:
    """State of one connection.

    `max_streams`: open at a time. `window`: bytes that one stream may send unread; `connection_window`: all streams.
    """

    def __init__(self, max_streams: int, window: int, connection_window: int) -> None:
        self._max_streams = max_streams
        self._stream_window = window
        self._connection_window = self._receivable = connection_window
        self._unreturned = 0
        self._reader = FrameReader()
        self._decoder = HeaderDecoder()
        self._floods = FloodMeter()
        self._out = Outbound()
        self._streams: dict[int, Stream] = {}
        self._last = 0  # stream begun by the peer
        self._has_settings = self._is_acknowledged = False
        self._now = 0.0
        self._events: list[Event] = []

    def start(self) -> None:
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: self._max_streams,
            Setting.INITIAL_WINDOW_SIZE: self._stream_window,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST,
        }
        self._out.put(settings_frame(settings) + window_update(0, self._connection_window - FIRST_WINDOW))

    def take(self) -> bytes:
        """Bytes to write."""
        return self._out.take()

    # -- in -------------------------------------------------------------------------------

    @property
    def has_preface(self) -> bool:
        """The peer has said that it speaks HTTP/2."""
        return self._reader.has_preface

    @property
    def is_behind(self) -> bool:
        """Frames wait for another `receive`, of no new bytes."""
        return self._reader.is_behind

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Events of as many frames as a turn of the loop may handle. Raises Http2Error."""
        self._now, self._events = now, []
        for each in self._reader.read(data):
            try:
                self._on_frame(each)
            except Http2StreamError as error:
                self._end_by_error(each.stream, error.code)
        for stream in self._out.pump():
            self._events.append(AnswerSent(stream.id))
            self._forget_if_closed(stream)
        return self._events

    def _on_frame(self, frame: Frame) -> None:
        if not self._has_settings and (frame.kind != FrameType.SETTINGS or frame.flags & ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        if (handler := _HANDLERS.get(frame.kind)) is None:  # of an extension
            self._count(Flood.EMPTY)
        else:
            handler(self, frame)

    def _on_data(self, frame: Frame) -> None:
        size = len(frame.payload)
        self._receivable -= size
        if self._receivable < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the window of the connection")
        data = without_padding(frame.flags, frame.payload) if frame.flags & PADDED else frame.payload
        if (stream := self._known(frame)) is None:
            self._return(size)
            return
        stream.receivable -= size
        if stream.peer is Half.CLOSED or stream.receivable < 0:
            self._return(size)
            closed = stream.peer is Half.CLOSED
            raise Http2StreamError(ErrorCode.STREAM_CLOSED if closed else ErrorCode.FLOW_CONTROL_ERROR)
        is_last = bool(frame.flags & END_STREAM)
        if not data and not is_last:
            self._count(Flood.EMPTY)
        self._events.append(DataReceived(stream.id, data, size, is_last))
        if is_last:
            self._end_of_peer(stream)

    def _on_headers(self, frame: Frame) -> None:
        if (number := frame.stream) % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a client begins stream {number}")
        if number <= self._last:
            self._on_trailers(frame)
            return
        self._last = number
        path = self._decoder.path(frame.payload)
        if len(self._streams) >= self._max_streams * (1 if self._is_acknowledged else EARLY):
            raise Http2StreamError(ErrorCode.REFUSED_STREAM)
        stream = self._streams[number] = Stream(number, self._out.initial_window, self._stream_window)
        is_last = bool(frame.flags & END_STREAM)
        self._events.append(RequestReceived(number, path, is_last))
        if is_last:
            stream.peer = Half.CLOSED

    def _on_trailers(self, frame: Frame) -> None:
        trailers = self._decoder.decode(frame.payload)
        stream = self._streams.get(frame.stream)
        if stream is None or stream.peer is Half.CLOSED:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED)
        require_valid(trailers)
        if not frame.flags & END_STREAM:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
        self._events.append(DataReceived(stream.id, b"", 0, True))
        self._end_of_peer(stream)

    def _on_priority(self, frame: Frame) -> None:
        self._count(Flood.EMPTY)
        if not frame.stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        require_size(frame, 5)

    def _on_rst_stream(self, frame: Frame) -> None:
        require_size(frame, 4)
        if (stream := self._known(frame)) is None:
            return
        if stream.server is Half.OPEN and not stream.is_answered:  # else the peer has read enough of the answer
            self._count(Flood.RESETS)
        self._drop(stream)

    def _on_settings(self, frame: Frame) -> None:
        require_no_stream(frame)
        if frame.flags & ACK:
            require_size(frame, 0)
            self._is_acknowledged = True
            return
        self._has_settings = True
        self._count(Flood.SETTINGS)
        if len(frame.payload) % 6:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with a part of a setting")
        settings = [*_SETTING.iter_unpack(frame.payload)]
        for key, value in settings:
            require_valid_setting(key, value)
        if (window := dict(settings).get(Setting.INITIAL_WINDOW_SIZE)) is not None:
            self._out.set_initial_window(window, self._streams)
        self._out.put(_SETTINGS_ACK)

    def _on_push_promise(self, _: Frame) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client pushes")

    def _on_ping(self, received: Frame) -> None:
        require_no_stream(received)
        require_size(received, 8)
        self._count(Flood.EMPTY)
        if received.flags & ACK:
            self._events.append(PingAcknowledged(received.payload))
        else:
            self._out.put(frame(FrameType.PING, ACK, 0, received.payload))

    def _on_goaway(self, frame: Frame) -> None:
        require_no_stream(frame)
        if len(frame.payload) < 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(frame.payload)} bytes")
        self._events.append(PeerLeaves())

    def _on_window_update(self, frame: Frame) -> None:
        require_size(frame, 4)
        size = int.from_bytes(frame.payload, "big") & MAX_WINDOW
        if not frame.stream:
            if not size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self._out.widen(size)
        elif (stream := self._known(frame)) is not None:
            if not size:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
            self._out.widen_stream(stream, size)

    def _known(self, frame: Frame) -> Stream | None:
        """The stream of a frame; None: it is over. Raises Http2Error for one that was not begun."""
        if not 0 < frame.stream <= self._last:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{FrameType(frame.kind).name} of stream {frame.stream}")
        return self._streams.get(frame.stream)

    def _count(self, kind: Flood) -> None:
        if self._floods.add(kind, self._now):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{LIMITS[kind]} {kind.value} within {PERIOD:g} s")

    def _end_by_error(self, number: int, code: ErrorCode) -> None:
        """Raises Http2Error."""
        self._count(Flood.RESETS)
        self._out.put(rst_stream(number, code))
        if (stream := self._streams.get(number)) is not None:
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self._out.drop(stream)
        self._events.append(StreamReset(stream.id))

    def _end_of_peer(self, stream: Stream) -> None:
        stream.peer = Half.CLOSED
        self._forget_if_closed(stream)

    def _forget_if_closed(self, stream: Stream) -> None:
        if stream.is_closed:
            self._streams.pop(stream.id, None)

    # -- flow control of the peer -----------------------------------------------------------

    def acknowledge(self, number: int, size: int) -> None:
        """The reader of a stream has read so many bytes of it."""
        self._return(size)
        stream = self._streams.get(number)
        if stream is None or stream.peer is Half.CLOSED:
            return
        stream.unreturned += size
        if stream.unreturned >= self._stream_window // 2:
            self._out.put(window_update(number, stream.unreturned))
            stream.receivable += stream.unreturned
            stream.unreturned = 0

    def _return(self, size: int) -> None:
        """To the window of the connection."""
        self._unreturned += size
        if self._unreturned >= self._connection_window // 2:
            self._out.put(window_update(0, self._unreturned))
            self._receivable += self._unreturned
            self._unreturned = 0

    # -- out ------------------------------------------------------------------------------
    # A stream that was reset takes nothing.

    def headers(self, number: int, block: bytes) -> None:
        if (stream := self._streams.get(number)) is not None:
            self._out.headers(stream, block)

    def data(self, number: int, data: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.server is Half.OPEN:
            self._out.data(stream, data)

    def end(self, number: int, trailers: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.server is Half.OPEN:
            self._out.end(stream, trailers)
            self._forget_if_closed(stream)

    def unsent(self, number: int) -> int:
        """Bytes that wait for a window."""
        stream = self._streams.get(number)
        return 0 if stream is None else stream.unsent

    @property
    def has_unsent(self) -> bool:
        """An answer, or its end, waits for a window."""
        return any(stream.outbox for stream in self._streams.values())

    def ping(self, data: bytes) -> None:
        """`data`: 8 bytes."""
        self._out.put(frame(FrameType.PING, 0, 0, data))

    def drain(self) -> None:
        """Tells the peer to begin no more streams; those on their way are served."""
        self._out.put(goaway(MAX_STREAM, ErrorCode.NO_ERROR))

    def close(self, code: ErrorCode) -> None:
        """Tells the peer why the connection ends."""
        self._out.put(goaway(self._last, code))


def require_size(frame: Frame, size: int) -> None:
    """Raises Http2Error."""
    if len(frame.payload) != size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{FrameType(frame.kind).name} of {len(frame.payload)} bytes")


def require_no_stream(frame: Frame) -> None:
    """Raises Http2Error."""
    if frame.stream:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{FrameType(frame.kind).name} of stream {frame.stream}")


def require_valid_setting(key: int, value: int) -> None:
    """Settings beside these allow what is not used: indexed headers, more streams. Raises Http2Error."""
    if key == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
    if key == Setting.ENABLE_PUSH and value > 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
    if key == Setting.MAX_FRAME_SIZE and not MAX_FRAME <= value < 1 << 24:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")


_SETTING = Struct(">HL")
_SETTINGS_ACK = frame(FrameType.SETTINGS, ACK, 0)
_HANDLERS: dict[int, Callable[[Http2Server, Frame], None]] = {
    FrameType.DATA: Http2Server._on_data,
    FrameType.HEADERS: Http2Server._on_headers,
    FrameType.PRIORITY: Http2Server._on_priority,
    FrameType.RST_STREAM: Http2Server._on_rst_stream,
    FrameType.SETTINGS: Http2Server._on_settings,
    FrameType.PUSH_PROMISE: Http2Server._on_push_promise,
    FrameType.PING: Http2Server._on_ping,
    FrameType.GOAWAY: Http2Server._on_goaway,
    FrameType.WINDOW_UPDATE: Http2Server._on_window_update,
}
