"""Converts custom tools of a chat to functions, for servers without custom tools.

A custom tool takes free text, optionally limited by a grammar. The function has one string argument, `input`; its
description states the grammar, which is not enforced. Calls in answers are converted back to custom calls with raw text
as input, also while streaming; calls in the history become function calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from backends.fitting.input_text import InputText, input_of
from backends.fitting.names_in_answers import same_dialect_error
from backends.fitting.tools import name_of
from backends.interface import Failure, Operation
from backends.member_paths import Json, objects, opened
from backends.stream.sse import ServerSentEvent
from backends.translation.omissions import Omissions
from backends.translation.streamed_calls import StreamedCalls, call_delta
from backends.translation.translation import (
    NO_CONTEXT,
    AnswerContext,
    EventTranslator,
    Translation,
    decode_event,
    sse,
)
from backends.translation.turn_state.call_ids import made_id

INPUT = "input"
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input, as it is."}},
    "required": [INPUT],
    "additionalProperties": False,
}
_OF_FUNCTIONS = frozenset({"index", "id", "type", "function"})  # other members of a call are state
_encode = msgspec.json.Encoder().encode


def custom_names(body: Mapping[str, Any]) -> frozenset[str]:
    """Names of a chat's custom tools."""
    return frozenset(name_of(tool) for tool in objects(body.get("tools")) if opened(tool.get("type")) == "custom")


def has_custom_calls(body: Mapping[str, Any]) -> bool:
    calls = (call for message in objects(body.get("messages")) for call in objects(message.get("tool_calls")))
    return any(call.get("type") == "custom" for call in calls)


def as_functions(body: Mapping[str, Any]) -> Translation | None:
    """Translation of a chat with custom tools or calls; None: the chat has neither."""
    names = custom_names(body)
    if not names and not has_custom_calls(body):
        return None
    return Translation(
        Operation.CHAT, Operation.CHAT, _request, partial(_reply, names), partial(CustomCallEvents, names)
    )


# -- requests ------------------------------------------------------------------------------------------


def _request(body: Mapping[str, Any], dropped: Omissions) -> Json:
    found = dict(body)
    if "tools" in body:
        found["tools"] = [_tool(tool) for tool in body["tools"]]
    if isinstance(body.get("tool_choice"), Mapping):
        found["tool_choice"] = _choice(body["tool_choice"])
    found["messages"] = [_message(message) for message in body["messages"]]
    return found


def _tool(tool: Json) -> Json:
    if tool.get("type") != "custom":
        return tool
    custom = tool["custom"]
    described = "\n\n".join(filter(None, (custom.get("description"), _grammar(custom.get("format") or {}))))
    function = {"name": custom["name"], **({"description": described} if described else {})}
    return {"type": "function", "function": {**function, "parameters": _PARAMETERS}}


def _grammar(shape: Mapping[str, Any]) -> str:
    grammar = shape.get("grammar")
    if not isinstance(grammar, Mapping):
        return ""
    return f"The input has to follow this {grammar.get('syntax', '')} grammar:\n{grammar.get('definition', '')}"


def _choice(choice: Json) -> Json:
    if choice.get("type") == "custom":
        return {"type": "function", "function": {"name": choice["custom"]["name"]}}
    if choice.get("type") == "allowed_tools":
        allowed = choice["allowed_tools"]
        return {**choice, "allowed_tools": {**allowed, "tools": [_choice(tool) for tool in allowed["tools"]]}}
    return choice


def _message(message: Json) -> Json:
    calls = message.get("tool_calls")
    if not calls or all(call.get("type") != "custom" for call in calls):
        return message
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Json) -> Json:
    if call.get("type") != "custom":
        return call
    custom = call["custom"]
    arguments = _encode({INPUT: custom["input"]}).decode()
    function = {"name": custom["name"], "arguments": arguments}
    return {**{name: call[name] for name in call if name != "custom"}, "type": "function", "function": function}


# -- answers -------------------------------------------------------------------------------------------


def _reply(names: frozenset[str], reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    for choice in reply.get("choices") or ():
        message = choice.get("message") or {}
        if message.get("tool_calls"):
            message["tool_calls"] = [_called(call, names) for call in message["tool_calls"]]
    return reply


def _called(call: Json, names: frozenset[str]) -> Json:
    function = call.get("function")
    if not isinstance(function, Mapping) or function.get("name") not in names:
        return call
    custom = {"name": function["name"], "input": input_of(function.get("arguments"))}
    members = {name: call[name] for name in call if name != "function"}
    return {**members, "id": call.get("id") or made_id(), "type": "custom", "custom": custom}


class CustomCallEvents(EventTranslator):
    """Chunks of a chat, with custom calls in the place of calls of functions that stand for custom tools."""

    def __init__(self, names: frozenset[str], body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()
        self._names = names
        self._calls: dict[Any, StreamedCalls] = {}  # by choice
        self._inputs: dict[tuple[Any, int], InputText] = {}  # by choice and number of the call
        self._head: Json = {}

    def translate(self, event: ServerSentEvent) -> bytes:
        chunk = decode_event(event.data) if self._may_matter(event.data) else None
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            return bytes(event)
        self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
        rest = b""
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("tool_calls"):
                calls = enumerate(delta["tool_calls"])
                delta["tool_calls"] = [self._delta(choice.get("index"), call, place) for place, call in calls]
            if choice.get("finish_reason"):
                rest += self._rest(choice.get("index"))
        return rest + sse(chunk, event.name.decode())

    def close(self) -> bytes:
        data = super().close()
        return data + b"".join(self._rest(choice) for choice in list(self._calls))

    def error(self, failure: Failure) -> bytes:
        return same_dialect_error(Operation.CHAT, failure)

    def _may_matter(self, data: bytes) -> bool:
        return b'"tool_calls"' in data or (bool(self._inputs) and b'"finish_reason"' in data)

    def _delta(self, choice: Any, written: Json, place: int) -> Json:
        delta = call_delta(written, place)
        call = self._calls.setdefault(choice, StreamedCalls(self._kept)).add(delta)
        if call.name not in self._names:
            return {**written, "index": call.number}
        key = choice, call.number
        found: Json = {name: value for name, value in written.items() if name not in _OF_FUNCTIONS}
        found["index"] = call.number
        if key not in self._inputs:
            self._inputs[key] = InputText(self._kept.take)
            found |= {"id": call.identity or made_id(), "type": "custom"}
        elif delta.identity:
            found["id"] = delta.identity
        named = {"name": delta.name} if delta.name else {}
        return {**found, "custom": {**named, "input": self._inputs[key].feed(delta.text)}}

    def _rest(self, choice: Any) -> bytes:
        """Write arguments held to the end because they are not of the form `{"input": "..."}`."""
        rest = {number: text.close() for (of, number), text in self._inputs.items() if of == choice}
        calls = [{"index": number, "custom": {"input": text}} for number, text in rest.items() if text]
        if not calls:
            return b""
        return sse(
            {**self._head, "choices": [{"index": choice, "delta": {"tool_calls": calls}, "finish_reason": None}]}
        )
