"""Taps of the dialects that are no chat, Anthropic's Messages and OpenAI's Responses: tokens, usage, end and failure of
a reply in the caller's or the backend's own bytes. Rules: `backends.stream.taps`.

Messages: members as of November 2026 (platform.claude.com/docs, streaming; vLLM's `/v1/messages` writes the same
events). Output is text, thinking, the name and the input of a tool call, a citation, a result of the provider's own
tools; no output are message_start, ping, an empty delta, a signature, thinking in cipher. A message ends with its stop
reason: message_stop only repeats that.

Responses, of backends that speak it natively: output is a delta that is not empty (text, refusal, arguments of a
function, input of a custom tool, code, audio and its transcript; reasoning and its summary apart), a partial image and
a citation. Events that announce (`created`, `in_progress`, `added`) and events that repeat (`done`) are none; the
`done` of a text without deltas is.

Event names: openai-python 3.54, types/responses (2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends import failures
from backends.interface import ReplyFacts, Usage
from backends.stream.event_shapes import MessageEventShape, ResponseEventShape, ResponseShape, WholeShape, is_failed
from backends.stream.signatures import note_signatures
from backends.stream.sse import ServerSentEvent
from backends.stream.taps import BodyTap, StreamTap, counts_of, decode_as, take_counts

_TEXTS = frozenset({"text", "thinking", "redacted_thinking"})  # blocks without a name or result


_message_events = msgspec.json.Decoder(MessageEventShape)


class MessagesTap(StreamTap):
    """Tap of an event stream."""

    done_ends = False

    def __init__(self, secret: str = "") -> None:
        super().__init__(1, secret)
        self._counts: dict[str, Any] = {}  # the latest of each count: an event need not repeat all

    def _read_chunk(self, data: bytes) -> None:
        try:
            event = decode_as(data, _message_events)
        except (ValueError, msgspec.ValidationError):
            self._fail(failures.NOT_JSON)
            return
        delta = event.delta if isinstance(event.delta, dict) else {}
        if event.type == "content_block_delta":
            self._read_part(delta)
            if "signature" in delta:
                note_signatures(self.facts, [delta])
        elif event.type == "content_block_start" and isinstance(event.content_block, dict):
            self._read_block(event.content_block)
        elif event.type == "message_start" and isinstance(event.message, dict):
            self.facts.id = event.message.get("id")
            self._read_counts(event.message.get("usage"))
        elif event.type == "message_delta":
            self._read_counts(event.usage)
            if reason := delta.get("stop_reason"):
                self.facts.finish_reasons[0] = reason
                if is_failed(reason):
                    self._fail(failures.FAILED_INSIDE)
                self.ended = self.ended or self.failure is None
        elif event.type == "message_stop":
            self.terminated = True
            self.ended = self.failure is None
        elif event.error:
            self._fail(failures.of_event(event.error, self._secret))

    def _read_part(self, part: Mapping[str, Any]) -> None:
        answer = bool(part.get("text") or part.get("partial_json") or part.get("citation"))
        self._note_output(answer, bool(part.get("thinking")))

    def _read_block(self, block: Mapping[str, Any]) -> None:
        if str(block.get("type")) in _TEXTS:
            self._read_part(block)
            note_signatures(self.facts, [block])
        else:
            self._note_output(bool(block.get("name") or block.get("content")), False)

    def _read_counts(self, reported: Any) -> None:
        if isinstance(reported, dict):
            self._counts |= {name: count for name, count in reported.items() if count is not None}
            read_message_usage(self.usage, self._counts)
            self.facts.service_tier = speed_of_message(self._counts)


class MessagesBodyTap(BodyTap):
    """Tap of a whole reply."""

    def _read_usage(self, reported: Any) -> None:
        read_message_usage(self.usage, reported)

    def _read_facts(self, body: WholeShape) -> None:
        super()._read_facts(body)
        self.facts.service_tier = speed_of_message(body.usage)
        note_signatures(self.facts, body.content)


def read_message_usage(usage: Usage, reported: Any) -> None:
    """Read a `usage` object. Anthropic's `input_tokens` exclude cached tokens, read or written, and its totals
    exclude compactions (`iterations`), which are billed as well."""
    if not isinstance(reported, dict):
        return
    compactions = _iterations(reported, "compaction")
    billed = {name: _billed(reported, name, compactions) for name in _COUNTS}
    cached, written = billed["cache_read_input_tokens"], billed["cache_creation_input_tokens"]
    if (rest := billed["input_tokens"]) is not None:
        usage.prompt = rest + (cached or 0) + (written or 0)
    usage.completion = _known(billed["output_tokens"], usage.completion)
    usage.cached = _known(cached, usage.cached)
    usage.cache_write = _known(written, usage.cache_write)
    usage.cache_write_1h = _known(billed[_HOUR], usage.cache_write_1h)
    usage.compacted = usage.compacted or bool(compactions)
    if isinstance(details := reported.get("output_tokens_details"), dict):
        take_counts(usage, reasoning=details.get("thinking_tokens"))


def speed_of_message(reported: Any) -> Any:
    """Speed by a `usage` object, which has a tier beside it: `fast` is a speed, `priority` a tier."""
    return (reported.get("speed") or reported.get("service_tier")) if isinstance(reported, dict) else None


_HOUR = "ephemeral_1h_input_tokens"  # of `cache_creation`
_COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", _HOUR)


def _iterations(reported: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """Passes of the model over a prompt, with counts of their own."""
    listed = reported.get("iterations")
    listed = listed if isinstance(listed, list) else []
    return [each for each in listed if isinstance(each, dict) and each.get("type") == kind]


def _billed(reported: Mapping[str, Any], name: str, compactions: Sequence[Mapping[str, Any]]) -> int | None:
    """Tokens of the message, as told of it whole or by its passes, and of the compactions; None: not told."""
    passes = [count for each in _iterations(reported, "message") if (count := _count(each, name)) is not None]
    before = [count for each in compactions if (count := _count(each, name)) is not None]
    own = _count(reported, name)
    if own is None and not passes and not before:
        return None
    return max(own or 0, sum(passes)) + sum(before)


def _count(counts: Mapping[str, Any], name: str) -> int | None:
    if name == _HOUR:
        kept = counts.get("cache_creation")
        counts = kept if isinstance(kept, dict) else {}
    return counts_of({name: counts.get(name)}).get(name)


def _known(count: int | None, known: int | None) -> int | None:
    return known if count is None else count


_REASONING = "response.reasoning"  # beginning of the names of events about reasoning
_OUTPUT = ("response.image_generation_call.partial_image", "response.output_text.annotation.added")
_TEXT_DONE = (
    *("response.output_text.done", "response.refusal.done", "response.reasoning_text.done"),
    *("response.function_call_arguments.done", "response.custom_tool_call_input.done"),
)
_ENDS = ("response.completed", "response.incomplete")
_FAILED = ("response.failed", "error")


_response_events = msgspec.json.Decoder(ResponseEventShape)
_response_decoder = msgspec.json.Decoder(ResponseShape)


class ResponsesTap(StreamTap):
    """Tap of an event stream. It ends by `response.completed` or `response.incomplete`."""

    done_ends = False

    def __init__(self, secret: str = "") -> None:
        super().__init__(secret=secret)
        self._failed = b""  # data of a `response.failed`

    def _learn_form(self, event: ServerSentEvent) -> None:
        """Events are numbered: none is like another."""

    def _read_events(self, events: list[ServerSentEvent], rest: bytes = b"") -> None:
        super()._read_events(events, rest)
        if self.spoiled and self._failed:  # the caller's to read, as it is
            self.error_event = bytes(ServerSentEvent(b"response.failed", self._failed))

    def _read_chunk(self, data: bytes) -> None:
        try:
            event = decode_as(data, _response_events)
        except msgspec.ValidationError:
            if not data.lstrip().startswith(b"{"):
                self._fail(failures.NOT_JSON)
            return  # an object, but not an event
        except ValueError:
            self._fail(failures.NOT_JSON)
            return
        kind = event.type if isinstance(event.type, str) else ""
        if (kind.endswith(".delta") and event.delta) or kind in _OUTPUT or (kind in _TEXT_DONE and not self.tokens):
            self._count(kind)
        elif kind in _ENDS:
            self._read_end(event.response)
        elif kind in _FAILED or event.error:
            self._read_failure(kind, event, data)

    def _count(self, kind: str) -> None:
        self.tokens += 1
        if kind.startswith(_REASONING):
            self.reasoning_begun = True
        else:
            self.answer_begun = True

    def _read_end(self, response: ResponseShape | None) -> None:
        if response is not None:
            read_response_usage(self.usage, response.usage)
            self.facts = facts_of(response)
        self.terminated = True
        self.ended = self.failure is None

    def _read_failure(self, kind: str, event: ResponseEventShape, data: bytes) -> None:
        """A server may name the event in its data alone."""
        if kind == "error":
            self._read_error(data)
            return
        response = event.response or ResponseShape()
        error = response.error or event.error
        read_response_usage(self.usage, response.usage)
        self._failed = data if kind else b""
        self._fail(failures.of_event(error, self._secret) if error else failures.FAILED_INSIDE)


class ResponsesBodyTap(BodyTap):
    """Tap of a whole reply."""

    def _read_body(self, data: bytes) -> None:
        response = decode_as(data, _response_decoder)
        read_response_usage(self.usage, response.usage)
        self.facts = facts_of(response)
        if response.status == "failed" or (response.error and not response.output):
            self.failure = failures.of_event(response.error, self._secret) if response.error else failures.FAILED_INSIDE
        else:
            self.ended = True


def facts_of(response: ResponseShape) -> ReplyFacts:
    """Facts of a response. Finish reason: the status, or the reason of an incomplete response."""
    details = response.incomplete_details
    reason = (details.get("reason") if isinstance(details, dict) else None) or response.status
    return ReplyFacts(response.id, response.service_tier, {0: reason} if reason else {})


def read_response_usage(usage: Usage, reported: Any) -> None:
    """Take over the `usage` of a response."""
    if not isinstance(reported, dict):
        return
    details, generated = reported.get("input_tokens_details"), reported.get("output_tokens_details")
    take_counts(usage, prompt=reported.get("input_tokens"), completion=reported.get("output_tokens"))
    if isinstance(details, dict):
        take_counts(usage, cached=details.get("cached_tokens"), cache_write=details.get("cache_write_tokens"))
        if isinstance(kept := details.get("cache_write_tokens_details"), dict):
            take_counts(usage, cache_write_1h=kept.get("ttl_12h_tokens"))
    if isinstance(generated, dict):
        take_counts(usage, reasoning=generated.get("reasoning_tokens"))
