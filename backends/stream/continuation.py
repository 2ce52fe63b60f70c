"""Joins a broken stream and its continuation by another engine into one stream.

- `RelayedEvents` passes whole events only, and keeps a copy: a reader never holds half an event when a stream breaks.
- `read_partial` decodes the kept events once a stream has broken, and says whether the answer can be continued. Text
  can. Tool calls, reasoning and structured output cannot: an engine that is given a part of them as the assistant's
  words does not resume their grammar.
- `Continuation` rewrites the events of the second stream: the identity of the first one, no second role, no text twice,
  and usage of the whole answer. An engine that refuses to continue writes the whole answer again (`restarted`); if its
  text does not begin with the text so far, the two are no answer of either (`Diverged`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.stream.redaction import Rewriter
from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError, WholeEvents
from backends.stream.taps import DONE

KEPT = 4 << 20  # bytes of an answer's events; a longer answer is not continued
IDENTITY = ("id", "created", "model", "system_fingerprint")  # members of every event of one answer

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class RelayedEvents(WholeEvents):
    """Keeps all events. `overflowed`: too many, and nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.overflowed = False
        self._events: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        data = super().feed(data)
        if not self.overflowed:
            self._events.append(data)
            self._size += len(data)
            if self._size > KEPT:
                self.overflowed = True
                self._events.clear()
        return data

    @property
    def complete(self) -> bytes:
        """All complete events."""
        return b"".join(self._events)


class RewriterChain:
    """Two rewriters, one after the other."""

    def __init__(self, first: Rewriter, second: Rewriter) -> None:
        self._first, self._second = first, second

    def feed(self, data: bytes) -> bytes:
        return self._second.feed(self._first.feed(data))

    def drop(self) -> bytes:
        torn = self._first.drop()
        return self._second.drop() or torn

    def close(self) -> bytes:
        return self._second.feed(self._first.close()) + self._second.close()


@dataclass(slots=True)
class PartialAnswer:
    """An answer that broke off. `obstacle`: the reason for which no engine can continue; empty: one can."""

    text: str = ""
    tokens: int = 0  # events with text: a lower bound of the tokens
    finished: bool = False  # a finish_reason was relayed
    obstacle: str = ""
    identity: dict[str, Any] = field(default_factory=dict)

    def add(self, event: ServerSentEvent) -> None:
        if event.data.startswith(b"[DONE]"):
            self.finished = True
            return
        try:
            chunk = _decode(event.data)
            choices = chunk["choices"]
        except ValueError:
            return  # without text, else the stream would have ended there
        except KeyError:
            self.obstacle = self.obstacle or "an event of unknown form"
            return
        self.identity = self.identity or {name: chunk[name] for name in IDENTITY if name in chunk}
        for choice in choices:
            self._add_choice(choice)

    def _add_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self.obstacle = "several choices"
            return
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        others = [name for name, value in delta.items() if value and name not in ("role", "content")]
        if others or not isinstance(text, str):
            self.obstacle = f"{others[0] if others else 'content'} that is no text"
            return
        self.text += text
        self.tokens += bool(text)
        self.finished = self.finished or bool(choice.get("finish_reason"))


def read_partial(relayed: RelayedEvents) -> PartialAnswer:
    """The answer as relayed so far."""
    answer = PartialAnswer(obstacle="a length above 4 MiB" if relayed.overflowed else "")
    decoder = SseDecoder()
    try:
        for event in decoder.feed(relayed.complete):
            answer.add(event)
        if decoder.pending:  # of an event too large to be held back
            answer.obstacle = answer.obstacle or "half an event"
    except StreamError:
        answer.obstacle = "an event of unknown form"
    return answer


class Diverged(ValueError):
    """The whole answer of a second engine does not begin with the text so far."""


class Continuation:
    """A `Rewriter` of the second stream. `answer`: the answer so far.

    `given`: the part of the text that the engine was given. Chat templates remove trailing white space, so `given` may
    lack it, and the continuation may begin with that white space again. None: the engine writes the whole answer again,
    and `feed` raises Diverged where it does not begin with the text so far.
    """

    def __init__(self, answer: PartialAnswer, given: str | None, prompt_tokens: int | None = None) -> None:
        self.answer = answer
        self.restarted = given is None
        self.prompt_tokens = prompt_tokens  # of the original prompt, where an engine has counted them
        self.tokens = 0 if given is None else answer.tokens  # given to the engine; exact once it has reported usage
        self._repeated = answer.text[len(given or "") :]
        self._decoder = SseDecoder()

    def feed(self, data: bytes) -> bytes:
        return b"".join(map(self._rewritten, self._decoder.feed(data)))

    def drop(self) -> bytes:
        self._decoder = SseDecoder()
        return b""

    def close(self) -> bytes:
        return b"".join(map(self._rewritten, self._decoder.flush()))

    def _rewritten(self, event: ServerSentEvent) -> bytes:
        if event.data.startswith(b"[DONE]"):
            return DONE
        try:
            chunk = _decode(event.data)
        except ValueError:
            return b""
        chunk.update({name: value for name, value in self.answer.identity.items() if name in chunk})
        choices = [choice for choice in chunk.get("choices") or () if self._continue_choice(choice)]
        if isinstance(chunk.get("usage"), dict):
            self._correct_usage(chunk["usage"])
        elif not choices:
            return b""
        return b"data: " + _encode({**chunk, "choices": choices}) + b"\n\n"

    def _continue_choice(self, choice: dict[str, Any]) -> bool:
        """False: nothing of the choice is new to the reader."""
        delta = choice.get("delta")
        text_of, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        text_of.pop("role", None)
        text = text_of.get(name)
        if isinstance(text, str):
            text_of[name] = text = self._without_repetition(text)
        more = bool(choice.get("finish_reason") or any(value for key, value in text_of.items() if key != name))
        if more and self.restarted and self._repeated:
            raise Diverged
        return more or bool(text)

    def _without_repetition(self, text: str) -> str:
        repeated = _common(text, self._repeated)
        text, rest = text[repeated:], self._repeated[repeated:]
        if text and rest and self.restarted:
            raise Diverged
        self._repeated = "" if text else rest
        return text

    def _correct_usage(self, usage: dict[str, Any]) -> None:
        """The text given to the engine counts as completion, not as prompt; the total stays."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is not int or type(completion) is not int:
            return
        known = self.prompt_tokens
        if known is not None and known <= prompt:
            self.tokens = prompt - known
        before = min(self.tokens, prompt)
        usage["prompt_tokens"] = self.prompt_tokens = prompt - before
        usage["completion_tokens"] = completion + before
        if (
            isinstance(details := usage.get("prompt_tokens_details"), dict)
            and type(details.get("cached_tokens")) is int
        ):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
