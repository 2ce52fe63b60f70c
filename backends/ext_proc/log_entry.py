"""Entries of Envoy's gRPC access log (envoy.service.accesslog.v3), as values.

Field numbers are those of Envoy's own definitions, against which the tests hold the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.ext_proc.protobuf import FieldReader, Value, as_bytes
from backends.ext_proc.structs import map_entries, text_members

# ResponseFlags of the access log: the caller left; the engine broke the answer.
CALLER_GONE = frozenset({15, 28})  # downstream_connection_termination, downstream_remote_reset
ENGINE_BROKE = frozenset({3, 5, 7, 17, 20, 23, 24})  # timeouts, resets and errors of the upstream
_HTTP_LOGS, _LOG_ENTRY = 2, 1
_COMMON, _RESPONSE = 1, 4
_LAST_UPSTREAM_BYTE, _FLAGS, _METADATA = 10, 16, 17
_STATUS, _BODY_BYTES = 1, 3


@dataclass(slots=True)
class LogEntry:
    """One request that Envoy carried. `metadata`: text values by namespace and key. `last_byte`: s from the beginning
    of the request to the last byte of the engine; None: it sent none. `body_bytes`: of the answer."""

    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    status: int = 0
    body_bytes: int = 0
    last_byte: float | None = None
    flags: frozenset[int] = frozenset()


def decode_log(data: bytes) -> Sequence[LogEntry]:
    """The entries of a StreamAccessLogsMessage. Raises ValueError."""
    fields = FieldReader()
    logs = [as_bytes(value) for name, value in fields(data) if name == _HTTP_LOGS]
    return [_entry(fields, as_bytes(value)) for each in logs for name, value in fields(each) if name == _LOG_ENTRY]


def _entry(fields: FieldReader, data: bytes) -> LogEntry:
    entry = LogEntry()
    for name, value in fields(data):
        if name == _COMMON:
            _read_common(fields, entry, as_bytes(value))
        elif name == _RESPONSE:
            found = dict(fields(as_bytes(value)))
            entry.status = _number(fields, found.get(_STATUS, b""))  # a UInt32Value
            entry.body_bytes = _as_number(found.get(_BODY_BYTES, 0))
    return entry


def _read_common(fields: FieldReader, entry: LogEntry, data: bytes) -> None:
    """Reads up to the metadata: fields come in order of their numbers, and no later one is needed."""
    for name, value in fields(data):
        if name == _LAST_UPSTREAM_BYTE:
            parts = dict(fields(as_bytes(value)))  # a Duration
            entry.last_byte = _as_number(parts.get(1, 0)) + _as_number(parts.get(2, 0)) * 1e-9
        elif name == _FLAGS:
            entry.flags = frozenset(flag for flag, is_set in fields(as_bytes(value)) if is_set == 1)
        elif name == _METADATA:
            entry.metadata = {key: text_members(fields, inner) for key, inner in map_entries(fields, value, 1)}
            return


def _number(fields: FieldReader, data: Value) -> int:
    return _as_number(dict(fields(as_bytes(data))).get(1, 0))


def _as_number(value: Value) -> int:
    """Raises ValueError for bytes: the field has another type than it must."""
    if not isinstance(value, int):
        raise ValueError("bytes in place of a number")
    return value
