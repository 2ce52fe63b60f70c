"""Reading an OpenAI reply as it passes: is this a token, what was used, has it ended, did it fail?

Rules:
- A tap never changes or delays a byte.
- Content is what somebody can see: a non-empty delta of content, reasoning or refusal, a tool call with a name
  or arguments, a completion's text. A role preamble, an empty delta, a comment, a usage event are not.
- After `ended` nothing turns success into failure; after `failure` nothing turns it into success.
- An event is decoded, by C and into the few fields that matter: no byte pattern can be right about JSON that comes
  in other clothes. But one that is byte for byte the last decoded one, except for what stands between the quotes of
  its content, is known without: servers write all tokens of an answer in one form.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends import failures
from backends.interface import EngineTimes, Failure, FailureKind, Signal, Usage
from backends.stream.sse import Decoder, Event, StreamError, one_liners

_CONTENT, _USAGE, _END, _ERROR = (int(s) for s in (Signal.CONTENT, Signal.USAGE, Signal.END, Signal.ERROR))
CONTENT = Signal.CONTENT
CONTENT_KEY = b'"content":"'
NEVER = b"\0"  # no event ends like this
_SIGNALS = tuple(Signal(bits) for bits in range(16))  # `|` of an IntFlag costs more than all the rest of `feed`

_BODY_LIMIT = 4 << 20  # bytes of a whole reply that are kept to find its usage


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning: Any = None  # vLLM, OpenRouter
    reasoning_content: Any = None  # DeepSeek, SGLang, llama.cpp
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: Any = None
    finish_reason: Any = None


class _Body(msgspec.Struct, gc=False):
    usage: Any = None
    error: Any = None
    metrics: Any = None


class _Chunk(_Body, gc=False):
    choices: list[_Choice] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_body = msgspec.json.Decoder(_Body).decode


class StreamTap:
    """Of an event stream. `choices` is the request's `n`: a stream has ended when each of them has."""

    __slots__ = (
        "_after",
        "_before",
        "_decoder",
        "_least",
        "_open",
        "_secret",
        "ended",
        "failure",
        "times",
        "tokens",
        "usage",
    )

    def __init__(self, choices: int = 1, secret: str = "") -> None:
        self.tokens = 0
        self.usage = Usage()
        self.times = EngineTimes()
        self.ended = False
        self.failure: Failure | None = None
        self._open = choices
        self._secret = secret
        self._decoder = Decoder()
        self._before, self._after = b"", NEVER  # what an event of the usual form begins and ends with
        self._least = 0  # bytes of one, with an empty content

    def feed(self, data: bytes) -> Signal:
        after = self._after
        if (
            data.endswith(after)
            and data.startswith(self._before)
            and len(data) > self._least
            # Its content ends at the first quote: if that is where the form goes on, nothing else differs.
            and data.find(b'"', len(self._before)) == len(data) - len(after)
            and not self._decoder.pending
        ):
            self.tokens += 1
            return CONTENT
        events = one_liners(data) if not self._decoder.pending else None
        if events is not None:
            bits = 0
            for event in events:
                bits |= self._end() if event.startswith(b"[DONE]") else self._chunk(event)
            if bits == _CONTENT and len(events) == 1:
                self._learn(data)
            return _SIGNALS[bits]
        try:
            return self._read(self._decoder.feed(data))
        except StreamError:
            return _SIGNALS[self._fail(failures.LINE_TOO_LONG)]

    def close(self) -> Signal:
        return self._read(self._decoder.flush())

    def _learn(self, data: bytes) -> None:
        """The form of an event with one content that is not empty, and nothing escaped in it."""
        start = data.find(CONTENT_KEY) + len(CONTENT_KEY)
        end = data.find(b'"', start)
        if data.count(CONTENT_KEY) == 1 and b"\\" not in data and end > start:
            self._before, self._after = data[:start], data[end:]
            self._least = len(data) - (end - start)

    def _read(self, events: list[Event]) -> Signal:
        bits = 0
        for name, data in events:
            if data.startswith(b"[DONE]"):
                bits |= self._end()
            elif name == b"error":
                bits |= self._error(data)
            else:
                bits |= self._chunk(data)
        return _SIGNALS[bits]

    def _chunk(self, data: bytes) -> int:
        try:
            chunk = _decode_chunk(data)
        except msgspec.ValidationError:
            return 0  # JSON, but no chunk
        except (msgspec.DecodeError, RecursionError):
            return self._odd_chunk(data)
        return self._note(chunk)

    def _odd_chunk(self, data: bytes) -> int:
        """What the strict decoder refuses: NaN and the like are read as Python clients do, the rest is a failure."""
        try:
            return self._note(msgspec.convert(failures.decode_leniently(data), _Chunk))
        except msgspec.ValidationError:
            return 0
        except ValueError:
            return self._fail(failures.NOT_JSON)

    def _note(self, chunk: _Chunk) -> int:
        bits = self._fail(failures.of_event(chunk.error, self._secret)) if chunk.error else 0
        if chunk.choices:
            bits |= self._choices(chunk.choices)
        if chunk.usage:
            bits |= note_usage(self.usage, chunk.usage)
        if chunk.metrics:
            note_times(self.times, chunk.metrics)
        return bits

    def _choices(self, choices: list[_Choice]) -> int:
        bits = 0
        for choice in choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or _is_visible(delta))):
                self.tokens += 1
                bits |= _CONTENT
            if choice.finish_reason:
                bits |= self._finish(choice.finish_reason)
        return bits

    def _finish(self, reason: Any) -> int:
        if reason == "error":  # OpenRouter's way to say that the model's provider failed
            return self._fail(Failure(FailureKind.SERVER, "The backend failed."))
        self._open -= 1
        return self._end() if self._open <= 0 else 0

    def _end(self) -> int:
        if self.failure is not None:
            return 0
        self.ended = True
        return _END

    def _error(self, data: bytes) -> int:
        try:
            said = failures.decode_leniently(data)
        except ValueError:
            said = None
        return self._fail(failures.of_event(said.get("error", said) if isinstance(said, dict) else said, self._secret))

    def _fail(self, failure: Failure) -> int:
        if self.ended or self.failure is not None:
            return 0
        self.failure = failure
        return _ERROR


class BodyTap:
    """Of a whole reply: its first byte is its content, its usage is read at the end."""

    __slots__ = ("_pieces", "_room", "_secret", "ended", "failure", "times", "tokens", "usage")

    def __init__(self, secret: str = "") -> None:
        self.tokens = 0
        self.usage = Usage()
        self.times = EngineTimes()
        self.ended = False
        self.failure: Failure | None = None
        self._secret = secret
        self._pieces: list[bytes] = []
        self._room = _BODY_LIMIT

    def feed(self, data: bytes) -> Signal:
        first = self.tokens == 0 and bool(data)
        self._room -= len(data)
        if self._room >= 0:
            self._pieces.append(data)
        else:
            self._pieces.clear()
        self.tokens = 1 if first else self.tokens
        return _SIGNALS[_CONTENT if first else 0]

    def close(self) -> Signal:
        if self._room < 0:  # too large to be looked into: taken on trust
            self.ended = True
            return Signal.END
        data = b"".join(self._pieces)
        self._pieces.clear()
        try:
            body = _decode_body(data)
        except (msgspec.DecodeError, RecursionError):
            return self._odd_body(data)
        return self._settle(body)

    def _settle(self, body: _Body) -> Signal:
        if body.error:
            self.failure = failures.of_event(body.error, self._secret)
            return Signal.ERROR
        bits = _END
        if body.usage:
            bits |= note_usage(self.usage, body.usage)
        if body.metrics:
            note_times(self.times, body.metrics)
        self.ended = True
        return _SIGNALS[bits]

    def _odd_body(self, data: bytes) -> Signal:
        try:
            return self._settle(msgspec.convert(failures.decode_leniently(data), _Body))
        except (ValueError, msgspec.ValidationError):
            self.failure = failures.NOT_JSON
            return Signal.ERROR


def _is_visible(delta: _Delta) -> bool:
    if delta.reasoning or delta.reasoning_content or delta.refusal:
        return True
    if isinstance(delta.tool_calls, list) and any(map(_is_call, delta.tool_calls)):
        return True
    return _is_function(delta.function_call)


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and _is_function(call.get("function"))


def _is_function(function: Any) -> bool:
    return isinstance(function, dict) and bool(function.get("name") or function.get("arguments"))


def note_usage(usage: Usage, said: Any) -> int:
    """Take over what a `usage` object says; the last one stands."""
    if not isinstance(said, dict):
        return 0
    details = said.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else said.get("prompt_cache_hit_tokens")
    usage.prompt = _count(said.get("prompt_tokens"), usage.prompt)
    usage.completion = _count(said.get("completion_tokens"), usage.completion)
    usage.cached = _count(cached, usage.cached)  # DeepSeek has it beside the others
    return _USAGE


def note_times(times: EngineTimes, said: Any) -> None:
    """Take over vLLM's `metrics` (--enable-per-request-metrics), in milliseconds. What it calls the time to the first
    token begins where the queue ends (vllm/entrypoints/generate/base/serving.py: first_token_ts - scheduled_ts)."""
    if isinstance(said, dict):
        times.queue = _milliseconds(said.get("queue_time_ms"), times.queue)
        times.prefill = _milliseconds(said.get("time_to_first_token_ms"), times.prefill)
        times.mean_itl = _milliseconds(said.get("mean_itl_ms"), times.mean_itl)


def _count(value: Any, known: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else known


def _milliseconds(value: Any, known: float | None) -> float | None:
    return value / 1e3 if type(value) in (int, float) and value >= 0 else known
