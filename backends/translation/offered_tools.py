"""Tools that agents offer beside their own functions, and that only a provider can run.

Codex 0.169 offers search (`web_search`) and groups of tools (`namespace`) in every request, and works on without:
beside functions of the caller they are left out, and noted. A caller that offers nothing else wants just these, as does
one whose `tool_choice` names one: refused by name.
"""

from __future__ import annotations

from typing import Any

from backends.translation.request_members import Members

_OPTIONAL = ("namespace", "web_search")
_OWN = ("function", "custom")  # run by the caller


def has_own_tools(tools: Any) -> bool:
    return isinstance(tools, list) and any(isinstance(tool, dict) and tool.get("type") in _OWN for tool in tools)


def refuse_tool(tool: Members, kind: str, beside_own: bool) -> None:
    """Leave out a tool that the caller can do without. Raises UntranslatableError for another, unless it is dropped."""
    if not (beside_own and kind in _OPTIONAL):
        tool.refuse_kind(kind)
    elif not tool.dropped.drop(tool.at(kind)):
        tool.dropped.leave_out(tool.at(kind))
