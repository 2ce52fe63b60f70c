"""Header blocks of HTTP/2 (HPACK, RFC 7541), and the rules for requests in them (RFC 9113, section 8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpack import Decoder, HPACKError, OversizedHeaderListError

from backends.http2.frames import ErrorCode, Http2Error, Http2StreamError

MAX_LIST = 1 << 16  # SETTINGS_MAX_HEADER_LIST_SIZE: bytes of all headers of a block, decoded
KNOWN, KNOWN_SIZE = 16, 512  # number of remembered blocks, and bytes of a block at most
REQUIRED, PSEUDO = {b":method", b":scheme", b":path"}, {b":method", b":scheme", b":path", b":authority"}
OF_CONNECTION = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?:[^\x00\r\n \t](?:[^\x00\r\n]*[^\x00\r\n \t])?)?", re.DOTALL)
_THREE_SIZES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")  # of the dynamic table
_NO_TABLE = b"\x20"  # dynamic table size update to 0
_NEW_NAME = b"\x00"  # literal header field without indexing

Header = tuple[bytes, bytes]


class HeaderDecoder:
    """Decodes the blocks of one connection, in order, to the path of a request.

    A block that left the dynamic table as it was has the same meaning until another one changes the table: a data
    plane sends the same block for each call, and it is decoded and validated once.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_LIST)
        self._known: dict[bytes, str] = {}

    def path(self, block: bytes) -> str:
        """Of a request. Raises Http2Error, or Http2StreamError for a request that is malformed."""
        if (path := self._known.get(block)) is not None:
            return path
        before = self._state()
        headers = self._decoded(block)
        if not _is_same(before, self._state()):
            self._known.clear()
        path = path_of(headers)
        if _is_same(before, self._state()) and len(block) <= KNOWN_SIZE and len(self._known) < KNOWN:
            self._known[block] = path
        return path

    def decode(self, block: bytes) -> Sequence[Header]:
        """Any other block. Raises Http2Error."""
        self._known.clear()
        return self._decoded(block)

    def _state(self) -> tuple[int, int, Header | None]:
        """Of the dynamic table. A new entry is another object, even one with the same values."""
        entries = self._decoder.header_table.dynamic_entries
        return self._decoder.header_table_size, len(entries), entries[0] if entries else None

    def _decoded(self, block: bytes) -> Sequence[Header]:
        if _THREE_SIZES.match(block):
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "a block sets more than two sizes of its table")
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_LIST} bytes") from None
        except (HPACKError, IndexError) as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {type(error).__name__}") from None


def _is_same(before: tuple[int, int, Header | None], after: tuple[int, int, Header | None]) -> bool:
    return before[:2] == after[:2] and before[2] is after[2]


def path_of(headers: Sequence[Header]) -> str:
    """Raises Http2StreamError for a request that RFC 9113, section 8.3.1, calls malformed."""
    pseudo = [name for name, _ in headers if name.startswith(b":")]
    if len({*pseudo}) != len(pseudo) or not REQUIRED <= {*pseudo} <= PSEUDO:
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
    require_valid(headers[len(pseudo) :])  # refuses a pseudo-header behind a regular one
    if not all(_VALUE.fullmatch(value) for _, value in headers[: len(pseudo)]):
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
    if not (path := dict(headers)[b":path"]):
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
    return path.decode("latin-1")


def require_valid(headers: Iterable[Header]) -> None:
    """Regular fields (sections 8.2.1 and 8.2.2). Raises Http2StreamError."""
    for name, value in headers:
        is_foreign = name in OF_CONNECTION or (name == b"te" and value != b"trailers") or name.startswith(b":")
        if is_foreign or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)


def encoded(headers: Iterable[tuple[str, str]]) -> bytes:
    """A block that uses no dynamic table, whatever its size: it may be encoded once, and sent at any time."""
    return _NO_TABLE + b"".join(
        _NEW_NAME + _text(name.encode("latin-1")) + _text(value.encode("latin-1")) for name, value in headers
    )


def _text(raw: bytes) -> bytes:
    """A string without Huffman code."""
    size = len(raw)
    if size < 0x7F:
        return bytes((size,)) + raw
    head, size = bytearray((0x7F,)), size - 0x7F
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + raw
