"""Taps: read an OpenAI reply in passing, for tokens, usage, end and failure.

Output is what a caller gets to see or hear (`backends.stream.event_shapes`), of two kinds: reasoning, and the answer.

Rules:
- A tap never changes or delays a byte.
- A role preamble, an empty delta, the id of a tool call or of audio, a comment, a ping and usage are no output.
- After `ended` nothing turns success into failure; after `failure` nothing turns failure into success.
- Events are decoded, by C and into the few fields in use: JSON has many spellings, beyond any byte pattern. Events
  equal to the last decoded event, byte for byte, except for the string of the content, are known without decoding, one
  or several in a read: servers write all tokens of an answer in the same form, and a busy machine reads them in groups.
  This saves half of the work for a chunk.
- Of an event above 1 MiB, as with an image in it, long strings are left out: the tap needs no more than their names.
- An event that is no JSON object (junk) would break a caller's parser and is never relayed. The stream goes on without
  it if no text is lost. Junk without quotes and braces is no part of a chunk. Junk with the beginning of a text, too
  many junk events, and junk before the first token end the stream: it is `spoiled` from there on. Of other junk nobody
  knows if it was a token: the answer is complete only if the engine's own count says that all tokens have arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from backends import failures
from backends.interface import EngineTimes, Failure, ReplyFacts, Tap, Usage
from backends.stream.event_shapes import ChoiceShape, ChunkShape, End, TokenForm, WholeShape, end_of, is_failed, outputs
from backends.stream.signatures import note_signatures
from backends.stream.sse import ExcerptDecoder, ServerSentEvent, StreamError, excerpt

T = TypeVar("T")
_chunk_decoder = msgspec.json.Decoder(ChunkShape)
_decode_chunk = _chunk_decoder.decode
_body_decoder = msgspec.json.Decoder(WholeShape)


def decode_as(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode strictly, or else as Python's clients do (NaN and the like). Raises ValueError; ValidationError for JSON
    of another shape."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return msgspec.convert(failures.decode_leniently(data), decoder.type)


# ------------------------------------------------------- taps

DONE = b"data: [DONE]\n\n"
MAX_JUNK = 8  # events without JSON in a stream
_HAS_TEXT = re.compile(rb'"(?:error"|(?:content|text|refusal|arguments|reasoning\w*)"\s*:\s*"[^"])').search
MOST_TOKENS, MOST_MS = 10**12, 1e9  # of a report; larger figures are none
BYTES_PER_TOKEN = 4.0  # of text, where the server reports no usage
LONGEST_TOKENS = 1.5  # times as long in the mean: an event with more text carries several tokens
BODY_LIMIT = 4 << 20  # bytes of a whole reply, kept to find the usage
_IS_END = re.compile(rb'"finish_reason": ?"').search


class _ReplyTap:
    """State common to both taps."""

    def __init__(self, secret: str) -> None:
        self.tokens = 0
        self.text_bytes = 0
        self.reasoning_begun = False
        self.answer_begun = False
        self.usage = Usage()
        self.times = EngineTimes()
        self.facts = ReplyFacts()
        self.ended = False
        self.missing = b""
        self.terminated = False
        self.failure: Failure | None = None
        self.strict = False
        self.junk = 0
        self.is_token = False
        self.spoiled = False
        self.rest = b""
        self.sound = b""
        self.error_event = b""
        self._secret = secret


class StreamTap(_ReplyTap):
    """Tap of an event stream. `choices`: of the answer; the stream ends when each choice has ended.

    `last`: the event at the end of every stream of the dialect, if there is one.
    """

    done_ends = True  # [DONE] ends an answer; in other dialects it is the sign of a server of another dialect

    def __init__(self, choices: int = 1, secret: str = "", last: bytes = b"") -> None:
        super().__init__(secret)
        self.missing = last
        self._choices = choices
        self._ended_choices: set[int] = set()  # by index
        self._passing = False  # the read ends an event that has passed in part
        self._doubtful = False  # a token may have been lost with an event
        self._decoder = ExcerptDecoder()
        self._form: TokenForm | None = None  # from the first token on

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    def feed(self, data: bytes) -> bool:
        """Read bytes of the body. True: visible output among the bytes."""
        if (form := self._form) is None:
            return self._decode(data)
        if not self._decoder.pending and (text := form.text(data)):
            self.tokens += 1
            self.text_bytes += len(text)
            self.is_token = True
            return True
        self.is_token = False
        return self._feed_known(form, data) if b"\n\n" in data and b"\r" not in data else self._decode(data)

    def _feed_known(self, form: TokenForm, data: bytes) -> bool:
        """Decode only the torn events at both ends of a read, and what follows the events of the known form."""
        start = data.find(b"\n\n") + 2 if self._decoder.pending else 0
        texts, size = form.leading(data[start:] if start else data)
        end = data[start + size :]
        if not texts or (start and b"\n\n" in end):
            return self._decode(data)
        visible = self._decode(data[:start]) if start else False
        if self.spoiled:
            return visible
        self.tokens += len(texts)
        self.text_bytes += sum(map(len, texts))
        if end:
            self._decode(end)
            self.sound = data[:size] + self.sound if self.spoiled else b""
        self.is_token = size == len(data)
        return True

    def _decode(self, data: bytes) -> bool:
        """Read events of any form."""
        tokens = self.tokens
        rest = self._decoder.rest_of_event(data) if self._decoder.shortened else b""
        try:
            events = self._decoder.feed(data)
        except StreamError:
            self._fail(failures.LINE_TOO_LONG)
            return False
        self._read_events(events, rest)
        return self.tokens > tokens

    def close(self) -> None:
        """The body is complete."""
        if self._decoder.pending:
            self._read_events(self._decoder.flush())
        if self._doubtful:
            self._settle()

    def _learn_form(self, event: ServerSentEvent) -> None:
        """Keep the form of an event with a text and no end, as most servers write it."""
        data = bytes(event)
        if not _IS_END(data):
            self._form = self._form or TokenForm()
            self._form.learn(data)

    def _read_events(self, events: list[ServerSentEvent], rest: bytes = b"") -> None:
        """`rest`: the end of a first event of which strings were left out."""
        self._passing, tokens = bool(rest), self.tokens
        for number, event in enumerate(events):
            tokens = self.tokens
            if event.data.startswith(b"[DONE]"):
                self.missing = b""
                if self.done_ends:
                    self.terminated = True
                    self._end()
                if self._doubtful:
                    self._settle()
            elif event.name == b"error":
                self._read_error(event.data)
            else:
                self._read_chunk(event.data)
            if self.spoiled:
                self.rest = rest if number else b""
                self.sound = b"".join(map(bytes, events[bool(rest) : number]))
                self.error_event = bytes(event) if _holds_error(event.data) else b""
                return
        if self.tokens == tokens + 1:
            self._learn_form(events[-1])

    def _read_chunk(self, data: bytes) -> None:
        try:
            chunk = _decode_chunk(data)
        except (ValueError, RecursionError):
            if (lenient := self._decode_leniently(data)) is None:
                return
            chunk = lenient
        if chunk.error:
            self._fail(failures.of_event(chunk.error, self._secret))
        for choice in chunk.choices or ():
            delta = choice.delta
            answer, reasoning = (False, False) if delta is None else outputs(delta)
            answer = answer or bool(choice.text)
            if delta is not None and delta.reasoning_details:
                note_signatures(self.facts, delta.reasoning_details)
            if answer or reasoning:
                self._note_output(answer, reasoning)
                text = choice.text if delta is None else delta.content
                if type(text) is str:
                    self.text_bytes += len(text.encode("utf-8", "replace"))
                elif delta is not None:
                    self.text_bytes += text_size([text, delta.reasoning or delta.reasoning_content, delta.tool_calls])
            if choice.finish_reason:
                self.facts.id = chunk.id
                self._end_choice(choice)
        if chunk.service_tier:  # may be null in the first chunks
            self.facts.service_tier = chunk.service_tier
        if chunk.usage is not None:
            read_usage(self.usage, chunk.usage)
        if chunk.metrics is not None:
            read_times(self.times, chunk.metrics)

    def _decode_leniently(self, data: bytes) -> ChunkShape | None:
        """Decode as Python's clients do. None: the data is no chunk."""
        try:
            return decode_as(data, _chunk_decoder)
        except msgspec.ValidationError:
            if not data.lstrip().startswith(b"{"):  # else another object
                self._read_junk(data)
        except ValueError:
            self._read_junk(data)
        return None

    def _note_output(self, answer: bool, reasoning: bool) -> None:
        self.answer_begun = self.answer_begun or answer
        self.reasoning_begun = self.reasoning_begun or reasoning
        self.tokens += answer or reasoning

    def _end_choice(self, choice: ChoiceShape) -> None:
        if end_of(choice.finish_reason) is End.FAILED:
            self._fail(failures.FAILED_INSIDE)
            return
        index = choice.index if type(choice.index) is int else 0
        self._ended_choices.add(index)
        self.facts.finish_reasons[index] = choice.finish_reason
        if len(self._ended_choices) >= self._choices:
            self._end()

    def _end(self) -> None:
        self.ended = self.failure is None and not self._doubtful

    def _read_junk(self, data: bytes) -> None:
        self.junk += 1
        is_part = b'"' in data or b"{" in data
        lost = _HAS_TEXT(data) or self._passing or (is_part and self.strict)
        if lost or self.ended or not self.tokens or self.junk > MAX_JUNK:
            self._fail(failures.NOT_JSON)
        self._doubtful = self._doubtful or is_part

    def _settle(self) -> None:
        """The stream is over: with an event in doubt, the engine's count decides if the answer is complete."""
        if not self.ended and self.failure is None:
            completion = self.usage.completion
            if len(self._ended_choices) >= self._choices and completion is not None and completion <= self.tokens:
                self.ended = True
            else:
                self._fail(failures.TEXT_LOST)

    def _read_error(self, data: bytes) -> None:
        try:
            error = failures.decode_leniently(data)
        except ValueError:
            error = None
        if isinstance(error, dict):
            error = error.get("error", error)
        self._fail(failures.of_event(error, self._secret))

    def _fail(self, failure: Failure) -> None:
        self.spoiled = True
        if not self.ended and self.failure is None:
            self.failure = failure


class BodyTap(_ReplyTap):
    """Tap of a whole reply: the first byte is the answer, the usage is read at the end."""

    def __init__(self, secret: str = "") -> None:
        super().__init__(secret)
        self._body = bytearray()
        self._too_large = False

    @property
    def held_bytes(self) -> int:
        return len(self._body)

    def feed(self, data: bytes) -> bool:
        """Read bytes of the body. True: the first byte among the bytes."""
        first = self.tokens == 0 and bool(data)
        if first:
            self.tokens = 1
            self.answer_begun = True
        if not self._too_large:
            self._keep(data)
        return first

    def _keep(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > BODY_LIMIT:
            self._body = bytearray(excerpt(self._body))
            if len(self._body) > BODY_LIMIT // 2:
                self._too_large = True
                self._body.clear()

    def close(self) -> None:
        """The body is complete. A body too large to be read counts as a success."""
        if self._too_large:
            self.ended = True
            return
        try:
            self._read_body(bytes(self._body))
        except ValueError:
            self.failure = failures.NOT_JSON
        finally:
            self._body.clear()

    def _read_body(self, data: bytes) -> None:
        """Raises ValueError for a body that is no reply."""
        body = decode_as(data, _body_decoder)
        if body.error and not body.choices:
            self.failure = failures.of_event(body.error, self._secret)
            return
        self._read_usage(body.usage)
        self._read_facts(body)
        read_times(self.times, body.metrics)
        if (failure := self._failure_of(body)) is not None:
            self.failure = failure
            return
        if self.usage.completion is None:
            self.text_bytes = text_size(body.choices)
        self.ended = True

    def _failure_of(self, body: WholeShape) -> Failure | None:
        """An answer of which each choice has failed is none, whatever its status."""
        choices = [each for each in body.choices if isinstance(each, dict)] if isinstance(body.choices, list) else []
        ends = [each.get("finish_reason") for each in choices] or [body.stop_reason]
        if not all(map(is_failed, ends)):
            return None
        error = choices[0].get("error") if choices else None
        return failures.of_event(error, self._secret) if error else failures.FAILED_INSIDE

    def _read_usage(self, reported: Any) -> None:
        read_usage(self.usage, reported)

    def _read_facts(self, body: WholeShape) -> None:
        listed = body.choices if isinstance(body.choices, list) else [{"finish_reason": body.stop_reason}]
        choices = [choice for choice in listed if isinstance(choice, dict)]
        reasons = [choice.get("finish_reason") for choice in choices]
        self.facts = ReplyFacts(body.id, body.service_tier, {n: each for n, each in enumerate(reasons) if each})
        for message in (choice.get("message") for choice in choices):
            note_signatures(self.facts, message.get("reasoning_details") if isinstance(message, dict) else None)


class SilentBodyTap(BodyTap):
    """Tap of the reply to an operation that generates no token: an embedding, a ranking, a score."""

    def __init__(self, secret: str = "") -> None:
        super().__init__(secret)
        self.usage.completion = 0

    def _read_usage(self, reported: Any) -> None:
        super()._read_usage(reported)
        self.usage.completion = 0


def _holds_error(data: bytes) -> bool:
    try:
        event = failures.decode_leniently(data)
    except ValueError:
        return False
    return isinstance(event, dict) and bool(event.get("error"))


def text_size(value: Any, depth: int = 6) -> int:
    """Bytes of all texts that were generated, in a choice, message or delta: of answers without a report of tokens."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, list):
        return sum([text_size(item, depth - 1) for item in value]) if depth else 0
    if not isinstance(value, dict) or not depth:
        return 0
    return sum([text_size(item, depth - 1) for name, item in value.items() if name in _GENERATED])


_GENERATED = frozenset(
    {"message", "delta", "content", "text", "refusal", "reasoning", "reasoning_content", "thinking", "tool_calls"}
    | {"function", "function_call", "custom", "name", "arguments", "input", "output", "summary"}
)


def output_tokens(tap: Tap) -> int:
    """As reported by the engine; without a report, one for each event, or by length of the text where an event has more
    text than a token."""
    if tap.usage.completion is not None:
        return tap.usage.completion
    by_text = round(tap.text_bytes / BYTES_PER_TOKEN)
    return by_text if by_text > LONGEST_TOKENS * tap.tokens else tap.tokens


def read_usage(usage: Usage, reported: Any) -> None:
    """Take over a reply's `usage` object; the last one counts."""
    if not isinstance(reported, dict):
        return
    details = reported.get("prompt_tokens_details")
    if isinstance(details, dict):
        cached, written = details.get("cached_tokens"), details.get("cache_write_tokens")  # the latter: OpenRouter
    else:
        cached, written = reported.get("prompt_cache_hit_tokens"), None  # DeepSeek
    prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
    details = reported.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    take_counts(usage, prompt=prompt, completion=completion, cached=cached, cache_write=written, reasoning=reasoning)


def read_times(times: EngineTimes, reported: Any) -> None:
    """Take over vLLM's `metrics` (--enable-per-request-metrics), in milliseconds.

    The time to first token begins at the end of the queue (vllm/entrypoints/generate/base/serving.py: first_token_ts
    - scheduled_ts).
    """
    if isinstance(reported, dict):
        for name, field in _TIMES:
            milliseconds: Any = reported.get(name)
            if type(milliseconds) in (int, float) and 0 <= milliseconds <= MOST_MS:
                setattr(times, field, milliseconds / 1e3)
        if times.prefill is not None:
            times.ttft = times.prefill + (times.queue or 0.0)


_TIMES = ("queue_time_ms", "queue"), ("time_to_first_token_ms", "prefill"), ("mean_itl_ms", "mean_itl")


def take_counts(usage: Usage, **reported: Any) -> None:
    """Take over reported counts, by field of the usage."""
    for field, count in counts_of(reported).items():
        setattr(usage, field, count)


def counts_of(reported: Mapping[str, Any]) -> dict[str, int]:
    """The counts among these; 20.0 is one, as some servers write all numbers."""
    found = {}
    for name, value in reported.items():
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value <= MOST_TOKENS:
            found[name] = value
    return found
