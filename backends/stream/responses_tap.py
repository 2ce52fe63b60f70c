"""Taps of OpenAI's Responses dialect, for backends that speak it natively. Rules: `backends.stream.taps`.

Output is a delta that is not empty (text, refusal, arguments of a function, input of a custom tool, code, audio and
its transcript; reasoning and its summary apart), a partial image and a citation. Events that announce (`created`,
`in_progress`, `added`) and events that repeat (`done`) are none; the `done` of a text without deltas is.

Event names: openai-python 3.54, types/responses (2026-11).
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends import failures
from backends.interface import ReplyFacts, Usage
from backends.stream.event_shapes import ResponseEventShape, ResponseShape
from backends.stream.sse import ServerSentEvent
from backends.stream.taps import BodyTap, StreamTap, count_or, decode_as

_REASONING = "response.reasoning"  # beginning of the names of events about reasoning
_OUTPUT = ("response.image_generation_call.partial_image", "response.output_text.annotation.added")
_TEXT_DONE = (
    *("response.output_text.done", "response.refusal.done", "response.reasoning_text.done"),
    *("response.function_call_arguments.done", "response.custom_tool_call_input.done"),
)
_ENDS = ("response.completed", "response.incomplete")
_FAILED = ("response.failed", "error")


_event_decoder = msgspec.json.Decoder(ResponseEventShape)
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
            event = decode_as(data, _event_decoder)
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
    """The reason of a response's end is its status, or the reason for which it is incomplete."""
    details = response.incomplete_details
    reason = (details.get("reason") if isinstance(details, dict) else None) or response.status
    return ReplyFacts(response.id, response.service_tier, {0: reason} if reason else {})


def read_response_usage(usage: Usage, reported: Any) -> None:
    """Take over the `usage` of a response."""
    if not isinstance(reported, dict):
        return
    details = reported.get("input_tokens_details")
    usage.prompt = count_or(reported.get("input_tokens"), usage.prompt)
    usage.completion = count_or(reported.get("output_tokens"), usage.completion)
    if isinstance(details, dict):
        kept = details.get("cache_write_tokens_details")
        usage.cached = count_or(details.get("cached_tokens"), usage.cached)
        usage.cache_write = count_or(details.get("cache_write_tokens"), usage.cache_write)
        usage.cache_write_1h = count_or(
            kept.get("ttl_12h_tokens") if isinstance(kept, dict) else None, usage.cache_write_1h
        )
    if isinstance(details := reported.get("output_tokens_details"), dict):
        usage.reasoning = count_or(details.get("reasoning_tokens"), usage.reasoning)
