"""A client of HTTP/2 that writes frames by hand, so that it can break rules."""

from __future__ import annotations

from collections.abc import Iterator

from backends.http2.frames import (
    ACK,
    END_HEADERS,
    HEAD,
    PREFACE,
    FrameType,
    frame,
    settings_frame,
)
from backends.http2.header_blocks import encoded
from backends.http2.server import (
    Event,
    Http2Server,
)

STREAMS, WINDOW, ALL = 3, 1 << 17, 1 << 18
REQUEST = ((":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "picker"), ("te", "trailers"))
HEADERS = encoded([(":status", "200")])
TRAILERS = encoded([("grpc-status", "0")])


class Peer:
    """A client that writes frames by hand, beside the server. `now`: s."""

    def __init__(self) -> None:
        self.server = Http2Server(STREAMS, WINDOW, ALL)
        self.server.start()
        self.now = 0.0
        self.events: list[Event] = []
        self.send(PREFACE + settings_frame({}))
        self.frames()

    def send(self, data: bytes) -> list[Event]:
        found = self.server.receive(data, self.now)
        while self.server.is_behind:
            found = found + self.server.receive(b"", self.now)
        self.events += found
        return found

    def begin(self, stream: int = 1, headers: bytes | None = None, flags: int = END_HEADERS) -> list[Event]:
        return self.send(frame(FrameType.HEADERS, flags, stream, encoded(REQUEST) if headers is None else headers))

    def data(self, stream: int, data: bytes, flags: int = 0) -> list[Event]:
        return self.send(frame(FrameType.DATA, flags, stream, data))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """What the server has sent since: type, flags, stream and payload of each frame."""
        return [*cut(self.server.take())]

    def acknowledge_settings(self) -> None:
        self.send(frame(FrameType.SETTINGS, ACK, 0))

    def reset_codes(self) -> list[tuple[int, int]]:
        """Streams that the server has reset since, and why."""
        return [(stream, code_of(data)) for kind, _, stream, data in self.frames() if kind == FrameType.RST_STREAM]


def cut(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at < len(data):
        high, low, kind, flags, stream = HEAD.unpack_from(data, at)
        at += HEAD.size + (high << 8 | low)
        yield kind, flags, stream, data[at - (high << 8 | low) : at]


def code_of(payload: bytes) -> int:
    return int.from_bytes(payload, "big")
