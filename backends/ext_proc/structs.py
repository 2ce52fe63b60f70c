"""Maps of Protocol Buffers, and google.protobuf.Struct as far as it holds text."""

from __future__ import annotations

from backends.ext_proc.protobuf import FieldReader, Value, as_bytes


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
