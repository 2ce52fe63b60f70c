"""The parts of a request body which become prompt tokens. Pure; the body is already validated.

A prompt is a sequence of parts: the tool definitions, then the messages; or the whole prompt of a completion request. A
part is named by a digest of its JSON, by which it is recognised before it is decoded. An unknown part is read as
pieces: segments of text, or token ids where there is no text. Rules:
- Tool definitions come first, as JSON: engines render them into the system prompt.
- The first piece of a message names its role. A completion prompt has no roles.
- Images and other media count by OpenAI's tiles (its vision guide): 85 tokens at low detail, else as a picture of
  unknown size, taken as 1024 x 1024: 85 + 4 tiles of 170.
- Several prompts of one completion request count as one after another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import encode
from gateway.tokenize.tokenizers import ID_BYTES, SEGMENT_MIN, segments

MEDIA_TOKENS = 85 + 4 * 170
LOW_DETAIL_TOKENS = 85
NOT_TEXT = 0x8000_0000  # ids from here on belong to no vocabulary: they stand for media and message openings

_DEFINITIONS = ("tools", "functions")
_RUN = 1024 * ID_BYTES  # bytes of ids in a piece: a medium is one piece
_ROLE = 32  # characters which tell roles apart
_SAMPLE = 4096  # characters from either end which tell media apart: formats end with a checksum
_decode = msgspec.json.Decoder().decode

Span = str | bytes  # text, or packed token ids


@dataclass(slots=True)
class Piece:
    """A segment of text or a run of ids. `role`: of the message which the piece opens."""

    role: str | None
    span: Span


@dataclass(eq=False, repr=False, slots=True)
class Prompt:
    """The parts of a prompt, in the order in which an engine renders them."""

    sources: Sequence[Any]  # JSON as received (`Raw`), or values
    digests: Sequence[int]
    messages: int  # the last so many parts are messages
    size: int  # bytes
    decoded: Mapping[int, Any] = field(
        default_factory=dict
    )  # by number, messages which were decoded already; droppable

    def pieces(self, part: int) -> list[Piece]:
        """The pieces of a part, never none."""
        source, number = self.sources[part], part - len(self.sources) + self.messages
        if not self.messages:
            return _cut(None, _prompts(source)) or [Piece(None, b"")]
        if number < 0:
            return _cut(None, (encode(_decode(encode(source))).decode(),))
        message = self.decoded.get(number)
        return _message(message or (_decode(source) if isinstance(source, Raw) else source))

    def size_from(self, part: int) -> int:
        """Bytes from this part on; of the whole prompt where the size of a part is unknown."""
        left = self.sources[part:]
        written = [memoryview(source).nbytes for source in left if isinstance(source, Raw)]
        return sum(written) if len(written) == len(left) else self.size


def prompt_of(operation: Operation, body: Mapping[str, Any]) -> Prompt:
    if operation is Operation.COMPLETION:
        prompt = body["prompt"]
        return Prompt((prompt,), (digest_of("prompt", prompt),), 0, len(prompt))
    fields, written = definitions(body), list(map(encode, body["messages"]))
    digests = [*(digest_of(field, body[field]) for field in fields), *map(hash, written)]
    return Prompt([*map(body.__getitem__, fields), *body["messages"]], digests, len(written), sum(map(len, written)))


def definitions(body: Mapping[str, Any]) -> list[str]:
    """The fields which are rendered before the messages."""
    return [field for field in _DEFINITIONS if body.get(field)]


def digest_of(field: str, value: Any) -> int:
    """Digest of a part other than a message. A message's digest is the hash of its JSON."""
    return hash((field, type(value), value if isinstance(value, str) else encode(value)))


def _message(message: Mapping[str, Any]) -> list[Piece]:
    """A message without any text is still a message: its first piece is empty then."""
    role, content = message["role"][:_ROLE], message.get("content")
    if len(message) == 2 and type(content) is str and len(content) <= SEGMENT_MIN:
        return [Piece(role, content)]  # as nearly all are
    return _cut(role, _spans(message)) or [Piece(role, "")]


def _cut(role: str | None, spans: Iterable[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in spans:
        if isinstance(span, str):
            cut: list[Span] = [*segments(span)]
        else:
            cut = [span[start : start + _RUN] for start in range(0, len(span), _RUN)]
        for part in cut:
            pieces.append(Piece(role, part))
            role = None
    return pieces


def _prompts(prompt: str | list[Any]) -> Iterator[Span]:
    if isinstance(prompt, str):
        yield prompt
        return
    ids = [token for token in prompt if isinstance(token, int)]
    yield array("I", [token & (NOT_TEXT - 1) for token in ids]).tobytes()  # the engine rejects larger ids
    for each in prompt:
        if not isinstance(each, int):
            yield from _prompts(each)


def _spans(message: Mapping[str, Any]) -> Iterator[Span]:
    content = message.get("content")
    if type(content) is str:
        yield content
    else:
        for part in content or ():
            text = part.get("text", part.get("refusal"))
            yield text if isinstance(text, str) else _medium(part)
    for call in message.get("tool_calls") or ():
        yield _call(call.get("function"))
    if message.get("function_call"):
        yield _call(message["function_call"])
    if message.get("name"):
        yield str(message["name"])


def _call(function: Any) -> str:
    if not isinstance(function, dict):
        return ""
    return f'{{"name": "{function.get("name")}", "arguments": {function.get("arguments")}}}'


def _medium(part: Mapping[str, Any]) -> bytes:
    """As many ids as the medium counts, each equal to its digest: another picture is another prefix."""
    members = [member for value in part.values() for member in (value.items() if isinstance(value, dict) else ())]
    tokens = LOW_DETAIL_TOKENS if ("detail", "low") in members else MEDIA_TOKENS
    strings = [value for _, value in [*part.items(), *members] if isinstance(value, str)]
    reference = max(strings, key=len, default="")  # URL, or data in base64
    sample = f"{len(reference)} {reference[:_SAMPLE]} {reference[-_SAMPLE:]}"
    digest = int.from_bytes(blake2b(sample.encode(), digest_size=ID_BYTES).digest(), "little")
    return array("I", [digest | NOT_TEXT]).tobytes() * tokens
