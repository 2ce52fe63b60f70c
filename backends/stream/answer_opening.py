"""Reads the beginning of a streamed answer, to be judged before a caller gets it.

Rules:
- Text alone is judged. The first output of another kind (reasoning, a tool call, audio, an image) ends the opening.
- An opening ends after its tokens, at the end of the answer, with an error, at MAX_OPENING bytes of events, and with
  the first read LONGEST_HOLD after the first token: a caller waits no minutes for an engine that drips.
- All dialects are read: an event tells by its members which one it is of (`choices`, `content_block_*`, `response.*`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.interface import Tap
from backends.stream.event_shapes import ChoiceShape, DeltaShape
from backends.stream.sse import SseDecoder, StreamError
from backends.stream.taps import decode_as, seen_tokens
from backends.stream.visible_output import answers, reasons

MAX_OPENING = 256 * 1024  # bytes of events
LONGEST_HOLD = 20.0  # s
_RESPONSE_ENDS = ("response.completed", "response.incomplete")
_TEXT_BLOCKS = frozenset({"text", "text_delta", "thinking", "thinking_delta", "signature_delta", "redacted_thinking"})


class _EventShape(msgspec.Struct, gc=False):
    type: Any = None
    choices: list[ChoiceShape] | None = None
    delta: Any = None
    content_block: Any = None
    response: Any = None


_decoder = msgspec.json.Decoder(_EventShape)


class AnswerOpening:
    """The first `tokens` of an answer that `tap` reads. `text`: so far; `ends`: reasons for which the answer ended;
    `refused`: by a refusal of the dialect's own form; `is_text`: no output of another kind has come."""

    def __init__(self, tap: Tap, tokens: int) -> None:
        self.text = ""
        self.ends: set[str] = set()
        self.refused = False
        self.is_text = True
        self._tap = tap
        self._tokens = tokens
        self._size = 0  # bytes, from the first output on
        self._decoder = SseDecoder()

    def feed(self, data: bytes) -> bool:
        """Read bytes that the tap has read. True: the opening is complete."""
        self._size += len(data) if self._tap.tokens else 0
        try:
            for event in self._decoder.feed(data):
                self._read(event.data)
        except StreamError:
            self.is_text = False
        tap = self._tap
        over = tap.ended or tap.spoiled or not self.is_text or self._size > MAX_OPENING
        return over or seen_tokens(tap.tokens, len(self.text.encode(errors="surrogatepass"))) >= self._tokens

    def _read(self, data: bytes) -> None:
        try:
            event = decode_as(data, _decoder)
        except ValueError:  # [DONE], or junk, which is the tap's to judge
            return
        kind = event.type if isinstance(event.type, str) else ""
        for choice in event.choices or ():
            self._read_choice(choice)
        if kind.startswith("response."):
            self._read_response(kind, event)
        elif kind == "content_block_delta" and isinstance(event.delta, dict):
            self._read_part(event.delta)
        elif kind == "content_block_start" and isinstance(event.content_block, dict):
            self._read_part(event.content_block)
        elif kind == "message_delta" and isinstance(event.delta, dict):
            self.ends.add(str(event.delta.get("stop_reason")))

    def _read_choice(self, choice: ChoiceShape) -> None:
        delta = choice.delta or DeltaShape()
        if reasons(delta) or not isinstance(delta.content or "", str):
            self.is_text = False
        else:
            self.text += delta.content or ""
        self.refused = self.refused or bool(delta.refusal)
        delta.content = delta.refusal = None
        if answers(delta):
            self.is_text = False
        if choice.finish_reason:
            self.ends.add(str(choice.finish_reason))

    def _read_response(self, kind: str, event: _EventShape) -> None:
        if kind in _RESPONSE_ENDS and isinstance(event.response, dict):
            details = event.response.get("incomplete_details")
            self.ends.add(str(details.get("reason")) if isinstance(details, dict) else "")
        elif kind == "response.output_text.delta":
            self.text += str(event.delta or "")
        elif kind == "response.refusal.delta":
            self.refused = True
        elif kind.endswith(".delta") and event.delta:
            self.is_text = False

    def _read_part(self, part: dict[str, Any]) -> None:
        """A block of a message as it begins, or its delta."""
        text = part.get("text")
        self.text += text if isinstance(text, str) else ""
        if part.get("thinking") or str(part.get("type")) not in _TEXT_BLOCKS:
            self.is_text = False
