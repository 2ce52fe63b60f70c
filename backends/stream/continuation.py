"""Joins a broken stream and its continuation by another engine into one stream.

- `PartialAnswer` (backends.stream.partial_answer) keeps the text of the first stream while it passes.
- `Continuation` rewrites the events of the second stream: the identity of the first one, no second role, no text twice,
  and usage of the whole answer.
- An engine that refuses to continue writes the whole answer again (`restarted`); if its text does not begin with the
  text so far, the two are no answer of either (`Diverged`).
- An engine may begin anew unasked: its first events are held back until they tell (backends.stream.restart).
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.failures import DIVERGED
from backends.stream.partial_answer import PartialAnswer
from backends.stream.redaction import RewritingError
from backends.stream.restart import Opening, RestartDetector, common_length
from backends.stream.sse import ServerSentEvent, SseDecoder
from backends.stream.taps import DONE

MOST_HELD = 256  # events; eight with text decide
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Diverged(RewritingError):
    """The texts of both streams cannot be joined."""

    failure = DIVERGED


class Continuation:
    """A `Rewriter` of the second stream. `answer`: the answer so far.

    `given`: the part of the text that the engine was given. Chat templates remove trailing white space, so `given` may
    lack it, and the continuation may begin with that white space again. None: the engine was asked for the whole answer
    again. `feed` raises Diverged where the whole answer does not begin with the text so far.

    `prompt_tokens`: of the original prompt, `text_tokens`: of the text given, where an engine has counted them.
    `restarted_unasked`: the engine has ignored the text given; it had better be asked for the whole answer.
    """

    def __init__(
        self,
        answer: PartialAnswer,
        given: str | None,
        prompt_tokens: int | None = None,
        text_tokens: int | None = None,
    ) -> None:
        self.answer = answer
        self.restarted = given is None
        self.restarted_unasked = False
        self.prompt_tokens = prompt_tokens
        self.tokens = 0  # given to the engine; exact once it has reported usage
        if given:
            self.tokens = answer.tokens if text_tokens is None else text_tokens
        self._text = answer.text
        self._repeated = self._text[len(given or "") :]
        self._decoder = SseDecoder()
        self._detector = RestartDetector(self._text, answer.tokens) if given else None
        self._held: list[dict[str, Any]] = []  # events until the detector has decided

    def feed(self, data: bytes) -> bytes:
        return b"".join(map(self._rewritten, self._decoder.feed(data)))

    def drop(self) -> bytes:
        self._decoder = SseDecoder()
        return b""

    def close(self) -> bytes:
        """End the body. Events still held belong to a stream cut short: the next engine writes them again."""
        return b"".join(map(self._rewritten, self._decoder.flush()))

    def _rewritten(self, event: ServerSentEvent) -> bytes:
        if event.data.startswith(b"[DONE]"):
            return (self._judged("", "stop") if self._detector else b"") + DONE
        try:
            chunk = _decode(event.data)
        except ValueError:
            return b""
        if self._detector is None:
            return self._joined(chunk)
        self._held.append(chunk)
        if len(self._held) > MOST_HELD:  # without a text among them
            raise Diverged
        return self._judged(*_text_and_finish(chunk))

    def _judged(self, text: str, finish: str | None) -> bytes:
        """Let the detector read an event. Returns the held events once it has decided."""
        assert self._detector is not None
        opening = self._detector.hear(text, finish)
        if opening is Opening.OPEN:
            return b""
        self.restarted_unasked = opening in (Opening.RESTARTS, Opening.RESTARTS_OTHERWISE)
        if opening in (Opening.RESTARTS_OTHERWISE, Opening.UNCLEAR):
            raise Diverged
        if opening is Opening.RESTARTS:
            self.restarted, self.tokens = True, 0
            self._repeated = self._text
        held, self._held = self._held, []
        self._detector = None
        return b"".join(map(self._joined, held))

    def _joined(self, chunk: dict[str, Any]) -> bytes:
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
        repeated = common_length(text, self._repeated)
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
        if self.restarted:
            self._correct_whole_usage(usage, prompt)
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

    def _correct_whole_usage(self, usage: dict[str, Any], prompt: int) -> None:
        """The engine has written the whole answer: its completion is right, and its prompt may hold the text given."""
        known = prompt if self.prompt_tokens is None else min(self.prompt_tokens, prompt)
        usage["prompt_tokens"] = self.prompt_tokens = known
        if type(total := usage.get("total_tokens")) is int:
            usage["total_tokens"] = total - (prompt - known)


def _text_and_finish(chunk: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish_reason of an event with one choice. The usage event, without a choice, comes after the end."""
    if not (choices := chunk.get("choices")):
        return "", "stop" if chunk.get("usage") else None
    delta = choices[0].get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choices[0].get("text")
    return text if isinstance(text, str) else "", choices[0].get("finish_reason")
