"""Prefix breakers: text of clients that changes with every request and stands before the prompt.

Claude Code begins its system prompt with a block of its own, in which `cch` is a hash of the request:

    x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;

Seen in versions 2.1.29 (February 2026) to 2.1.177 (June 2026). A prompt with this line misses every prefix cache from
its first block on (github.com/anthropics/claude-code/issues/68900). vLLM leaves the line out itself, of `/v1/messages`
(vllm/entrypoints/anthropic/serving.py, pull request 36829, March 2026) and of the system messages of chats
(vllm/renderers/chat_utils.py, seen in 0.32). SGLang, llama.cpp, Ollama and APIs do not (November 2026).

Rules:
- The line is removed where vLLM 0.32 removes it: where a text of a system message begins with it, up to the end of the
  line. A part that is empty then goes too.
- The rest of the request is hashed, counted and sent. Servers that read the line get it as it was written.

`with_system_texts` edits the system prompt of a body in any dialect, and leaves the rest as it was written. A system
prompt is a list of texts: the member `system` or `instructions`, or a message of the role system or developer. A text
that is empty after an edit goes, with its part; a member without any text goes too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import MAX_DEPTH, UNREADABLE, element, encode, members

BREAKER = "x-anthropic-billing-header"
IN_BODY = BREAKER.encode()  # a body without these bytes holds none
AT_HEAD = re.compile(rf"\A{BREAKER}[^\n]*\n?")
ANYWHERE = re.compile(rf"^{BREAKER}[^\n]*\n?", re.MULTILINE)


def without_breakers(operation: Operation, raw: bytes, lines: re.Pattern[str] = AT_HEAD) -> bytes:
    """The body without these lines; `raw` itself where there are none. A body that cannot be read is left to the
    parser."""
    if IN_BODY not in raw:
        return raw
    return with_system_texts(operation, raw, lambda texts: [lines.sub("", text) for text in texts])


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
