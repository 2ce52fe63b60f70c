"""Fits earlier turns of a chat: members known to the server, and reasoning that the server requires or refuses.

Undecoded messages are decoded only if they may contain such members.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from backends.facts.model_facts import Facts, Reasoning, UnknownMembers
from backends.fitting.target import Author, Target
from backends.member_paths import Json, objects, opened, path_of, put, value_at
from backends.translation.omissions import Omissions

_TEXTS = ("reasoning_content", "reasoning")
_DETAILS = "reasoning_details"
_REASONING = (*_TEXTS, _DETAILS)
_MAY_REASON = re.compile(rb'"(?:reasoning(?:_content|_details)?|tool_calls)"').search
_KNOWN = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "prefix"))
_KNOWN_OF_CALL = frozenset(("id", "type", "function", "custom", "index"))
_KNOWN_OF_PART = frozenset(("cache_control", "prompt_cache_breakpoint"))  # hints, without effect on an answer
_PLACEHOLDER = " "  # of reasoning that another model has not written, where the server wants some with each call


def fit_history(body: Json, target: Target, told: Omissions) -> Json:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    found = [_turn(message, target, told) for message in messages]
    same = all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, "messages": found}


def wants_history(target: Target) -> bool:
    facts = target.facts
    if facts.unknown_members is UnknownMembers.EVERYWHERE or facts.reasoning is Reasoning.REFUSED:
        return True
    return (
        target.author is Author.GATEWAY or _is_demanding(target) or _has_placeholder(facts) or not facts.thinking_parts
    )


def _has_placeholder(facts: Facts) -> bool:
    return bool(facts.call_state_placeholder) or (bool(facts.detail_placeholder) and facts.reasoning_member == _DETAILS)


def _is_demanding(target: Target) -> bool:
    """The server refuses a call of a tool without its reasoning."""
    return target.facts.reasoning is Reasoning.RETURNED and target.facts.reasoning_member in _TEXTS


def _turn(message: Any, target: Target, told: Omissions) -> Any:
    is_strict = target.facts.unknown_members is UnknownMembers.EVERYWHERE
    has_parts = not target.facts.thinking_parts and _has_thinking(message)
    if isinstance(message, Raw) and not is_strict and not has_parts and _MAY_REASON(bytes(message)) is None:
        return message
    turn = opened(message)
    if not isinstance(turn, dict):
        return message
    found = _with_reasoning(turn, target, told) if turn.get("role") == "assistant" else turn
    if has_parts:
        found = _without_thinking(found, told)
    if is_strict:
        found = _known_alone(found, target, told)
    elif target.facts.unknown_members is UnknownMembers.TOP and _has_extra(found):
        found = _known_calls(found, target, told)
    found = _with_call_state(found, target)
    return message if found is turn else found


# -- reasoning -----------------------------------------------------------------------------------------


def _with_reasoning(turn: Json, target: Target, told: Omissions) -> Json:
    reasoning = target.facts.reasoning
    if reasoning is Reasoning.RETURNED or (reasoning is Reasoning.READ and target.author is Author.GATEWAY):
        return _returned(turn, target)
    if reasoning is not Reasoning.REFUSED and target.author is not Author.GATEWAY:
        return turn
    found = [name for name in _REASONING if name in turn]
    if any(turn[name] for name in found):
        told.leave_out("messages.reasoning")
    return {name: value for name, value in turn.items() if name not in _REASONING} if found else turn


def _returned(turn: Json, target: Target) -> Json:
    """The reasoning by the server's name, beside details, which some servers want."""
    member = target.facts.reasoning_member
    text = next((turn[name] for name in _TEXTS if turn.get(name)), "")
    if member not in _TEXTS or turn.get(member):
        return turn
    if not text and turn.get("tool_calls") and _is_demanding(target):
        text = _PLACEHOLDER
    return {**{name: value for name, value in turn.items() if name not in _TEXTS}, member: text} if text else turn


def _has_thinking(message: Any) -> bool:
    if isinstance(message, Raw):
        return b'"thinking"' in bytes(message)
    return any(part.get("type") == "thinking" for part in objects(message.get("content")))


def _without_thinking(turn: Json, told: Omissions) -> Json:
    """A turn without the parts in which another server keeps its reasoning."""
    content = opened(turn.get("content"))
    if not isinstance(content, list):
        return turn
    kept = [part for part in content if value_at(part, ("type",)) != "thinking"]
    if len(kept) == len(content):
        return turn
    told.leave_out("messages.content.thinking")
    return {**turn, "content": kept or (None if turn.get("tool_calls") else "")}


def refuses_reasoning(target: Target) -> bool:
    reasoning = target.facts.reasoning
    return reasoning is Reasoning.REFUSED or (reasoning is Reasoning.ANY and target.author is Author.GATEWAY)


def fit_reasoning_items(body: Json, target: Target, told: Omissions) -> Json:
    """Of Responses, for a server that reads its own reasoning alone: encrypted, or kept by the server under an id."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    is_kept = target.author is not Author.GATEWAY and body.get("store") is not False
    found = [item for item in items if not _is_foreign(item, is_kept)]
    if len(found) == len(items):
        return body
    told.leave_out("input.reasoning")
    return {**body, "input": found}


def _is_foreign(item: Any, is_kept: bool) -> bool:
    if isinstance(item, Raw) and b'"reasoning"' not in bytes(item):
        return False
    item = opened(item)
    if not isinstance(item, Mapping) or item.get("type") != "reasoning" or item.get("encrypted_content"):
        return False
    return bool(opened(item.get("content"))) or not (is_kept and item.get("id"))


# -- state of calls ------------------------------------------------------------------------------------


def _with_call_state(turn: Json, target: Target) -> Json:
    """Add the placeholder for missing state to calls by another model. Only the first call of a turn has state."""
    placeholder, path = target.facts.call_state_placeholder, path_of(target.facts.call_state)
    calls = turn.get("tool_calls")
    if calls and _has_placeholder(target.facts) and not placeholder:
        return _with_detail(turn, target.facts.detail_placeholder)
    if not placeholder or not calls or any(value_at(call, path) for call in calls):
        return turn
    return {**turn, "tool_calls": [put(dict(calls[0]), path, placeholder), *calls[1:]]}


def _with_detail(turn: Json, placeholder: Mapping[str, str]) -> Json:
    """The same where such state is a detail of the reasoning."""
    details = objects(turn.get(_DETAILS))
    if any(detail.get("data") or detail.get("signature") for detail in details):
        return turn
    first = opened(turn["tool_calls"][0])
    return {**turn, _DETAILS: [*details, {**placeholder, "id": first.get("id"), "index": len(details)}]}


# -- members that the dialect has and the server has not ------------------------------------------------


def _known_alone(turn: Json, target: Target, told: Omissions) -> Json:
    kept = _KNOWN
    if target.facts.reasoning is Reasoning.RETURNED:
        kept = kept | {target.facts.reasoning_member}
    others = turn.keys() - kept
    found = turn
    if others:
        found = {name: value for name, value in turn.items() if name in kept}
        if turn.get("refusal") and not turn.get("content"):
            found["content"] = turn["refusal"]
        for name in sorted(others - {"refusal"}):
            if turn[name]:
                told.leave_out(f"messages.{name}" if name in _NAMEABLE else "messages.members")
    return _known_parts(_known_calls(found, target, told))


_NAMEABLE = frozenset(  # members of clients and providers; others may be a caller's words
    (
        *(*_REASONING, "annotations", "audio", "function_call", "provider_specific_fields", "thinking_blocks"),
        *("extra_content", "phase", "cache_control", "parsed", "images"),
    )
)


def _known_calls(turn: Json, target: Target, told: Omissions) -> Json:
    if "tool_calls" not in turn:
        return turn
    calls, known = turn["tool_calls"], _KNOWN_OF_CALL | {target.facts.call_state.partition(".")[0]}
    if not calls:
        return {name: value for name, value in turn.items() if name != "tool_calls"}
    if all(isinstance(call, dict) and call.keys() <= known for call in calls):
        return turn
    told.leave_out("messages.tool_calls.members")
    return {**turn, "tool_calls": [_only(call, known) for call in calls]}


def _has_extra(turn: Json) -> bool:
    """True if a tool call carries provider state in `extra_content`."""
    return any("extra_content" in call for call in objects(turn.get("tool_calls")))


def _only(call: Any, known: frozenset[str]) -> Any:
    return {name: value for name, value in call.items() if name in known} if isinstance(call, Mapping) else call


def _known_parts(turn: Json) -> Json:
    content = turn.get("content")
    if not isinstance(content, list) or all(_KNOWN_OF_PART.isdisjoint(part) for part in content):
        return turn
    parts = [{name: value for name, value in part.items() if name not in _KNOWN_OF_PART} for part in content]
    return {**turn, "content": parts}
