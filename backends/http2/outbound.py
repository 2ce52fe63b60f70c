"""Frames from a server of HTTP/2 to its peer, within the windows of the peer (RFC 9113, sections 5.2 and 6.9)."""

from __future__ import annotations

from backends.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEAD,
    MAX_FRAME,
    MAX_WINDOW,
    ErrorCode,
    FrameType,
    Http2Error,
    Http2StreamError,
    frame,
)
from backends.http2.stream import Half, Stream

FIRST_WINDOW = 65_535
_DATA = int(FrameType.DATA)


class Outbound:
    """Frames for one peer, taken by `take`. Answers beyond a window wait in the outbox of their stream."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._window = self._initial = FIRST_WINDOW
        self._waiting: dict[int, Stream] = {}
        self._is_widened = False

    def put(self, data: bytes) -> None:
        self._frames.append(data)

    def take(self) -> bytes:
        data = b"".join(self._frames)
        self._frames.clear()
        return data

    @property
    def initial_window(self) -> int:
        """Of new streams."""
        return self._initial

    # -- answers --------------------------------------------------------------------------

    def headers(self, stream: Stream, block: bytes, *, is_last: bool = False) -> None:
        self.put(frame(FrameType.HEADERS, END_HEADERS | END_STREAM * is_last, stream.id, block))

    def data(self, stream: Stream, data: bytes) -> None:
        """Sends as much as the windows allow; the rest follows."""
        size, stream.is_answered = len(data), True
        if stream.outbox or size > MAX_FRAME or size > stream.sendable or size > self._window:
            stream.queue(data)
            self._send(stream)
        else:
            stream.sendable -= size
            self._put_data(stream.id, data)

    def end(self, stream: Stream, trailers: bytes) -> None:
        stream.server, stream.trailers = Half.ENDING, trailers
        self._end_if_sent(stream)

    def drop(self, stream: Stream) -> None:
        """The stream was reset."""
        self._waiting.pop(stream.id, None)
        stream.outbox.clear()
        stream.peer = stream.server = Half.CLOSED
        stream.unsent = 0

    def _put_data(self, stream: int, data: bytes) -> None:
        size = len(data)
        self._window -= size
        self._frames += HEAD.pack(size >> 8, size & 0xFF, _DATA, 0, stream), data

    def _send(self, stream: Stream) -> None:
        while stream.outbox and (room := min(stream.sendable, self._window, MAX_FRAME)) > 0:
            self._put_data(stream.id, stream.take(room))
        if stream.outbox:
            self._waiting[stream.id] = stream
        else:
            self._waiting.pop(stream.id, None)
            self._end_if_sent(stream)

    def _end_if_sent(self, stream: Stream) -> None:
        if stream.server is Half.ENDING and not stream.outbox:
            stream.server = Half.CLOSED
            self.headers(stream, stream.trailers, is_last=True)

    # -- windows of the peer --------------------------------------------------------------

    def widen(self, size: int) -> None:
        """Raises Http2Error."""
        self._window += size
        self._is_widened = True
        if self._window > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection overflows")

    def widen_stream(self, stream: Stream, size: int) -> None:
        """Raises Http2StreamError."""
        stream.sendable += size
        self._is_widened = True
        if stream.sendable > MAX_WINDOW:
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR)

    def set_initial_window(self, size: int, streams: dict[int, Stream]) -> None:
        """Of all streams, those that are open too: they may send less than nothing then. Raises Http2Error."""
        change, self._initial = size - self._initial, size
        self._is_widened = True
        for stream in streams.values():
            stream.sendable += change
            if stream.sendable > MAX_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS make a window overflow")

    def pump(self) -> list[Stream]:
        """Streams of which more was sent, since windows are wider. Called once for all frames of a read: a flood of
        WINDOW_UPDATE costs its frames alone."""
        if not self._is_widened or not self._waiting:
            return []
        self._is_widened, before = False, [(stream, stream.unsent) for stream in self._waiting.values()]
        for stream, _ in before:
            self._send(stream)
        return [stream for stream, unsent in before if stream.unsent < unsent]
