"""Fits the order of a chat's turns to servers and templates that refuse some orders.

- A turn of the assistant without text and calls is left out if the server refuses it: it says nothing.
- Adjacent turns of one role are merged if user and assistant have to take turns.
- Between results and a turn of the user stands a turn of the assistant if the server wants one; where user and
  assistant take turns it always does, as templates count results as the user's turn, or do not count them.
- The first turn is the user's if the server wants that.
- A last turn of the assistant, which the caller wants continued, is marked if the server wants it marked.
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

_Turn = tuple[str, Any]  # role and message
_SPEAKERS = ("user", "assistant")
_BETWEEN: Json = {"role": "assistant", "content": "OK."}  # between results and what the user says
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


def fit_order(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat."""
    messages, facts = body["messages"], target.facts
    if not isinstance(messages, list):
        return body
    turns = [(role_of(message), message) for message in messages]
    if not facts.empty_turns:
        turns = [turn for turn in turns if not _says_nothing(*turn)]
    if facts.alternation:
        turns = _merged(turns)
    if facts.alternation or not facts.user_after_results:
        turns = _answered(turns)
    if facts.alternation or facts.user_first:
        turns = _opened_by_user(turns)
    if facts.prefill_member:
        turns = _to_be_continued(turns, facts.prefill_member)
    found = [message for _, message in turns]
    same = len(found) == len(messages) and all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, "messages": found}


def _says_nothing(role: str, message: Any) -> bool:
    """A turn of the assistant without text and calls."""
    if role != "assistant":
        return False
    turn = opened(message)
    return not any(turn.get(name) for name in ("content", "tool_calls", "function_call", "refusal", "audio"))


def _merged(turns: Sequence[_Turn]) -> list[_Turn]:
    found: list[_Turn] = []
    for role, message in turns:
        if found and role in _SPEAKERS and role == found[-1][0]:
            found[-1] = role, _joined_turn(opened(found[-1][1]), opened(message))
        else:
            found.append((role, message))
    return found


def _joined_turn(first: Json, second: Json) -> Json:
    content = joined([opened(first.get("content")), opened(second.get("content"))])
    return {**first, **second, "content": content or (None if second.get("tool_calls") else "")}


def _answered(turns: Sequence[_Turn]) -> list[_Turn]:
    found: list[_Turn] = []
    for turn in turns:
        if found and found[-1][0] == "tool" and turn[0] == "user":
            found.append(("assistant", _BETWEEN))
        found.append(turn)
    return found


def _opened_by_user(turns: list[_Turn]) -> list[_Turn]:
    first = next((place for place, (role, _) in enumerate(turns) if role not in SYSTEM), None)
    if first is None or turns[first][0] == "user":
        return turns
    return [*turns[:first], ("user", OPENING), *turns[first:]]


def _to_be_continued(turns: list[_Turn], member: str) -> list[_Turn]:
    role, message = turns[-1] if turns else ("", None)
    if role != "assistant" or member in (turn := opened(message)):
        return turns
    return [*turns[:-1], (role, {**turn, member: True})]


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
