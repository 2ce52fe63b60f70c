"""The parts of a request body which become prompt tokens. Pure; the body is already validated.

A prompt is a sequence of parts: the tool definitions, then the messages; or the whole prompt of a completion request. A
part is named by a digest of its JSON, by which it is recognised before it is decoded. An unknown part is read as
pieces: segments of text, or token ids where there is no text. Rules:
- Tool definitions come first, as JSON: engines render them into the system prompt.
- The first piece of a message names its role. A completion prompt has no roles.
- Images, audio and files count by the rule of the model's family (`gateway.tokenize.media`).
- Several prompts of one completion request count as one after another.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import encode
from gateway.tokenize.media import NOT_TEXT, TILES, MediaFamily, medium_ids
from gateway.tokenize.tokenizers import ID_BYTES, SEGMENT_MIN, segments

MEDIA_TOKENS = 1_000_000  # of a prompt, counted
TEXT_EFFORT = 1500  # bytes of a long text that are estimated in the time of a short one, which is counted at once

_DEFINITIONS = ("tools", "functions")
_ROLE = 32  # characters which tell roles apart
_decode = msgspec.json.Decoder().decode

Span = str | bytes  # text, or packed token ids
MediumIds = Callable[[Mapping[str, Any]], bytes]  # of a part of a content


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
    media: bool = False  # a message holds more than text
    media_left: int = MEDIA_TOKENS  # tokens of media that are still counted

    def pieces(self, part: int, family: MediaFamily = TILES) -> list[Piece]:
        """The pieces of a part, never none. `family`: of the model, by which media count."""
        source, number = self.sources[part], part - len(self.sources) + self.messages
        if not self.messages:
            return _cut(None, _prompts(source)) or [Piece(None, b"")]
        if number < 0:
            return _cut(None, (encode(_decode(encode(source))).decode(),))
        message = self.decoded.get(number)
        return _message(
            message or (_decode(source) if isinstance(source, Raw) else source), partial(self._medium, family)
        )

    def is_text(self, part: int) -> bool:
        """The part is one text, and decoded: its pieces are cut in time linear in its bytes."""
        if not self.messages:
            return isinstance(self.sources[part], str)
        message = self.decoded.get(part - len(self.sources) + self.messages)
        return message is not None and len(message) == 2 and type(message.get("content")) is str

    def rewind(self) -> None:
        """The parts are read again."""
        self.media_left = MEDIA_TOKENS

    def _medium(self, family: MediaFamily, part: Mapping[str, Any]) -> bytes:
        ids = medium_ids(part, family, self.media_left)
        self.media_left -= len(ids) // ID_BYTES
        return ids

    @property
    def effort(self) -> int:
        """Work of an estimate of the whole prompt, in bytes of long text."""
        return self.size + TEXT_EFFORT * (self.messages or sum(map(_texts, self.sources)))

    def effort_from(self, part: int) -> int:
        """The same from this part on; of the whole prompt where the size of a part is unknown."""
        left = self.sources[part:]
        written = [memoryview(source).nbytes for source in left if isinstance(source, Raw)]
        return sum(written) + TEXT_EFFORT * len(left) if len(written) == len(left) else self.effort


def prompt_of(operation: Operation, body: Mapping[str, Any]) -> Prompt:
    if operation is Operation.COMPLETION:
        prompt = body["prompt"]
        size = len(prompt if isinstance(prompt, str) else encode(prompt))
        return Prompt((prompt,), (digest_of("prompt", prompt),), 0, size)
    fields, written = definitions(body), list(map(encode, body["messages"]))
    digests = [*(digest_of(field, body[field]) for field in fields), *map(hash, written)]
    sources = [*map(body.__getitem__, fields), *body["messages"]]
    media = any(_holds_media(message) for message in body["messages"])
    return Prompt(sources, digests, len(written), sum(map(len, written)), media=media)


def _holds_media(message: Any) -> bool:
    if isinstance(message, Raw):
        return True  # perhaps
    content = message.get("content")
    return type(content) is list and any("text" not in part and "refusal" not in part for part in content)


def definitions(body: Mapping[str, Any]) -> list[str]:
    """The fields which are rendered before the messages."""
    return [field for field in _DEFINITIONS if body.get(field)]


def digest_of(field: str, value: Any) -> int:
    """Digest of a part other than a message. A message's digest is the hash of its JSON."""
    return hash((field, type(value), value if isinstance(value, str) else encode(value)))


def _message(message: Mapping[str, Any], ids_of: MediumIds) -> list[Piece]:
    """A message without any text is still a message: its first piece is empty then."""
    role, content = message["role"][:_ROLE], message.get("content")
    if len(message) == 2 and type(content) is str and len(content) <= SEGMENT_MIN:
        return [Piece(role, content)]  # as nearly all are
    return _cut(role, _spans(message, ids_of)) or [Piece(role, "")]


def _cut(role: str | None, spans: Iterable[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in spans:
        for part in segments(span) if isinstance(span, str) else filter(None, [span]):
            pieces.append(Piece(role, part))
            role = None
    return pieces


def _texts(prompt: str | list[Any]) -> int:
    """Texts, or lists of ids, of a completion prompt."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _prompts(prompt: str | list[Any]) -> Iterator[Span]:
    if isinstance(prompt, str):
        yield prompt
        return
    ids = [token for token in prompt if isinstance(token, int)]
    yield array("I", [token & (NOT_TEXT - 1) for token in ids]).tobytes()  # the engine rejects larger ids
    for each in prompt:
        if not isinstance(each, int):
            yield from _prompts(each)


def _spans(message: Mapping[str, Any], ids_of: MediumIds) -> Iterator[Span]:
    content = message.get("content")
    if type(content) is str:
        yield content
    else:
        for part in content or ():
            text = part.get("text", part.get("refusal"))
            yield text if isinstance(text, str) else ids_of(part)
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
