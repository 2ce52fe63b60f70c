"""Restores the caller's tool names in answers to requests with substitute names. All other bytes of a stream stay
unchanged: a text event costs one search."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from backends.interface import Failure, Operation
from backends.member_paths import Json, Path, altered
from backends.stream.sse import ServerSentEvent
from backends.translation.messages_to_chat.answer import error_event
from backends.translation.omissions import Omissions
from backends.translation.translation import (
    NO_CONTEXT,
    AnswerContext,
    EventTranslator,
    Translation,
    decode_event,
    sse,
)

_CHAT, _MESSAGES, _RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
_OF_RESPONSE: tuple[Path, ...] = (("output", "name"), ("tools", "name"), ("tool_choice", "name"))
_OF_REPLY: Mapping[Operation, tuple[Path, ...]] = {
    _CHAT: (
        ("choices", "message", "tool_calls", "function", "name"),
        ("choices", "message", "tool_calls", "custom", "name"),
    ),
    _MESSAGES: (("content", "name"),),
    _RESPONSES: _OF_RESPONSE,
}
_OF_EVENT: Mapping[Operation, tuple[Path, ...]] = {
    _CHAT: (
        ("choices", "delta", "tool_calls", "function", "name"),
        ("choices", "delta", "tool_calls", "custom", "name"),
    ),
    _MESSAGES: (("content_block", "name"),),
    _RESPONSES: (("item", "name"), ("name",), *(("response", *path) for path in _OF_RESPONSE)),
}


def names_back(operation: Operation, names: Mapping[str, str]) -> Translation:
    """A translation that restores tool names. `names`: the caller's names, by the names sent to the server."""
    back = partial(_back, names=names)
    return Translation(
        operation, operation, _same, partial(_reply, operation, back), partial(NamedEvents, operation, names)
    )


def _same(body: Mapping[str, Any], dropped: Omissions) -> Json:
    return dict(body)


def _back(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name


def _reply(
    operation: Operation, back: Any, reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT
) -> Json:
    for path in _OF_REPLY[operation]:
        reply = altered(reply, path, back)
    return reply


class NamedEvents(EventTranslator):
    def __init__(
        self,
        operation: Operation,
        names: Mapping[str, str],
        body: Mapping[str, Any],
        context: AnswerContext = NO_CONTEXT,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._back = partial(_back, names=names)
        self._marks = tuple(f'"{name}"'.encode() for name in names)

    def translate(self, event: ServerSentEvent) -> bytes:
        if not any(mark in event.data for mark in self._marks):
            return bytes(event)
        read = found = decode_event(event.data)
        for path in _OF_EVENT[self._operation]:
            found = altered(found, path, self._back)
        return bytes(event) if found is read else sse(found, event.name.decode())

    def error(self, failure: Failure) -> bytes:
        return same_dialect_error(self._operation, failure)


def same_dialect_error(operation: Operation, failure: Failure) -> bytes:
    """The event that ends a stream by an error, in the dialect of both sides."""
    if operation is Operation.MESSAGES:
        return error_event(failure)
    error = {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}
    if operation is Operation.RESPONSES:
        code = failure.code or failure.type
        members = {"code": code, "message": failure.message, "param": failure.param, "sequence_number": 0}
        return sse({"type": "error", **members}, "error")
    return sse({"error": error})
