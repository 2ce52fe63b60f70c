"""Protocol Buffers on the wire: the few forms that the messages of ext_proc need.

https://protobuf.dev/programming-guides/encoding. A field is a tag (number and wire type) and a value. Bounds: a varint
has ten bytes at most, a length never exceeds what is there, a message has MAX_FIELDS fields, those of the messages in
it included. All else is ValueError.

Read too: maps of Protocol Buffers, and google.protobuf.Struct as far as it holds text.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_SIZES = {FIXED64: 8, FIXED32: 4}
_MAX_SHIFT = 63
_ONE_BYTE = [bytes([number]) for number in range(0x80)]
MAX_FIELDS = 10_000  # read in some 5 ms; a header is three, and Envoy allows 100 headers

Value = int | bytes


class FieldReader:
    """Reads a message and its nested messages."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def __call__(self, data: bytes) -> Iterator[tuple[int, Value]]:
        """Numbers and values of the fields, in order. Fixed values are bytes. Raises ValueError."""
        at, end = 0, len(data)
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"a message with more than {MAX_FIELDS} fields")
            tag, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
            kind = tag & 7
            if kind == VARINT:
                number, at = _varint(data, at)
                yield tag >> 3, number
                continue
            if kind == BYTES:
                size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at)
            elif (size := _SIZES.get(kind, -1)) < 0:
                raise ValueError(f"wire type {kind} is unknown")
            if size > end - at:
                raise ValueError("a field is longer than its message")
            yield tag >> 3, data[at : at + size]
            at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if at >= len(data) or shift > _MAX_SHIFT:
            raise ValueError("a number has no end")
        byte = data[at]
        result |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return result, at
        shift += 7


def varint(number: int) -> bytes:
    """A number >= 0."""
    if number < 0x80:
        return _ONE_BYTE[number]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number(field: int, value: int) -> bytes:
    """A field with a number, or a boolean; empty for 0, the default."""
    return varint(field << 3) + varint(value) if value else b""


def sized(field: int, value: bytes) -> bytes:
    """A field with bytes, text or a message, empty ones included."""
    return head(field, len(value)) + value


def head(field: int, size: int) -> bytes:
    """Head of a field with `size` bytes."""
    return varint(field << 3 | BYTES) + varint(size)


def as_bytes(value: Value) -> bytes:
    """Raises ValueError for a number: the field has another type than it must."""
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def map_entries(fields: FieldReader, value: Value, name: int) -> list[tuple[str, bytes]]:
    return [map_entry(fields, as_bytes(inner)) for key, inner in fields(as_bytes(value)) if key == name]


def map_entry(fields: FieldReader, data: bytes) -> tuple[str, bytes]:
    found = {name: as_bytes(value) for name, value in fields(data)}
    return found.get(1, b"").decode("utf-8", "replace"), found.get(2, b"")


def text_members(fields: FieldReader, data: bytes) -> dict[str, str]:
    """Text members of a google.protobuf.Struct, and lists of text."""
    return {key: _text(fields, inner) for key, inner in map_entries(fields, data, 1)}


def _text(fields: FieldReader, data: bytes, in_list: bool = False) -> str:
    """google.protobuf.Value: 3 is a string, 6 a list of values; a list in a list has no text."""
    for name, value in fields(data):
        if name == 3:
            return as_bytes(value).decode("utf-8", "replace")
        if name == 6 and not in_list:
            return ",".join(_text(fields, as_bytes(each), True) for key, each in fields(as_bytes(value)) if key == 1)
    return ""
