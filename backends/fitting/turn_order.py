"""Fits the order of a chat's turns to servers and templates that refuse some orders.

- A turn of the assistant without text and calls is left out if the server refuses it: it says nothing.
- Adjacent turns of one role are merged if user and assistant have to take turns.
- Between results and a turn of the user stands a turn of the assistant if the server wants one; where user and
  assistant take turns it always does, as templates count results as the user's turn, or do not count them.
- The first turn is the user's if the server wants that.
- Arguments of a call that are no JSON object become the text `arguments` of one, as in Messages, if the server refuses
  them.

Undecoded messages are decoded only where they are changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from backends.fitting.roles import OPENING
from backends.fitting.target import Target
from backends.member_paths import Json, opened
from backends.system_turns import SYSTEM, joined, role_of
from backends.translation.omissions import Omissions
from backends.translation.tool_arguments import as_object

_SPEAKERS = ("user", "assistant")
_BETWEEN: Json = {"role": "assistant", "content": "OK."}  # between results and what the user says
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


def fit_order(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat."""
    messages, facts = body["messages"], target.facts
    if not isinstance(messages, list):
        return body
    found = messages
    if not facts.empty_turns:
        found = [message for message in found if not _says_nothing(message)]
    if facts.alternation:
        found = _merged(found)
    if facts.alternation or not facts.user_after_results:
        found = _answered(found)
    if facts.alternation or facts.user_first:
        found = _opened_by_user(found)
    same = len(found) == len(messages) and all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, "messages": found}


def _says_nothing(message: Any) -> bool:
    """A turn of the assistant without text and calls."""
    if isinstance(message, Raw) and b'"assistant"' not in bytes(message):
        return False
    turn = opened(message)
    if not isinstance(turn, dict) or turn.get("role") != "assistant":
        return False
    return not any(turn.get(name) for name in ("content", "tool_calls", "function_call", "refusal", "audio"))


def _merged(messages: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for message in messages:
        role = _speaker(message)
        if found and role in _SPEAKERS and role == _speaker(found[-1]):
            found[-1] = _joined_turn(opened(found[-1]), opened(message))
        else:
            found.append(message)
    return found


def _joined_turn(first: Json, second: Json) -> Json:
    content = joined([opened(first.get("content")), opened(second.get("content"))])
    return {**first, **second, "content": content or (None if second.get("tool_calls") else "")}


def _answered(messages: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    after_results = False
    for message in messages:
        role = role_of(message)
        if after_results and role == "user":
            found.append(_BETWEEN)
        after_results = role == "tool"
        found.append(message)
    return found


def _opened_by_user(messages: list[Any]) -> list[Any]:
    first = next((place for place, message in enumerate(messages) if role_of(message) not in SYSTEM), None)
    if first is None or role_of(messages[first]) == "user":
        return messages
    return [*messages[:first], OPENING, *messages[first:]]


def _speaker(message: Any) -> str:
    role = role_of(message)
    return str(opened(message).get("role")) if role == "other" else role


def fit_arguments(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat: calls whose arguments are no JSON object."""
    messages = body["messages"]
    if not isinstance(messages, list):
        return body
    found = [_with_objects(message) for message in messages]
    same = all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, "messages": found}


def _with_objects(message: Any) -> Any:
    if isinstance(message, Raw) and b'"tool_calls"' not in bytes(message):
        return message
    turn = opened(message)
    calls = turn.get("tool_calls") if isinstance(turn, dict) else None
    if not isinstance(calls, list) or all(map(_is_object, calls)):
        return message
    return {**turn, "tool_calls": [call if _is_object(call) else _as_object(call) for call in calls]}


def _is_object(call: Any) -> bool:
    """The arguments are an object, or there are none to judge."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return True
    try:
        _object(arguments)
    except msgspec.DecodeError:
        return False
    return True


def _as_object(call: Json) -> Json:
    function = call["function"]
    arguments = _encode(as_object(function["arguments"])).decode()
    return {**call, "function": {**function, "arguments": arguments}}
