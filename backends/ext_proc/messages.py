"""Messages of Envoy as values: of external processing (envoy.service.ext_proc.v3), and entries of the gRPC access log
(envoy.service.accesslog.v3).

Decodes a ProcessingRequest to an `EnvoyMessage`, and encodes each ProcessingResponse. Field numbers are those of the
protocol's files; the tests check both directions against Envoy's own definitions. Metadata beside a body is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from backends.ext_proc.protobuf import (
    FieldReader,
    Value,
    as_bytes,
    head,
    map_entries,
    map_entry,
    number,
    sized,
    text_members,
)

OVERWRITE = 2  # HeaderValueOption.append_action: OVERWRITE_IF_EXISTS_OR_ADD
PIECE = 62_000  # bytes of a body in one message; data planes have a limit of 64 KB


class MessageKind(Enum):
    """Fields of ProcessingRequest.request."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


class BodyMode(IntEnum):
    """ProcessingMode.BodySendMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


@dataclass(slots=True)
class EnvoyMessage:
    """A ProcessingRequest. `metadata`: text values by namespace and key, lists as text with commas. `modes`: of the
    bodies of request and response, in the first message."""

    kind: MessageKind | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    end_of_stream: bool = False
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    modes: tuple[BodyMode, BodyMode] | None = None


_KINDS = {kind.value: kind for kind in MessageKind}
_BODIES = (MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY)
_KEY, _RAW_VALUE = 0x0A, 0x1A  # tags of a HeaderValue; that of a HeaderValue in a HeaderMap is the first too
USUAL_HEADERS = 100  # beyond them, each counts as fields that are read
_METADATA, _ATTRIBUTES, _PROTOCOL_CONFIG = 8, 9, 11


def decode(data: bytes) -> EnvoyMessage:
    """Raises ValueError."""
    message, fields = EnvoyMessage(), FieldReader()
    for name, value in fields(data):
        if (kind := _KINDS.get(name)) is not None:
            message.kind = kind
            _read_part(fields, message, kind, as_bytes(value))
        elif name == _METADATA and message.kind not in _BODIES:
            message.metadata = {key: text_members(fields, inner) for key, inner in map_entries(fields, value, 1)}
        elif name == _ATTRIBUTES:
            _, inner = map_entry(fields, as_bytes(value))  # the name is that of the filter
            message.attributes.update(text_members(fields, inner))
        elif name == _PROTOCOL_CONFIG:
            found = {key: each for key, each in fields(as_bytes(value)) if isinstance(each, int)}
            message.modes = BodyMode(found.get(1, 0)), BodyMode(found.get(2, 0))
    return message


def _read_part(fields: FieldReader, message: EnvoyMessage, kind: MessageKind, data: bytes) -> None:
    is_body = kind in _BODIES
    is_headers = kind in (MessageKind.REQUEST_HEADERS, MessageKind.RESPONSE_HEADERS)
    for name, value in fields(data):
        if is_body and name == 1:
            message.body = as_bytes(value)
        elif (is_body and name == 2) or (is_headers and name == 3):
            message.end_of_stream = bool(value)
        elif name == 1:
            message.headers = _headers(fields, as_bytes(value))


def _headers(fields: FieldReader, data: bytes) -> dict[str, str]:
    """Headers of a HeaderMap, in one pass where each is as Envoy writes it: short, a key and a `raw_value`."""
    found, at, end = dict[str, str](), 0, len(data)
    for _ in range(USUAL_HEADERS):
        if at + 4 >= end:
            break
        after_key, after = at + 4 + data[at + 3], at + 2 + data[at + 1]
        is_usual = data[at] == data[at + 2] == _KEY and after_key + 2 < after <= min(end, at + 0x81)
        if not is_usual or data[after_key] != _RAW_VALUE or data[after_key + 1] != after - after_key - 2:
            break
        found[data[at + 4 : after_key].decode("latin-1").lower()] = data[after_key + 2 : after].decode("latin-1")
        at = after
    for key, each in fields(data[at:]):  # the others
        if key == 1:
            name, value = _header(fields, as_bytes(each))
            found[name] = value
    return found


def _header(fields: FieldReader, data: bytes) -> tuple[str, str]:
    """Envoy fills `raw_value`; tests and older versions fill `value`."""
    found = {name: as_bytes(value) for name, value in fields(data)}
    return found.get(1, b"").decode("latin-1").lower(), (found.get(3) or found.get(2, b"")).decode("latin-1")


# -- answers --------------------------------------------------------------------------------------


_ANSWERS = {
    MessageKind.REQUEST_HEADERS: 1,
    MessageKind.RESPONSE_HEADERS: 2,
    MessageKind.REQUEST_BODY: 3,
    MessageKind.RESPONSE_BODY: 4,
    MessageKind.REQUEST_TRAILERS: 5,
    MessageKind.RESPONSE_TRAILERS: 6,
}
_TRAILERS = (MessageKind.REQUEST_TRAILERS, MessageKind.RESPONSE_TRAILERS)


@dataclass(frozen=True, slots=True)
class Mutation:
    """Headers to set and to remove, and metadata by namespace and key. `body`: in place of a BUFFERED one; None: it
    stays."""

    set: Mapping[str, str] = field(default_factory=dict)
    remove: Sequence[str] = ()
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    body: bytes | None = None

    def headers(self) -> bytes:
        """A HeaderMutation."""
        options = (
            sized(1, sized(1, sized(1, name.encode()) + sized(3, value.encode("latin-1"))) + number(3, OVERWRITE))
            for name, value in self.set.items()
        )
        return b"".join(options) + b"".join(sized(2, name.encode()) for name in self.remove)


_UNCHANGED = {kind: sized(field, b"" if kind in _TRAILERS else sized(1, b"")) for kind, field in _ANSWERS.items()}


def answer(kind: MessageKind, mutation: Mutation | None = None) -> bytes:
    """A ProcessingResponse to a message of `kind`. Headers or body go on unchanged where there is no mutation."""
    if mutation is None:
        return _UNCHANGED[kind]
    changed = mutation.headers()
    replaced = b"" if mutation.body is None else sized(3, sized(1, mutation.body))
    common = sized(2, changed) + replaced + number(5, 1) if changed else replaced  # with clear_route_cache
    return sized(_ANSWERS[kind], sized(1, common)) + _dynamic_metadata(mutation.metadata)


def body_answers(kind: MessageKind, body: bytes, is_last: bool) -> list[bytes]:
    """Sends the body back unchanged, in pieces: in FULL_DUPLEX_STREAMED a body that is not sent back is lost."""
    starts = range(0, len(body), PIECE) or range(1)
    return [_piece(kind, body[at : at + PIECE], is_last and at == starts[-1]) for at in starts]


def _piece(kind: MessageKind, piece: bytes, is_last: bool) -> bytes:
    """A StreamedBodyResponse in its BodyMutation, CommonResponse and ProcessingResponse; the piece is copied once."""
    before, after = head(1, len(piece)), number(2, is_last)
    for number_of in (3, 3, 1, _ANSWERS[kind]):
        before = head(number_of, len(before) + len(piece) + len(after)) + before
    return b"".join((before, piece, after))


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """An answer in place of the engine's."""
    reply = sized(1, number(1, status)) + sized(2, Mutation(headers).headers()) + sized(3, body)
    return sized(7, reply + sized(5, details.encode()))


def more_time(seconds: float) -> bytes:
    """A request for more time before the answer (override_message_timeout), for data planes with
    `max_message_timeout`."""
    whole = int(seconds)
    return sized(10, number(1, whole) + number(2, int((seconds - whole) * 1e9)))


def _dynamic_metadata(metadata: Mapping[str, Mapping[str, str]]) -> bytes:
    return sized(8, _as_struct({key: _as_struct_value(inner) for key, inner in metadata.items()})) if metadata else b""


def _as_struct(members: Mapping[str, bytes]) -> bytes:
    return b"".join(sized(1, sized(1, key.encode()) + sized(2, value)) for key, value in members.items())


def _as_struct_value(members: Mapping[str, str]) -> bytes:
    texts = {key: sized(3, value.encode()) for key, value in members.items()}
    return sized(5, _as_struct(texts))


# ResponseFlags of the access log: the caller left; the engine broke the answer.
CALLER_GONE = frozenset({15, 28})  # downstream_connection_termination, downstream_remote_reset
ENGINE_BROKE = frozenset({3, 5, 7, 17, 20, 23, 24})  # timeouts, resets and errors of the upstream
_HTTP_LOGS, _LOG_ENTRY = 2, 1
_COMMON, _RESPONSE = 1, 4
_LAST_UPSTREAM_BYTE, _FLAGS, _LOG_METADATA = 10, 16, 17
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
        elif name == _LOG_METADATA:
            entry.metadata = {key: text_members(fields, inner) for key, inner in map_entries(fields, value, 1)}
            return


def _number(fields: FieldReader, data: Value) -> int:
    return _as_number(dict(fields(as_bytes(data))).get(1, 0))


def _as_number(value: Value) -> int:
    """Raises ValueError for bytes: the field has another type than it must."""
    if not isinstance(value, int):
        raise ValueError("bytes in place of a number")
    return value
