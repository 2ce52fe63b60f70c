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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import MAX_DEPTH, UNREADABLE, element, encode, members

BREAKER = "x-anthropic-billing-header"
IN_BODY = BREAKER.encode()  # a body without these bytes holds none

_SYSTEM_MEMBER = {Operation.MESSAGES: "system", Operation.COUNT_TOKENS: "system", Operation.RESPONSES: "instructions"}
_SYSTEM_ROLES = ("system", "developer")


def without_breakers(operation: Operation, raw: bytes) -> bytes:
    """The body without prefix breakers; `raw` itself where there are none. A body that cannot be read is left to the
    parser."""
    if IN_BODY not in raw:
        return raw
    try:
        body = members(raw)
        changed = _changed(operation, body)
    except UNREADABLE:
        return raw
    stripped = encode(
        {name: value for name, value in {**body, **changed}.items() if name not in changed or value is not None}
    )
    return raw if stripped.count(IN_BODY) == raw.count(IN_BODY) else stripped


def _changed(operation: Operation, body: Mapping[str, Any]) -> dict[str, Any]:
    """Members changed by the removal of breakers; None: nothing is left of the member."""
    changed: dict[str, Any] = {}
    if (name := _SYSTEM_MEMBER.get(operation)) is not None and _holds(body.get(name)):
        changed[name] = _stripped(body[name]) or None
    messages = body.get("messages")
    if type(messages) is list and any(map(_holds, messages)):
        changed["messages"] = list(map(_without_in_message, messages))
    return changed


def _holds(value: Any) -> bool:
    return IN_BODY in encode(value)


def _without_in_message(message: Raw) -> Any:
    if not _holds(message):
        return message
    found = element(message, MAX_DEPTH - 2)
    if not isinstance(found, dict) or found.get("role") not in _SYSTEM_ROLES:
        return message
    return {**found, "content": _stripped(found.get("content")) or ""}


def _stripped(content: Any) -> Any:
    """A text, or a list of parts, without the line."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BREAKER) else content
    if not isinstance(content, list):
        return content
    parts = [element(part, MAX_DEPTH - 2) if isinstance(part, Raw) else part for part in content]
    return [kept for part in parts if (kept := _stripped_part(part)) is not None]


def _stripped_part(part: Any) -> Any:
    """None: nothing is left."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or not text.startswith(BREAKER):
        return part
    rest = _stripped(text)
    return {**part, "text": rest} if rest else None
