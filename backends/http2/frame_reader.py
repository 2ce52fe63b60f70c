"""Cuts the bytes of a client into frames of HTTP/2 (RFC 9113, sections 3.4, 4.1, 4.3 and 6.10).

Bounds: a frame is refused by its head where it is longer than MAX_FRAME, and a header block where it is longer than
MAX_BLOCK, or cut into more than MAX_PIECES (CONTINUATION flood, CVE-2024-27316). One `read` returns FRAMES at most, and
fewer with headers: a block may take 15 ms to be decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from backends.http2.frames import (
    END_HEADERS,
    HEAD,
    MAX_FRAME,
    MAX_STREAM,
    PREFACE,
    PRIORITY,
    ErrorCode,
    FrameType,
    Http2Error,
    without_padding,
)

FRAMES = 100  # of a read
PIECE_COST, PIECE_BYTES = 3, 64  # frames more for a piece of headers, and one for so many bytes: some 5 ms in all
MAX_BLOCK, MAX_PIECES = 1 << 16, 16  # bytes and frames of a header block: a data plane may send on 60 KB of a caller's
_SIZE, _PRIORITY_SIZE = HEAD.size, 5
_HEADERS, _CONTINUATION = _OF_BLOCKS = int(FrameType.HEADERS), int(FrameType.CONTINUATION)


class Frame(NamedTuple):
    """HEADERS come with the whole block, without padding and priority."""

    kind: int
    flags: int
    stream: int
    payload: bytes


@dataclass(slots=True)
class Block:
    """A header block of which more is to come."""

    stream: int
    flags: int
    data: bytes
    pieces: int = 1


class FrameReader:
    """Reads from the preface on. `is_behind`: whole frames are left for another `read`, of no new bytes."""

    def __init__(self) -> None:
        self.is_behind = False
        self._data = b""
        self.has_preface = False
        self._block: Block | None = None

    def read(self, data: bytes) -> list[Frame]:
        """Raises Http2Error."""
        if self._data:
            data = self._data + data
        if not self.has_preface and not (data := self._without_preface(data)):
            return []
        found, at, end, left = list[Frame](), 0, len(data), FRAMES
        while left > 0 and end - at >= _SIZE:
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > MAX_FRAME:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - at - _SIZE < size:
                break
            frame = Frame(kind, flags, stream & MAX_STREAM, data[at + _SIZE : at + _SIZE + size])
            at, left = at + _SIZE + size, left - 1
            if kind in _OF_BLOCKS or self._block is not None:
                left -= PIECE_COST + size // PIECE_BYTES
                self._assemble(found, frame)
            else:
                found.append(frame)
        self._data, self.is_behind = data[at:], left <= 0
        return found

    def _without_preface(self, data: bytes) -> bytes:
        """Empty while the preface is not whole."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        self.has_preface = len(data) >= len(PREFACE)
        self._data = b"" if self.has_preface else data
        return data[len(PREFACE) :]

    def _assemble(self, found: list[Frame], piece: Frame) -> None:
        """Appends HEADERS once the block is whole. No other frame may come between its pieces."""
        block = self._block
        if block is None and piece.kind == _HEADERS:
            priority = _PRIORITY_SIZE if piece.flags & PRIORITY else 0
            block = Block(piece.stream, piece.flags, without_padding(piece.flags, piece.payload, priority))
        elif block is not None and piece.kind == _CONTINUATION and piece.stream == block.stream:
            block.data, block.pieces = block.data + piece.payload, block.pieces + 1
        else:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION out of order, or none where there must be one")
        if len(block.data) > MAX_BLOCK or block.pieces > MAX_PIECES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"headers of {len(block.data)} bytes, {block.pieces} frames")
        self._block = None if piece.flags & END_HEADERS else block
        if self._block is None:
            found.append(Frame(_HEADERS, block.flags, block.stream, block.data))
