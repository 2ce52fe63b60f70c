"""A client of HTTP/2 that writes frames by hand, so that it can break rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from h2.errors import ErrorCodes

from backends.http2.frame_walk import CONTINUATION, DATA, HEADERS, PREFACE, RST_STREAM, SETTINGS, WINDOW_UPDATE
from backends.http2.server import ACK, Event, Http2Server

STREAMS, WINDOW, ALL = 3, 1 << 17, 1 << 18
END_STREAM, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x4, 0x8, 0x20
INITIAL_WINDOW_SIZE = 4  # of SETTINGS
HEAD = Struct(">HBBBL")
REQUEST = ((":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "picker"), ("te", "trailers"))
ANSWER, TRAILERS = ((":status", "200"),), (("grpc-status", "0"),)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, bytes(4))


def encoded(headers: Iterable[tuple[str, str]]) -> bytes:
    """A block without the dynamic table and Huffman code."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text.encode()
    head, size = bytearray((0x7F,)), size - 0x7F
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + text.encode()


def in_pieces(stream: int, block: bytes, size: int) -> bytes:
    """Frames of a header block, each with `size` bytes of it."""
    pieces = [block[at : at + size] for at in range(0, len(block), size)]
    kinds = [HEADERS] + [CONTINUATION] * (len(pieces) - 1)
    return b"".join(
        frame(kind, END_HEADERS * (piece is pieces[-1]), stream, piece)
        for kind, piece in zip(kinds, pieces, strict=True)
    )


class Peer:
    """A client that writes frames by hand, beside the server. `now`: s."""

    def __init__(self, streams: int = STREAMS) -> None:
        self.server = Http2Server(streams, WINDOW, ALL)
        self.server.start()
        self.now = 0.0
        self.events: list[Event] = []
        self.send(PREFACE + settings({}) + frame(SETTINGS, ACK, 0))
        self.frames()

    def send(self, data: bytes) -> list[Event]:
        found = self.server.receive(data, self.now)
        while self.server.is_behind:
            found = found + self.server.receive(b"", self.now)
        self.events += found
        return found

    def begin(self, stream: int = 1, headers: bytes | None = None, flags: int = END_HEADERS) -> list[Event]:
        return self.send(frame(HEADERS, flags, stream, encoded(REQUEST) if headers is None else headers))

    def data(self, stream: int, data: bytes, flags: int = 0) -> list[Event]:
        return self.send(frame(DATA, flags, stream, data))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """What the server has sent since: type, flags, stream and payload of each frame."""
        return [*cut(self.server.take())]

    def reset_codes(self) -> list[tuple[int, int]]:
        """Streams that the server has reset since, and why."""
        return [
            (stream, ErrorCodes(int.from_bytes(data, "big")))
            for kind, _, stream, data in self.frames()
            if kind == RST_STREAM
        ]


def cut(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at < len(data):
        high, low, kind, flags, stream = HEAD.unpack_from(data, at)
        at += HEAD.size + (high << 8 | low)
        yield kind, flags, stream, data[at - (high << 8 | low) : at]
