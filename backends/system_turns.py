"""Folds the system messages of a chat: one at the beginning, as few templates take several or later ones.

- Leading system messages are merged: texts with a blank line between, else the parts of all.
- A later one becomes text of the next user turn, or of the user turn before it. No message is placed between a call and
  its results.

Undecoded messages are decoded only where they are changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from backends.member_paths import opened

SYSTEM = ("system", "developer")


class _Role(msgspec.Struct):
    role: Any = ""


_role = msgspec.json.Decoder(_Role).decode


def role_of(message: Any) -> str:
    """Role of a message; empty: it has none. Of an undecoded message the role alone is decoded."""
    try:
        role = _role(message).role if isinstance(message, Raw) else message.get("role")
    except (msgspec.DecodeError, AttributeError):
        return ""
    return role if isinstance(role, str) else ""


def folded(messages: Sequence[Any]) -> list[Any]:
    roles = [role_of(message) for message in messages]
    leading = next((place for place, role in enumerate(roles) if role not in SYSTEM), len(roles))
    if leading <= 1 and not any(role in SYSTEM for role in roles[leading:]):
        return list(messages)
    head = list(messages[:leading])
    if leading > 1:
        contents = [opened(message).get("content") for message in head]
        head = [{"role": "system", "content": joined(contents)}]
    return head + _as_user_text(messages[leading:], roles[leading:])


def _as_user_text(messages: Sequence[Any], roles: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    waiting: list[Any] = []  # contents of system messages
    for message, role in zip(messages, roles, strict=True):
        if role in SYSTEM:
            waiting.append(opened(message).get("content"))
        elif waiting and role == "user":
            turn = opened(message)
            found.append({**turn, "content": joined([*waiting, turn.get("content")])})
            waiting = []
        else:
            if waiting and role != "tool":
                _add_user_text(found, waiting)
                waiting = []
            found.append(message)
    if waiting:
        _add_user_text(found, waiting)
    return found


def _add_user_text(found: list[Any], waiting: Sequence[Any]) -> None:
    if found and role_of(found[-1]) == "user":
        turn = opened(found[-1])
        found[-1] = {**turn, "content": joined([turn.get("content"), *waiting])}
    else:
        found.append({"role": "user", "content": joined(waiting)})


def joined(contents: Sequence[Any]) -> Any:
    """Contents as one: texts as a text, else the parts of all."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    return [part for content in given for part in parts_of(content)]


def parts_of(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
