"""Converts items of provider-run tools in a Responses history to text, or leaves items out and notes the loss.

Readable items (a search, a program's output, the result of an MCP tool) become a line of the assistant. Items that only
the provider or the client can read are left out: lists of tools, images, compactions, references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.translation.reply_members import as_objects

_SAID: Mapping[str, tuple[str, ...]] = {  # members that a reader needs, by type of the item
    "web_search_call": ("action",),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "computer_call": ("action", "actions"),
    "local_shell_call": ("action",),
    "local_shell_call_output": ("output",),
    "shell_call": ("action",),
    "shell_call_output": ("output",),
    "apply_patch_call": ("operation",),
    "apply_patch_call_output": ("output",),
}
_LEFT_OUT = frozenset(
    {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "image_generation_call", "computer_call_output"}
    | {"compaction", "compaction_summary", "compaction_trigger", "item_reference", "context_compaction", "program"}
    | {"program_output", "additional_tools", "ghost_snapshot"}
)
LONGEST = 100_000  # characters of an item
_encode = msgspec.json.Encoder().encode


def is_providers(kind: str) -> bool:
    return kind in _SAID or kind in _LEFT_OUT


def as_text(kind: str, item: Mapping[str, Any]) -> str:
    """Empty: the item is left out."""
    said = [_text(item[name]) for name in _SAID.get(kind, ()) if item.get(name) not in (None, "", [], {})]
    return f"[{kind}] {' '.join(said)}"[:LONGEST] if said else ""


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    logs = [str(part["logs"]) for part in as_objects(value) if part.get("logs")]  # of a program
    return "\n".join(logs) if logs else _encode(value).decode()


def found_tools(item: Mapping[str, Any]) -> str:
    """The result of a search for tools, all of which are offered."""
    names = []
    for tool in as_objects(item.get("tools")):
        if tool.get("type") == "namespace":
            names += [f"{tool.get('name')}: {each.get('name')}" for each in as_objects(tool.get("tools"))]
        else:
            names.append(str(tool.get("name")))
    return "Tools found: " + (", ".join(names) or "none")
