"""Hides from a Messages caller which part of a prompt was cached.

Anthropic's `input_tokens` are the part of the prompt that no cache holds: to hide the counts of cached tokens is not
enough, as the rest would tell them. The whole prompt is counted instead; the masker of cached counts does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.interface import Failure, Operation
from backends.stream.sse import ServerSentEvent
from backends.translation.messages_to_chat.answer import error_event
from backends.translation.omissions import Omissions
from backends.translation.translation import (
    NO_CONTEXT,
    AnswerContext,
    EventTranslator,
    Json,
    Translation,
    decode_event,
    sse,
)

_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def _masked(holder: Json) -> Json:
    """A message or event, with the whole prompt as its input."""
    usage = holder.get("usage")
    if not isinstance(usage, dict) or usage.get("input_tokens") is None:
        return holder
    return {**holder, "usage": {**usage, "input_tokens": sum(usage.get(part) or 0 for part in _PARTS)}}


class MaskedMessagesEvents(EventTranslator):
    """Events of a message; events without usage pass unchanged."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()

    def translate(self, event: ServerSentEvent) -> bytes:
        read = decode_event(event.data) if b"usage" in event.data else None
        if not isinstance(read, dict):
            return bytes(event)
        masked = _masked(read)
        if isinstance(read.get("message"), dict):
            masked = {**masked, "message": _masked(read["message"])}
        return sse(masked, event.name.decode())

    def error(self, failure: Failure) -> bytes:
        return error_event(failure)


def _same(body: Mapping[str, Any], dropped: Omissions) -> Json:
    return dict(body)


def _reply(reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    return _masked(reply)


MASKED_MESSAGES = Translation(Operation.MESSAGES, Operation.MESSAGES, _same, _reply, MaskedMessagesEvents)
