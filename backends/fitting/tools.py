"""Tools and `tool_choice`, in the forms that the server accepts.

If no accepted form forces a forced call, the server is skipped. Members that need tools are removed with the tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.facts.model_facts import ToolsAt
from backends.fitting.target import EFFORT, Target
from backends.fitting.thinking import OFF, is_forced, is_thinking
from backends.interface import Operation
from backends.member_paths import Json, objects, opened, put, value_at, without
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

_LEANING = ("tool_choice", "parallel_tool_calls")
_OWN = ("function", "custom", "tool")  # types of a choice that names a caller's tool
_STORED = ("store", "previous_response_id", "conversation", "background", "prompt")  # members of Responses
_ALIKE = {"any": "required", "required": "any", "named": "tool", "tool": "named"}


def name_of(tool: Mapping[str, Any]) -> str:
    """Name of a tool or of a choice, in any dialect; empty: it has none."""
    kind = opened(tool.get("type"))
    holder = opened(tool.get(kind)) if isinstance(kind, str) else None
    name = opened((holder if isinstance(holder, Mapping) else tool).get("name"))
    return name if isinstance(name, str) else ""


def fit_tools(body: Json, target: Target, told: Omissions) -> Json:
    if "tools" not in body:
        return body
    tools = body["tools"]
    if not tools:
        return without(body, "tools")
    most = target.facts.most_tools
    if most is not None and len(tools) > most:
        refuse("tools", told, f"the server takes {most} tools at most")
    if target.operation is Operation.CHAT and target.facts.tools is not ToolsAt.ANY:
        body = _over_chat(body, target, told)
    return _fit_choice(body, target, told)


def _over_chat(body: Json, target: Target, told: Omissions) -> Json:
    """A model that takes tools over Responses, at a server without, or for a request without equivalent there."""
    if target.facts.tools is ToolsAt.RESPONSES:
        refuse("tools", told, "the model takes no tools over chat completions")
        return without(body, "tools", *_LEANING)
    if not is_thinking(body, target):
        return body
    told.leave_out("reasoning_effort")
    return put(body, EFFORT[Operation.CHAT], OFF)


# -- the choice ----------------------------------------------------------------------------------------


def _form(choice: Any) -> str:
    if isinstance(choice, str):
        return choice
    kind = opened(choice.get("type")) if isinstance(choice, Mapping) else None
    return "named" if kind in _OWN else str(kind)


def _fit_choice(body: Json, target: Target, told: Omissions) -> Json:
    choice, forms = opened(body.get("tool_choice")), target.facts.tool_choices
    form = "" if choice is None else _form(choice)
    if not form or forms is None or form in forms or _ALIKE.get(form) in forms:
        return body
    if form == "auto":
        return without(body, "tool_choice")
    if form == "none":
        return without(body, "tools", *_LEANING)
    if form == "allowed_tools":
        return _fit_choice(_with_allowed_alone(body, choice), target, told)
    if form == "named" and "required" in forms:
        return {**body, "tool_choice": "required", "tools": _named_alone(body["tools"], {name_of(choice)})}
    refuse("tool_choice", told, "the server cannot be made to call a tool")
    return without(body, "tool_choice")


def _with_allowed_alone(body: Json, choice: Mapping[str, Any]) -> Json:
    holder = opened(choice.get("allowed_tools")) or choice
    names = {name_of(tool) for tool in objects(holder.get("tools"))}
    return {**body, "tools": _named_alone(body["tools"], names), "tool_choice": opened(holder.get("mode")) or "auto"}


def _named_alone(tools: Any, names: set[str]) -> list[Any]:
    return [tool for tool in opened(tools) if name_of(opened(tool)) in names]


def fit_empty_tools(body: Json, target: Target, told: Omissions) -> Json:
    """Of a chat: an empty list of tools, and the members that need tools."""
    if opened(body.get("tools")) != []:
        return body
    return without(body, "tools") if is_forced(body) else without(body, "tools", *_LEANING)


def fit_parallel(body: Json, target: Target, told: Omissions) -> Json:
    if "parallel_tool_calls" not in body or target.facts.parallel_tool_calls:
        return body
    if body["parallel_tool_calls"] is False:
        told.leave_out("parallel_tool_calls")
    return without(body, "parallel_tool_calls")


def fit_leaning(body: Json, target: Target, told: Omissions) -> Json:
    """Remove members that need tools where a translated body lacks the tools."""
    if "tools" in body and not body["tools"]:
        body = without(body, "tools")
    if "tools" not in body:
        if _form(opened(body.get("tool_choice")) or "auto") not in ("auto", "none"):
            told.leave_out("tool_choice")
        return without(body, *_LEANING) if any(name in body for name in _LEANING) else body
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") not in _OWN:
        return body
    if name_of(choice) in {name_of(tool) for tool in objects(body["tools"])}:
        return body
    told.leave_out("tool_choice")
    return without(body, "tool_choice")


def takes_chat(body: Mapping[str, Any], operation: Operation, target: Target) -> bool:
    """True where a request of another dialect has to go over chat completions, which the server speaks as well: its
    template wants an order of turns, and a server writes several for one of Messages, or for items of Responses. A
    response that refers to a stored one, or is stored, stays."""
    if not target.facts.alternation or operation is Operation.CHAT:
        return False
    return operation is Operation.MESSAGES or not any(opened(body.get(name)) for name in _STORED)


def sign_of_chat(body: Json, target: Target, told: Omissions) -> Json:
    """Of a body that may go over chat completions (`takes_chat`); stays as it is where it does not."""
    return body


def takes_responses(body: Mapping[str, Any], operation: Operation, target: Target) -> bool:
    """True where a request with tools has to go over Responses, which the server speaks as well."""
    tools = target.facts.tools
    if tools is ToolsAt.ANY or not opened(body.get("tools")):
        return False
    if tools is ToolsAt.RESPONSES:
        return True
    effort = value_at(body, EFFORT[operation]) if operation is Operation.CHAT else None
    if effort is None:
        return target.facts.default_effort != OFF
    return bool(effort != OFF)
