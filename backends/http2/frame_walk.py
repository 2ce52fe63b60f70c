"""Cuts the bytes of a client into whole frames of HTTP/2 by the nine bytes before each (RFC 9113, section 4.1).

`h2` keeps a frame of any length until it is whole, and handles all frames of one read at once. Bounds: a frame is
refused by its head where it is longer than MAX_FRAME, and a header block where it is longer than MAX_BLOCK, or cut into
more than MAX_PIECES (CONTINUATION flood, CVE-2024-27316). One `read` returns FRAMES at most, and fewer with headers: a
block may take 30 ms to be decoded.

`FloodMeter` bounds frames that cost a server more than their sender.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import NamedTuple

from h2.errors import ErrorCodes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME = 1 << 14  # bytes of a payload; SETTINGS_MAX_FRAME_SIZE is not raised
MAX_STREAM = (1 << 31) - 1
FRAMES = 100  # of a read
PIECE_COST, PIECE_BYTES = 3, 64  # frames more for a piece of headers, and one for so many bytes: some 5 ms in all
MAX_BLOCK, MAX_PIECES = 1 << 16, 16  # bytes and frames of a header block: a data plane may send on 60 KB of a caller's
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_HEAD = Struct(">HBBBL")  # length in 16 and 8 bits, type, flags, stream
_SIZE = _HEAD.size
_OF_BLOCKS = (HEADERS, CONTINUATION)


class Http2Error(Exception):
    """A peer breaks a bound, or the protocol: the connection ends with `code`."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameHead(NamedTuple):
    """`end`: place in the bytes behind the frame, whose payload has `size` bytes."""

    kind: int
    flags: int
    stream: int
    size: int
    end: int


class FrameWalk:
    """Reads from the preface on. `is_behind`: whole frames are left for another `read`, of no new bytes."""

    def __init__(self) -> None:
        self.has_preface = self.is_behind = False
        self._data = b""
        self._block_bytes = self._pieces = 0  # of the header block in progress

    def read(self, data: bytes) -> tuple[bytes, list[FrameHead]]:
        """Whole frames, and the head of each. Raises Http2Error."""
        data = self._data + data if self._data else data
        if not self.has_preface and not (data := self._without_preface(data)):
            return b"", []
        heads, at, end, left = list[FrameHead](), 0, len(data), FRAMES
        while left > 0 and end - at >= _SIZE:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > MAX_FRAME:
                raise Http2Error(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - at - _SIZE < size:
                break
            at, left = at + _SIZE + size, left - 1
            if kind in _OF_BLOCKS:
                left -= PIECE_COST + size // PIECE_BYTES
                self._count_piece(kind, size)
            heads.append(FrameHead(kind, flags, stream & MAX_STREAM, size, at))
        self._data, self.is_behind = data[at:], left <= 0
        return data[:at], heads

    def _without_preface(self, data: bytes) -> bytes:
        """Empty while the preface is not whole."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2Error(ErrorCodes.PROTOCOL_ERROR, "no preface of HTTP/2")
        self.has_preface = len(data) >= len(PREFACE)
        self._data = b"" if self.has_preface else data
        return data[len(PREFACE) :]

    def _count_piece(self, kind: int, size: int) -> None:
        """A block begins with HEADERS; h2 refuses any other order."""
        if kind == HEADERS:
            self._block_bytes = self._pieces = 0
        self._block_bytes, self._pieces = self._block_bytes + size, self._pieces + 1
        if self._block_bytes > MAX_BLOCK or self._pieces > MAX_PIECES:
            message = f"headers of {self._block_bytes} bytes, {self._pieces} frames"
            raise Http2Error(ErrorCodes.ENHANCE_YOUR_CALM, message)


PERIOD = 10.0  # s


class Flood(Enum):
    """Kinds of frames that are counted.

    RESETS: streams given up by the peer before any answer (rapid reset, CVE-2023-44487), and streams reset for an error
    of the peer (CVE-2025-8671). SETTINGS: each changes the windows of all streams (CVE-2019-9515). EMPTY: PING,
    PRIORITY, DATA without content (CVE-2019-9512, -9513, -9518), and frames of unknown types.
    """

    RESETS = "resets"
    SETTINGS = "SETTINGS"
    EMPTY = "empty frames"


LIMITS = {Flood.RESETS: 5_000, Flood.SETTINGS: 100, Flood.EMPTY: 10_000}  # within PERIOD


class FloodMeter:
    """A leaky bucket for each kind: its memory does not grow with the count."""

    def __init__(self) -> None:
        self._levels = dict.fromkeys(Flood, (0.0, 0.0))  # level, and the time of it

    def add(self, kind: Flood, now: float) -> bool:
        """True: more frames of this kind came than may."""
        limit, (level, since) = LIMITS[kind], self._levels[kind]
        level = max(level - (now - since) * limit / PERIOD, 0.0) + 1.0
        self._levels[kind] = level, now
        return level > limit
