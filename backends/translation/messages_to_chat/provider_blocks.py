"""Renders blocks of provider-run tools in a history as text, so that the conversation can continue at any server.

- A call or a result becomes a line with its type, its name and its readable content. Members that only the provider can
  read (`encrypted_content`, ids) are left out.
- Tools found by a search (`tool_reference`) are rendered by name alone: the request offers the tools themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_CALLS, _RESULTS = "_tool_use", "_tool_result"  # ends of the types of calls and of results
_KINDS = frozenset({"tool_reference", "search_result", "compaction"})
_CALLERS = frozenset({"tool_use", "tool_result"})
_UNREAD = frozenset(
    {"type", "id", "tool_use_id", "cache_control", "encrypted_content", "encrypted_index", "encrypted_stdout"}
    | {"citations", "page_age", "caller", "is_error", "retrieved_at"}
)
LONGEST = 100_000  # characters of a block


def is_providers(kind: str) -> bool:
    """True for a block of a provider's own tool."""
    return kind in _KINDS or (kind not in _CALLERS and kind.endswith(("tool_use", _CALLS, _RESULTS)))


def as_text(block: Mapping[str, Any]) -> str:
    """Empty: the block says nothing that a reader needs."""
    kind = str(block.get("type"))
    if kind == "tool_reference":
        return f"Tool found: {block.get('tool_name')}"
    if kind == "search_result":
        heading = [str(block[name]) for name in ("title", "source") if block.get(name)]
        return "\n".join([*heading, _text(block.get("content"))])[:LONGEST]
    if kind == "compaction":
        return _text(block.get("content"))[:LONGEST]
    said = " ".join(filter(None, (str(block.get("name") or ""), _rest(block))))
    return f"[{kind}] {said}".strip()[:LONGEST]


def _rest(block: Mapping[str, Any]) -> str:
    """The input of a call, or the content of a result."""
    if "input" in block:
        return _encode(block["input"]).decode()
    return _text(block.get("content"))


def _text(value: Any) -> str:
    """The words of a content of any form, a line for each part."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if not isinstance(value, Mapping):
        return "" if value is None else str(value)
    if value.get("type") == "tool_reference":
        return as_text(value)
    kept = {name: each for name, each in value.items() if name not in _UNREAD and each not in (None, "", [], {})}
    if kept.keys() <= {"text"}:
        return _text(kept.get("text"))
    if all(isinstance(each, str | int | float) for each in kept.values()):
        return ", ".join(f"{name}: {each}" for name, each in kept.items())
    return "\n".join(filter(None, map(_text, kept.values())))
