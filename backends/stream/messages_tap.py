"""Taps of Anthropic's Messages: tokens, usage, end and failure of a reply in the caller's or the backend's own bytes.

Members as of November 2026 (platform.claude.com/docs, streaming; vLLM's `/v1/messages` writes the same events). Rules
as in `taps`. Output is text, thinking, the name and the input of a tool call, a citation, a result of the provider's
own tools; no output are message_start, ping, an empty delta, a signature, thinking in cipher. A message ends with its
stop reason: message_stop only repeats that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends import failures
from backends.interface import Usage
from backends.stream.event_shapes import MessageEventShape
from backends.stream.taps import BodyTap, StreamTap, count_or, decode_as

_TEXTS = frozenset({"text", "thinking", "redacted_thinking"})  # blocks without a name or result


_event_decoder = msgspec.json.Decoder(MessageEventShape)


class MessagesTap(StreamTap):
    """Tap of an event stream."""

    done_ends = False

    def __init__(self, secret: str = "") -> None:
        super().__init__(1, secret)
        self._counts: dict[str, Any] = {}  # the latest of each count: an event need not repeat all

    def _read_chunk(self, data: bytes) -> None:
        try:
            event = decode_as(data, _event_decoder)
        except (ValueError, msgspec.ValidationError):
            self._fail(failures.NOT_JSON)
            return
        delta = event.delta if isinstance(event.delta, dict) else {}
        if event.type == "content_block_delta":
            self._read_part(delta)
        elif event.type == "content_block_start" and isinstance(event.content_block, dict):
            self._read_block(event.content_block)
        elif event.type == "message_start" and isinstance(event.message, dict):
            self._read_counts(event.message.get("usage"))
        elif event.type == "message_delta":
            self._read_counts(event.usage)
            self.ended = self.ended or (bool(delta.get("stop_reason")) and self.failure is None)
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
        else:
            self._note_output(bool(block.get("name") or block.get("content")), False)

    def _read_counts(self, reported: Any) -> None:
        if isinstance(reported, dict):
            self._counts |= {name: count for name, count in reported.items() if count is not None}
            read_message_usage(self.usage, self._counts)


class MessagesBodyTap(BodyTap):
    """Tap of a whole reply."""

    def _read_usage(self, reported: Any) -> None:
        read_message_usage(self.usage, reported)


def read_message_usage(usage: Usage, reported: Any) -> None:
    """Take over a `usage` object. Anthropic's input tokens are those that no cache has read or written."""
    if not isinstance(reported, dict):
        return
    cached = count_or(reported.get("cache_read_input_tokens"), None)
    written = count_or(reported.get("cache_creation_input_tokens"), None)
    rest = count_or(reported.get("input_tokens"), None)
    if rest is not None:
        usage.prompt = rest + (cached or 0) + (written or 0)
    usage.completion = count_or(reported.get("output_tokens"), usage.completion)
    usage.cached = usage.cached if cached is None else cached
    usage.cache_write = usage.cache_write if written is None else written
