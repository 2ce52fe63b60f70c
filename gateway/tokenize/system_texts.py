"""Edits the system prompt of a body in any dialect, and leaves the rest of the body as it was written.

A system prompt is a list of texts: the member `system` or `instructions`, or a message of the role system or developer.
A text that is empty after an edit goes, with its part; a member without any text goes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import MAX_DEPTH, UNREADABLE, element, encode, members

Texts = Sequence[str]
Edit = Callable[[Texts], Texts]  # as many texts as before

_MEMBERS = {Operation.MESSAGES: "system", Operation.COUNT_TOKENS: "system", Operation.RESPONSES: "instructions"}
_ROLES = ("system", "developer")
_ROLES_WRITTEN = tuple(f'"{role}"'.encode() for role in _ROLES)


def with_system_texts(operation: Operation, raw: bytes, edit: Edit) -> bytes:
    """The edited body; `raw` itself where nothing changes, or where the body cannot be read."""
    try:
        body = members(raw)
        changed = _changed(operation, body, edit)
    except UNREADABLE:
        return raw
    if not changed:
        return raw
    kept = {name: value for name, value in {**body, **changed}.items() if name not in changed or value is not None}
    return encode(kept)


def _changed(operation: Operation, body: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """The members that an edit changes; None: nothing is left of the member."""
    changed: dict[str, Any] = {}
    if (name := _MEMBERS.get(operation)) is not None and name in body:
        content = _decoded(body[name])
        if (edited := _edited(content, edit)) is not content:
            changed[name] = edited or None
    messages = body.get("messages")
    if type(messages) is list:
        edited_messages = [_message(message, edit) for message in messages]
        if any(one is not other for one, other in zip(messages, edited_messages, strict=True)):
            changed["messages"] = edited_messages
    return changed


def _message(message: Any, edit: Edit) -> Any:
    """The message itself where nothing changes."""
    written = bytes(message) if isinstance(message, Raw) else b""
    if not any(role in written for role in _ROLES_WRITTEN):
        return message
    found = element(message, MAX_DEPTH - 2)
    if not isinstance(found, dict) or found.get("role") not in _ROLES:
        return message
    content = found.get("content")
    edited = _edited(content, edit)
    return message if edited is content else {**found, "content": edited or ""}


def _decoded(content: Any) -> Any:
    if isinstance(content, list):
        return [element(part, MAX_DEPTH - 2) if isinstance(part, Raw) else part for part in content]
    return content


def _edited(content: Any, edit: Edit) -> Any:
    """A text, or a list of parts; `content` itself where nothing changes."""
    if isinstance(content, str):
        (text,) = edit([content])
        return content if text == content else text
    if not isinstance(content, list):
        return content
    before = [part["text"] for part in content if _is_text(part)]
    after = list(edit(before))
    if before == after:
        return content
    edited = iter(after)
    parts = [{**part, "text": next(edited)} if _is_text(part) else part for part in content]
    return [part for part in parts if not _is_text(part) or part["text"]]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
