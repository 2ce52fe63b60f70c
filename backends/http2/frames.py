"""Frames of HTTP/2: types, flags, error codes, and their encoding (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = Struct(">HBBBL")  # length in 16 and 8 bits, type, flags, stream
MAX_FRAME = 1 << 14  # bytes of a payload in both directions; SETTINGS_MAX_FRAME_SIZE is not raised
# Flags: ACK of SETTINGS and PING, END_STREAM of DATA and HEADERS.
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
MAX_STREAM = MAX_WINDOW = (1 << 31) - 1


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """A peer breaks the protocol: the connection ends with `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Http2StreamError(Exception):
    """A peer breaks the protocol within one stream: the stream ends with `code`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def window_update(stream: int, size: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last: int, code: ErrorCode) -> bytes:
    return frame(FrameType.GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big"))


def without_padding(flags: int, payload: bytes, priority: int = 0) -> bytes:
    """The payload between the length of its padding and the padding, if it has one, behind `priority` bytes of
    priority, which are ignored. Raises Http2Error."""
    begin, padding = priority, 0
    if flags & PADDED:
        begin, padding = priority + 1, payload[0] if payload else 0
    if begin + padding > len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[begin : len(payload) - padding]
