"""What of a request body becomes prompt tokens, as a sequence of pieces.

A piece is a segment of text, or token ids where there is no text: so that a prompt can be recognised
piece by piece from its beginning. Pure; the body is as ingress validated it. Rules:
- Tool definitions come first, as JSON: engines render them into the system prompt.
- The first piece of a message names its role. A completion prompt has no roles.
- Images and other media count by OpenAI's tiles (its vision guide): 85 tokens at low detail, else those of
  a picture whose size is not known, taken as 1024 x 1024: 85 + 4 tiles of 170.
- Several prompts of one completion request count as one after another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from backends.interface import Operation
from gateway.estimate.segments import segments
from gateway.strictjson import encode

MEDIA_TOKENS = 85 + 4 * 170
LOW_DETAIL_TOKENS = 85
ID_BYTES = 4  # token ids are packed as unsigned 32 bits
NOT_TEXT = 0x8000_0000  # ids from here on are not of a vocabulary: they stand for media and message openings

_IDS_PER_PIECE = 1024  # a medium is one piece
_ROLE = 32  # characters that tell roles apart
_SAMPLE = 4096  # characters from either end that tell a medium from another: formats end with a checksum

Span = str | bytes  # text, or packed token ids
Piece = tuple[str | None, Span]  # the role, where a message begins


@dataclass(frozen=True, slots=True)
class Prompt:
    """The pieces of a prompt, in the order in which an engine renders them."""

    pieces: tuple[Piece, ...]
    messages: int = 0


def prompt_of(operation: Operation, body: Mapping[str, Any]) -> Prompt:
    """The prompt that this body holds."""
    pieces: list[Piece] = []
    if operation is Operation.COMPLETION:
        _add(pieces, None, _prompts(body["prompt"]))
        return Prompt(tuple(pieces))
    messages = body["messages"]
    _add(pieces, None, (encode(body[key]).decode() for key in ("tools", "functions") if body.get(key)))
    for message in messages:
        _add(pieces, message["role"][:_ROLE], _spans(message))
    return Prompt(tuple(pieces), len(messages))


def _add(pieces: list[Piece], role: str | None, spans: Iterator[Span]) -> None:
    """A message without any text is still a message: its first piece is empty then."""
    for span in spans:
        for part in segments(span) if isinstance(span, str) else _runs(span):
            pieces.append((role, part))
            role = None
    if role is not None:
        pieces.append((role, ""))


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
