"""Messages of Envoy's external processing (envoy.service.ext_proc.v3), as values.

What Envoy sends becomes an `EnvoyMessage`; what a picker answers is encoded here. Field numbers are those of the
protocol's files; the tests check both directions against Envoy's own definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from backends.ext_proc.protobuf import Value, as_bytes, fields, number, sized

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
_METADATA, _ATTRIBUTES, _PROTOCOL_CONFIG = 8, 9, 11


def decode(data: bytes) -> EnvoyMessage:
    """Raises ValueError."""
    message = EnvoyMessage()
    for name, value in fields(data):
        if (kind := _KINDS.get(name)) is not None:
            message.kind = kind
            _read_part(message, kind, as_bytes(value))
        elif name == _METADATA:
            message.metadata = {key: _struct(inner) for key, inner in _map(value, 1)}
        elif name == _ATTRIBUTES:
            _, inner = _entry(as_bytes(value))  # the name is that of the filter
            message.attributes.update(_struct(inner))
        elif name == _PROTOCOL_CONFIG:
            found = {key: each for key, each in fields(as_bytes(value)) if isinstance(each, int)}
            message.modes = BodyMode(found.get(1, 0)), BodyMode(found.get(2, 0))
    return message


def _read_part(message: EnvoyMessage, kind: MessageKind, data: bytes) -> None:
    is_body = kind in (MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY)
    is_headers = kind in (MessageKind.REQUEST_HEADERS, MessageKind.RESPONSE_HEADERS)
    for name, value in fields(data):
        if is_body and name == 1:
            message.body = as_bytes(value)
        elif (is_body and name == 2) or (is_headers and name == 3):
            message.end_of_stream = bool(value)
        elif name == 1:
            message.headers = dict(_header(as_bytes(each)) for key, each in fields(as_bytes(value)) if key == 1)


def _header(data: bytes) -> tuple[str, str]:
    """Envoy fills `raw_value`; `value` is of tests and of older ones."""
    found = {name: as_bytes(value) for name, value in fields(data)}
    return found.get(1, b"").decode("latin-1").lower(), (found.get(3) or found.get(2, b"")).decode("latin-1")


def _map(value: Value, name: int) -> list[tuple[str, bytes]]:
    return [_entry(as_bytes(inner)) for key, inner in fields(as_bytes(value)) if key == name]


def _entry(data: bytes) -> tuple[str, bytes]:
    found = {name: as_bytes(value) for name, value in fields(data)}
    return found.get(1, b"").decode("utf-8", "replace"), found.get(2, b"")


def _struct(data: bytes) -> dict[str, str]:
    """Text members of a google.protobuf.Struct, and lists of text."""
    return {key: _text(inner) for key, inner in _map(data, 1)}


def _text(data: bytes, in_list: bool = False) -> str:
    """google.protobuf.Value: 3 is a string, 6 a list of values; a list in a list has no text."""
    for name, value in fields(data):
        if name == 3:
            return as_bytes(value).decode("utf-8", "replace")
        if name == 6 and not in_list:
            return ",".join(_text(as_bytes(each), True) for key, each in fields(as_bytes(value)) if key == 1)
    return ""


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
    """Headers to set and to remove, and metadata by namespace and key."""

    set: Mapping[str, str] = field(default_factory=dict)
    remove: Sequence[str] = ()
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def headers(self) -> bytes:
        """A HeaderMutation."""
        options = (
            sized(1, sized(1, sized(1, name.encode()) + sized(3, value.encode("latin-1"))) + number(3, OVERWRITE))
            for name, value in self.set.items()
        )
        return b"".join(options) + b"".join(sized(2, name.encode()) for name in self.remove)


NOTHING = Mutation()


def answer(kind: MessageKind, mutation: Mutation = NOTHING, streamed: tuple[bytes, bool] | None = None) -> bytes:
    """A ProcessingResponse to a message of `kind`. `streamed`: a piece of the body in its place, and if it is the last;
    without one, a body goes on unchanged."""
    if kind in _TRAILERS:
        return sized(_ANSWERS[kind], b"")
    changed = mutation.headers()
    common = sized(2, changed) + number(5, 1) if changed else b""  # with clear_route_cache
    if streamed is not None:
        common += sized(3, sized(3, sized(1, streamed[0]) + number(2, streamed[1])))
    return sized(_ANSWERS[kind], sized(1, common)) + _dynamic_metadata(mutation.metadata)


def body_answers(kind: MessageKind, body: bytes, is_last: bool, mutation: Mutation = NOTHING) -> list[bytes]:
    """The same body in pieces, as FULL_DUPLEX_STREAMED wants it: what is not sent back is lost."""
    cuts = range(0, len(body), PIECE) or range(1)
    pieces = [body[at : at + PIECE] for at in cuts]
    last = len(pieces) - 1
    return [
        answer(kind, mutation if not i else NOTHING, (piece, is_last and i == last)) for i, piece in enumerate(pieces)
    ]


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """An answer in place of the engine's."""
    reply = sized(1, number(1, status)) + sized(2, Mutation(headers).headers()) + sized(3, body)
    return sized(7, reply + sized(5, details.encode()))


def _dynamic_metadata(metadata: Mapping[str, Mapping[str, str]]) -> bytes:
    return sized(8, _as_struct({key: _as_struct_value(inner) for key, inner in metadata.items()})) if metadata else b""


def _as_struct(members: Mapping[str, bytes]) -> bytes:
    return b"".join(sized(1, sized(1, key.encode()) + sized(2, value)) for key, value in members.items())


def _as_struct_value(members: Mapping[str, str]) -> bytes:
    texts = {key: sized(3, value.encode()) for key, value in members.items()}
    return sized(5, _as_struct(texts))
