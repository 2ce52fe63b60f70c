"""Fits message roles and their order to chat templates and servers.

- The role `developer` becomes `system` if the server does not know `developer`.
- If system messages are accepted only at the beginning, they are folded (`system_turns`).
- Empty texts are left out if the server refuses them, and so is trailing white space of a text to be continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.facts.model_facts import System
from backends.fitting.target import Author, Target
from backends.member_paths import Json, opened, without
from backends.system_turns import SYSTEM, folded, parts_of, role_of
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

OPENING: Json = {"role": "user", "content": "Hello."}  # before a turn of the assistant that opens the conversation


def fit_roles(body: Json, target: Target, told: Omissions) -> Json:
    """Fit the roles of chat messages. A translated chat gets roles that every server accepts."""
    messages, is_written = body.get("messages"), target.author is Author.GATEWAY
    if not isinstance(messages, list):
        return body
    found = messages
    if is_written or not target.facts.developer:
        found = [_as_system(message) for message in messages]
    if is_written or target.facts.system is not System.ANYWHERE:
        found = folded(found)
    same = len(found) == len(messages) and all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, "messages": found}


def _as_system(message: Any) -> Any:
    return {**opened(message), "role": "system"} if role_of(message) == "developer" else message


def results_after_calls(body: Json, target: Target, told: Omissions) -> Json:
    """Move each tool result in a translated chat directly after the turn with its call."""
    messages: list[Json] = body["messages"]
    found: list[Json] = []
    others: list[Json] = []  # messages between a call and its results
    awaited: set[Any] = set()
    for message in messages:
        if message["role"] == "tool":
            found.append(message)
            awaited.discard(message.get("tool_call_id"))
        elif message["role"] != "assistant" and awaited:
            others.append(message)
            continue
        else:
            found, others = [*found, *others], []
            found.append(message)
            awaited = {call.get("id") for call in message.get("tool_calls") or ()}
        if not awaited and others:
            found, others = [*found, *others], []
    found += others
    return {**body, "messages": found}


# -- Messages and Responses ----------------------------------------------------------------------------


def fit_turns(body: Json, target: Target, told: Omissions) -> Json:
    """Of Messages."""
    turns = [opened(turn) for turn in body["messages"]]
    if turns and turns[-1].get("role") == "assistant" and not target.facts.prefill:
        refuse("messages", told, "the model does not continue a message of the assistant")
    if target.facts.system is System.ANYWHERE or all(turn.get("role") != "system" for turn in turns):
        return body
    return {**body, "messages": _systems_as_user_blocks(turns)}


def _systems_as_user_blocks(turns: Sequence[Json]) -> list[Json]:
    found: list[Json] = []
    waiting: list[Any] = []
    for turn in turns:
        if turn.get("role") == "system":
            waiting += parts_of(turn.get("content") or [])
        elif turn.get("role") == "user" and waiting:
            blocks = parts_of(turn.get("content") or [])
            results = [block for block in blocks if block.get("type") == "tool_result"]
            rest = [block for block in blocks if block.get("type") != "tool_result"]
            found.append({**turn, "content": [*results, *waiting, *rest]})
            waiting = []
        else:
            found += [{"role": "user", "content": waiting}] if waiting else []
            waiting = []
            found.append(turn)
    return [*found, {"role": "user", "content": waiting}] if waiting else found


def fit_first_turn(body: Json, target: Target, told: Omissions) -> Json:
    """Of Messages: the user opens the conversation."""
    turns = body["messages"]
    if not turns or opened(turns[0]).get("role") == "user":
        return body
    return {**body, "messages": [OPENING, *turns]}


def fit_texts(body: Json, target: Target, told: Omissions) -> Json:
    """Of Messages: no empty text, and no white space at the end of a text to be continued."""
    turns = [opened(turn) for turn in body["messages"]]
    found = [said for turn in turns if (said := _without_empty_texts(turn)) is not None]
    if found and found[-1].get("role") == "assistant":
        found[-1] = _ended(found[-1])
    if len(found) == len(turns) and all(new is old for new, old in zip(found, turns, strict=True)):
        found = body["messages"]
    system = body.get("system")
    if system is not None and (kept := _non_empty(system)) is not system:
        body = {**body, "system": kept} if kept else without(body, "system")
    return body if found is body["messages"] else {**body, "messages": found}


def _without_empty_texts(turn: Json) -> Json | None:
    """None: nothing is left of the turn."""
    content = turn.get("content")
    kept = _non_empty(content)
    if not kept:
        return None
    return turn if kept is content else {**turn, "content": kept}


def _non_empty(content: Any) -> Any:
    content = opened(content)
    if isinstance(content, str):
        return content if content.strip() else ""
    if not isinstance(content, list):
        return content
    blocks = [opened(block) for block in content]
    kept = [block for block in blocks if not _is_empty(block)]
    return content if len(kept) == len(blocks) else kept


def _is_empty(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and not str(block.get("text") or "").strip()


def _ended(turn: Json) -> Json:
    content = opened(turn.get("content"))
    if isinstance(content, str):
        return turn if content == content.rstrip() else {**turn, "content": content.rstrip()}
    last = opened(content[-1]) if content else {}
    if last.get("type") != "text" or last["text"] == last["text"].rstrip():
        return turn
    return {**turn, "content": [*content[:-1], {**last, "text": last["text"].rstrip()}]}


def fit_items(body: Json, target: Target, told: Omissions) -> Json:
    """Of Responses: the role `developer`."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    found = [_as_system(item) for item in items]
    return body if all(new is old for new, old in zip(found, items, strict=True)) else {**body, "input": found}


def fit_user_turn(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat without a turn of the user, where one is wanted: the last message of the system is the user's."""
    messages = body["messages"]
    roles = [role_of(message) for message in messages]
    if "user" in roles or not any(role in SYSTEM for role in roles):
        return body
    last = max(place for place, role in enumerate(roles) if role in SYSTEM)
    turned = {**opened(messages[last]), "role": "user"}
    return {**body, "messages": [*messages[:last], turned, *messages[last + 1 :]]}
