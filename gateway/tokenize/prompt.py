"""What of a request body becomes prompt tokens.

A prompt is a sequence of parts: the definitions of tools, then the messages; or all that a completion request gives.
A part is named by a digest of its JSON, by which it is recognised before it is decoded. What is not recognised is
read as pieces, so that a part can be recognised piece by piece from its beginning: a piece is a segment of text, or
token ids where there is no text. Pure; the body is as it was validated. Rules:
- Tool definitions come first, as JSON: engines render them into the system prompt.
- The first piece of a message names its role. A completion prompt has no roles.
- Images and other media count by OpenAI's tiles (its vision guide): 85 tokens at low detail, else those of
  a picture whose size is not known, taken as 1024 x 1024: 85 + 4 tiles of 170.
- Several prompts of one completion request count as one after another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw

from backends.interface import Operation
from gateway.api.strict_json import encode
from gateway.tokenize.segments import TARGET, segments
from gateway.tokenize.tokenizers import ID_BYTES

MEDIA_TOKENS = 85 + 4 * 170
LOW_DETAIL_TOKENS = 85
NOT_TEXT = 0x8000_0000  # ids from here on are not of a vocabulary: they stand for media and message openings

_DEFINITIONS = ("tools", "functions")
_IDS_PER_PIECE = 1024  # a medium is one piece
_ROLE = 32  # characters that tell roles apart
_SAMPLE = 4096  # characters from either end that tell a medium from another: formats end with a checksum
_NONE: Mapping[int, Any] = {}
_decode = msgspec.json.Decoder().decode

Span = str | bytes  # text, or packed token ids
Piece = tuple[str | None, Span]  # the role, where a message begins


class Prompt:
    """The parts of a prompt, in the order in which an engine renders them.

    `sources`: JSON as it was written (`Raw`), or values; the last `messages` of them are messages. `size`: bytes.
    `decoded`: messages, by their number, that need not be decoded again.
    """

    __slots__ = ("_decoded", "_pieces", "digests", "messages", "size", "sources")

    def __init__(
        self,
        sources: Sequence[Any],
        digests: Sequence[int],
        messages: int,
        size: int,
        decoded: Mapping[int, Any] = _NONE,
    ) -> None:
        self.sources, self.digests, self.messages, self.size = sources, digests, messages, size
        self._decoded = decoded
        self._pieces: dict[int, list[Piece]] = {}

    def pieces(self, part: int) -> list[Piece]:
        """Of one part; at least one."""
        found = self._pieces.get(part)
        if found is None:
            found = self._pieces[part] = self._read(part)
        return found

    def _read(self, part: int) -> list[Piece]:
        source, number = self.sources[part], part - len(self.sources) + self.messages
        if not self.messages:
            return _cut(None, _prompts(source)) or [(None, b"")]
        if number < 0:
            return _cut(None, (encode(_decode(encode(source))).decode(),))
        message = self._decoded.get(number)
        return _message(message or (_decode(source) if isinstance(source, Raw) else source))

    def size_from(self, part: int) -> int:
        """Bytes of the parts from there on; of all, where that is not known."""
        left = self.sources[part:]
        written = [memoryview(source).nbytes for source in left if isinstance(source, Raw)]
        return sum(written) if len(written) == len(left) else self.size

    def forget(self) -> None:
        """What it was read as. A request outlives its estimate, and has its text in its body."""
        self._decoded, self._pieces = _NONE, {}


def prompt_of(operation: Operation, body: Mapping[str, Any]) -> Prompt:
    """The prompt that this body holds."""
    if operation is Operation.COMPLETION:
        prompt = body["prompt"]
        return Prompt((prompt,), (digest_of("prompt", prompt),), 0, len(prompt))
    fields, written = definitions(body), list(map(encode, body["messages"]))
    digests = [*(digest_of(field, body[field]) for field in fields), *map(hash, written)]
    return Prompt([*map(body.__getitem__, fields), *body["messages"]], digests, len(written), sum(map(len, written)))


def definitions(body: Mapping[str, Any]) -> list[str]:
    """The fields that are rendered before the messages."""
    return [field for field in _DEFINITIONS if body.get(field)]


def digest_of(field: str, value: Any) -> int:
    """Of a part that is no message. A message's is the hash of its JSON."""
    return hash((field, type(value), value if isinstance(value, str) else encode(value)))


def _message(message: Mapping[str, Any]) -> list[Piece]:
    """A message without any text is still a message: its first piece is empty then."""
    role, content = message["role"][:_ROLE], message.get("content")
    if len(message) == 2 and type(content) is str and len(content) <= TARGET:
        return [(role, content)]  # as nearly all are
    return _cut(role, _spans(message)) or [(role, "")]


def _cut(role: str | None, spans: Iterable[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in spans:
        for part in segments(span) if isinstance(span, str) else _runs(span):
            pieces.append((role, part))
            role = None
    return pieces


def _runs(ids: bytes) -> Iterator[bytes]:
    step = _IDS_PER_PIECE * ID_BYTES
    return (ids[start : start + step] for start in range(0, len(ids), step))


def _prompts(prompt: str | list[Any]) -> Iterator[Span]:
    if isinstance(prompt, str):
        yield prompt
        return
    yield _packed([token for token in prompt if isinstance(token, int)])
    for each in prompt:
        if not isinstance(each, int):
            yield from _prompts(each)


def _packed(ids: list[int]) -> bytes:
    """An id that no vocabulary has is the engine's to refuse; here it only must not overflow."""
    return array("I", [token & (NOT_TEXT - 1) for token in ids]).tobytes()


def _spans(message: Mapping[str, Any]) -> Iterator[Span]:
    content = message.get("content")
    if type(content) is str:
        yield content
    else:
        for part in content or ():
            yield _part(part)
    for call in message.get("tool_calls") or ():
        yield _call(call.get("function"))
    if message.get("function_call"):
        yield _call(message["function_call"])
    if message.get("name"):
        yield str(message["name"])


def _part(part: Mapping[str, Any]) -> Span:
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else _medium(part)


def _call(function: Any) -> str:
    if not isinstance(function, dict):
        return ""
    return f'{{"name": "{function.get("name")}", "arguments": {function.get("arguments")}}}'


def _medium(part: Mapping[str, Any]) -> bytes:
    """As many ids as the medium counts, all of them its digest: another picture is another prefix."""
    members = [member for value in part.values() for member in (value.items() if isinstance(value, dict) else ())]
    tokens = LOW_DETAIL_TOKENS if ("detail", "low") in members else MEDIA_TOKENS
    strings = [value for _, value in [*part.items(), *members] if isinstance(value, str)]
    reference = max(strings, key=len, default="")  # its URL, or its data in base64
    sample = f"{len(reference)} {reference[:_SAMPLE]} {reference[-_SAMPLE:]}"
    digest = int.from_bytes(blake2b(sample.encode(), digest_size=ID_BYTES).digest(), "little")
    return array("I", [digest | NOT_TEXT]).tobytes() * tokens
