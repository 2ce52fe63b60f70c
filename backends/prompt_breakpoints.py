"""Cache breakpoints in requests to Anthropic, whose prompt cache holds only what a request marks with `cache_control`.

Source: platform.claude.com/docs, "Prompt caching" (November 2026). A prompt is tools, then system, then messages; a
breakpoint covers everything before it; too short a prefix is not cached, and costs nothing.

Rules:
- The end of the system prompt, or of the tools where there is none, is stable from conversation to conversation.
- The end of a conversation that has gone on for a turn is stable for the next one.
- At most these two of Anthropic's four, and none where the caller has set its own.
- Thinking, empty text, and tools with `defer_loading` cannot be marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends.interface import plain

BREAKPOINT = {"type": "ephemeral"}
_MARKABLE = frozenset({"text", "image", "document", "tool_use", "tool_result"})
_GONE_ON = 3  # messages: a question, its answer, and another question


def has_own(encoded: bytes) -> bool:
    """The caller has set breakpoints."""
    return b'"cache_control"' in encoded


def with_breakpoints(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a Messages request, with breakpoints at the ends of its stable prefixes."""
    marked = dict(body)
    if (system := _with_last_marked(_blocks(body.get("system")))) is not None:
        marked["system"] = system
    elif isinstance(tools := body.get("tools"), list):
        marked["tools"] = _with_last_loaded_marked(tools)
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) >= _GONE_ON:
        last = plain(messages[-1])
        content = _with_last_marked(_blocks(last.get("content"))) if isinstance(last, dict) else None
        if content is not None:
            marked["messages"] = [*messages[:-1], {**last, "content": content}]
    return marked


def _blocks(content: Any) -> Sequence[Any]:
    content = plain(content) if isinstance(content, msgspec.Raw) else content
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else ()


def _with_last_marked(blocks: Sequence[Any]) -> list[Any] | None:
    """None: the last block cannot be marked."""
    last = plain(blocks[-1]) if blocks else None
    kind = last.get("type") if isinstance(last, dict) else None
    if not isinstance(last, dict) or not isinstance(kind, str) or kind not in _MARKABLE:
        return None
    if kind == "text" and not last.get("text"):
        return None
    return [*blocks[:-1], _marked(last)]


def _with_last_loaded_marked(tools: Sequence[Any]) -> list[Any]:
    found = list(tools)
    for i in reversed(range(len(found))):
        tool = plain(found[i])
        if not (isinstance(tool, dict) and tool.get("defer_loading")):
            found[i] = _marked(tool)
            break
    return found


def _marked(block: Any) -> Any:
    return {**block, "cache_control": BREAKPOINT} if isinstance(block, dict) else block
