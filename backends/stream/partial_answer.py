"""Keeps the text of a chat or completion while its events pass: the part that a peer is to continue after a break.

Rules:
- Whole events alone pass: a reader never holds half an event when a stream breaks.
- Text is kept as written in JSON, without the events around it. An event of the last known form is not parsed.
- Text alone can be continued. Tool calls, reasoning, structured output and several choices cannot: an engine that is
  given a part of them as the assistant's words does not resume their grammar.
- Words that come in one read with an event that the caller cannot be told are kept here, and were not written: no peer
  may go on behind them.
- All answers share one `TextBudget`. An answer for which there is no room passes on, and cannot be continued.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.failures import decode_leniently
from backends.stream.event_shapes import TokenForm, read_text, written
from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError, WholeEvents

TEXT_LIMIT = 64 << 20  # bytes of text of all answers
GRANT = 4096  # bytes taken from the budget at a time
IDENTITY = ("id", "created", "model", "system_fingerprint")  # members of every event of one answer

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class TextBudget:
    """Bytes of text kept for rescues, of all streams together."""

    def __init__(self, limit: int = TEXT_LIMIT) -> None:
        self.limit = limit
        self.used = 0

    def try_take(self, size: int) -> bool:
        """Take `size` bytes. False: there is no room, and nothing is taken."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= size


class PartialAnswer(WholeEvents):
    """The answer so far. `obstacle`: the reason for which no engine can continue it; empty: one can."""

    def __init__(self, budget: TextBudget) -> None:
        super().__init__()
        self.tokens = 0  # events with text: a lower bound of the tokens
        self.obstacle = ""
        self.identity: dict[str, Any] = {}
        self._budget = budget
        self._granted = 0  # bytes of the budget
        self._text = bytearray()  # as written in JSON
        self._before = 0  # bytes of it before the latest read, at most
        self._form = TokenForm()
        self._decoder = SseDecoder()

    def feed(self, data: bytes) -> bytes:
        if not self.held and (text := self._form.text(data)):  # as nearly always
            self._add_text(text)
            return data
        data = super().feed(data)
        if data and not self.obstacle:
            self._before = len(self._text)
            self._read(data)
        return data

    def refuse_unwritten(self) -> None:
        """The latest read has not reached the caller: with text in it, the answer cannot be continued."""
        if len(self._text) > self._before:
            self._refuse("words that were not relayed")

    @property
    def text(self) -> str:
        """Decoded at every use; empty where there is an obstacle."""
        return read_text(self._text)

    def token_bound(self, counted: int | None) -> int:
        """Tokens of the text, never too few. `counted`: by a tokenizer; None: as many as bytes, the most there can be.

        An engine may have written more tokens than a tokenizer makes of the same text, never fewer than events.
        """
        return max(len(self.text.encode()) if counted is None else counted, self.tokens)

    def release(self) -> None:
        """Forget the text for good, and give its bytes back to the budget."""
        self._refuse("released")

    def _refuse(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle
        self._form = TokenForm()  # nothing is learned from here on
        self._text = bytearray()
        self._budget.give_back(self._granted)
        self._granted = 0

    def _add_text(self, text: bytes) -> None:
        """Add the text of an event, as written."""
        self.tokens += 1
        self._text += text
        if len(self._text) > self._granted:
            self._grow()

    def _grow(self) -> None:
        size = -(-(len(self._text) - self._granted) // GRANT) * GRANT
        if self._budget.try_take(size):
            self._granted += size
        else:
            self._refuse("the memory for rescues is used up")

    def _read(self, data: bytes) -> None:
        """Read all that has passed."""
        if self._passing:
            self._refuse("an event above 1 MiB")
        elif texts := self._form.texts(data):
            self.tokens += len(texts) - 1
            self._add_text(b"".join(texts))
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        try:
            events = self._decoder.feed(data)
        except StreamError:
            self._refuse("an event of unknown form")
            return
        tokens, size = self.tokens, len(self._text)
        for event in events:
            if self.obstacle:
                return
            tokens, size = self.tokens, len(self._text)
            self._add(event)
        if self.tokens == tokens + 1 and not self.obstacle:
            self._form.learn(bytes(events[-1]), read_text(self._text[size:]))

    def _add(self, event: ServerSentEvent) -> None:
        if event.data.startswith(b"[DONE]"):
            return
        try:
            chunk = _decode(event.data)
        except ValueError:
            if _is_json(event.data):  # as with half a surrogate pair; of junk the reader gets nothing
                self._refuse("an event of unknown form")
            return
        except RecursionError:
            self._refuse("an event of unknown form")
            return
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            self._refuse("an event of unknown form")
            return
        self.identity = self.identity or {name: chunk[name] for name in IDENTITY if name in chunk}
        for choice in choices:
            if not self.obstacle:
                self._add_choice(choice)

    def _add_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self._refuse("several choices")
            return
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            self._refuse("an event of unknown form")
            return
        text = choice.get("text") or delta.get("content") or ""
        others = [name for name, value in delta.items() if value and name not in ("role", "content")]
        if others or not isinstance(text, str):
            self._refuse(f"{others[0] if others else 'content'} that is no text")
            return
        if text:
            self._add_text(written(text))


def _is_json(data: bytes) -> bool:
    try:
        decode_leniently(data)
    except ValueError:
        return False
    return True
