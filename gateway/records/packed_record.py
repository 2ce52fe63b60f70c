"""A Record as bytes of a row: its values in MessagePack, whose names a file keeps once.

A row has two fifths of the bytes of a line of the access log, and takes half of its time to encode.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from gateway.observe.columns import named
from gateway.observe.part_notes import DIAGNOSIS
from gateway.observe.record import Record
from gateway.observe.record_columns import RECORD

_encode = msgspec.msgpack.Encoder().encode
UNPACKABLE = (UnicodeEncodeError, OverflowError)  # a lone surrogate of a server's message, an integer above 64 bits
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, KeyError)
_JSON = b"["  # a row in JSON begins so; MessagePack has a number there


class Row(NamedTuple):
    """As stored. `at`: arrival, Unix time."""

    at: float
    route: str
    request_id: str
    outcome: str
    values: bytes


def names_json() -> str:
    """Of the values of a row, with those of parts."""
    return json.dumps(RECORD.shape)


def packed(record: Record) -> Row:
    why = DIAGNOSIS.of(record)
    row = [*RECORD.row(record), None if why is None else why.as_json()]
    try:
        values = _encode(row)
    except UNPACKABLE:
        values = json.dumps(row).encode()
    return Row(record.wall, record.route.name, record.request_id, record.end.value, values)


def unpacked(names: str, values: bytes) -> dict[str, Any]:
    """As in the answer of GET /requests. Raises one of UNREADABLE."""
    *row, why = json.loads(values) if values.startswith(_JSON) else msgspec.msgpack.decode(values)
    view = named(json.loads(names), row)
    if why is not None:
        view["why"] = why
    return view
