"""Verifies a request of Responses, as the API of a target does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.programs.field import shared_rules as shared
from tests.programs.field.chat_rules import alternation
from tests.programs.field.rules import Target, Violation
from tests.programs.field.schema_rules import verify_schema
from tests.programs.field.shared_rules import Body

_PREFIXES = {"reasoning": "rs", "function_call": "fc", "message": "msg", "custom_tool_call": "ctc"}
_CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
_TOOLS = ("function", "custom", "namespace", "web_search", "local_shell", "shell", "apply_patch", "tool_search", "mcp")
_PARTS = ("input_text", "input_image", "input_file", "input_audio", "output_text", "refusal", "summary_text")


def items_of(body: Body) -> list[Mapping[str, Any]]:
    given = body.get("input")
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given or ())


def thinking_of(target: Target, body: Body) -> bool:
    return shared.thinks(target, body, (body.get("reasoning") or {}).get("effort"))


def verify_responses(target: Target, body: Body) -> list[Violation]:
    """Every rule that the request breaks; encrypted reasoning is verified in `state.py`."""
    items = items_of(body)
    effort = (body.get("reasoning") or {}).get("effort")
    found = [
        *shared.unknown_members(target, "responses", body),
        *shared.sampling(target, body, thinking_of(target, body)),
        *shared.efforts(target, "responses", effort, "reasoning.effort"),
        *shared.labels(target, body),
        *_tools(target, body),
        *_text(target, body),
        *(violation for at, item in enumerate(items) for violation in _item(target, item, at)),
        *_pairs(target, items),
    ]
    found += shared.longest_output(target, body, ("max_output_tokens",))
    if target.rule("encrypted_items") == "refused" and "reasoning.encrypted_content" in (body.get("include") or ()):
        message = "Encrypted content is not supported with this model."
        found.append(Violation("encrypted_content of a model without", "include", message))
    if target.rule("encrypted_items") == "refused" and body.get("reasoning"):
        message = "Unsupported parameter: 'reasoning.summary' is not supported with this model."
        found.append(Violation("member reasoning.summary", "reasoning.summary", message, "unsupported_parameter"))
    found += alternation(target, [*_as_chat(items)])
    least = target.rule("least_output")
    if least and body.get("max_output_tokens") is not None and body["max_output_tokens"] < least:
        message = f"Invalid 'max_output_tokens': integer below minimum value. Expected a value >= {least}."
        found.append(Violation("max_output_tokens below 16", "max_output_tokens", message, "integer_below_min_value"))
    return found


def _as_chat(items: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Roles of the chat that a server of engines makes of it. Items of one turn of the assistant are one."""
    roles = [_role(item) for item in items]
    for at, role in enumerate(roles):
        if role == "assistant" and roles[at - 1 : at] == [role]:
            continue
        turn = itertools.takewhile(lambda each: each[0] == "assistant", zip(roles[at:], items[at:], strict=True))
        yield {"role": role, "tool_calls": ["..."] * any(item.get("type") in _CALLS for _, item in turn)}


def _role(item: Mapping[str, Any]) -> str:
    kind = item.get("type", "message")
    return str(item.get("role")) if kind == "message" else "tool" if kind in _CALLS.values() else "assistant"


def _tools(target: Target, body: Body) -> Iterator[Violation]:
    tools = body.get("tools") or []
    functions = [tool for tool in tools if tool.get("type") in ("function", "custom")]
    yield from shared.names(target, [tool.get("name") for tool in functions], "tools[0].name")
    if len(tools) > (target.rule("most_tools") or 1 << 20):
        yield Violation("number of tools", "tools", "array too long", "array_above_max_length", True)
    for number, tool in enumerate(tools):
        if tool.get("type") not in _TOOLS:
            yield Violation(f"tool of type {tool.get('type')}", f"tools[{number}].type", "Invalid value")
        if tool.get("type") == "function":
            strict = tool.get("strict") is True
            at = f"tools[{number}].parameters"
            yield from _once(verify_schema(target.rule("schema"), tool.get("parameters"), at, strict=strict))
            if "strict" not in tool and target.api in ("openai", "azure") and "function" in tool:
                yield Violation(
                    "tool of another dialect",
                    f"tools[{number}].name",
                    f"Missing required parameter: 'tools[{number}].name'.",
                )
    if not tools and body.get("tool_choice") not in (None, "auto", "none"):
        yield Violation(
            "tool_choice without tools", "tool_choice", "Tool choice 'required' must be specified with 'tools'."
        )
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):  # noqa: SIM102
        if choice.get("name") not in [tool.get("name") for tool in functions]:
            yield Violation(
                "tool_choice of an absent tool", "tool_choice", "Tool choice not found in 'tools' parameter."
            )
    if target.rule("parallel") == "refused" and body.get("parallel_tool_calls") is not None:
        message = "Unsupported parameter: 'parallel_tool_calls' is not supported with this model."
        yield Violation("member parallel_tool_calls", "parallel_tool_calls", message, "unsupported_parameter")


def _text(target: Target, body: Body) -> Iterator[Violation]:
    shape = (body.get("text") or {}).get("format")
    if isinstance(shape, dict) and shape.get("type") == "json_schema":
        strict = shape.get("strict") is True
        yield from _once(verify_schema(target.rule("schema"), shape.get("schema"), "text.format.schema", strict=strict))
        if not shared.fits(shape.get("name"), "[a-zA-Z0-9_-]{1,64}"):
            yield Violation("name of a schema", "text.format.name", "Missing required parameter: 'text.format.name'.")


def _once(found: Sequence[Violation]) -> list[Violation]:
    return list({violation.kind: violation for violation in reversed(found)}.values())


# --------------------------------------------------------------------------- items


def _item(target: Target, item: Mapping[str, Any], at: int) -> Iterator[Violation]:
    kind, identity = item.get("type", "message"), item.get("id")
    prefix = _PREFIXES.get(str(kind))
    if target.api in ("openai", "azure") and identity is not None and prefix:
        if not str(identity).startswith(prefix):
            message = f"Invalid 'input[{at}].id': '{identity}'. Expected an ID that begins with '{prefix}'."
            yield Violation(f"id of an item {kind}", f"input[{at}].id", message, "invalid_value")
        if len(str(identity)) > 64:
            message = f"Invalid 'input[{at}].id': string too long. Expected a string with maximum length 64."
            yield Violation("length of an item's id", f"input[{at}].id", message, "string_above_max_length")
    if kind == "reasoning" and target.rule("encrypted"):
        if item.get("content"):
            message = f"Invalid 'input[{at}].content': array too long. Expected an array with maximum length 0."
            yield Violation("reasoning item with content", f"input[{at}].content", message, "array_above_max_length")
        elif not item.get("encrypted_content"):
            message = f"Item with id '{identity}' not found. Items are not persisted when `store` is set to false."
            yield Violation("reasoning item without encrypted_content", f"input[{at}]", message)
    if kind == "message":
        for number, part in enumerate(item["content"] if isinstance(item.get("content"), list) else ()):
            yield from _part(target, part, item.get("role"), f"input[{at}].content[{number}]")
        if item.get("role") not in ("system", "developer", "user", "assistant"):
            yield Violation(f"role {item.get('role')}", f"input[{at}].role", f"Invalid value: '{item.get('role')}'.")
    known = {"message", "reasoning", *_CALLS, *_CALLS.values(), "web_search_call", "tool_search_call"}
    if kind not in known | {"tool_search_output", "local_shell_call", "local_shell_call_output", "compaction"}:
        yield Violation(f"item {kind}", f"input[{at}].type", f"Invalid value: '{kind}'.")


def _part(target: Target, part: Mapping[str, Any], role: Any, at: str) -> Iterator[Violation]:
    kind = part.get("type")
    wrong = kind not in _PARTS or (role == "assistant") != (kind in ("output_text", "refusal"))
    if wrong and target.api in ("openai", "azure"):
        yield Violation(f"part {kind} of the {role}", at, f"Invalid value: '{kind}'.", "invalid_value")
    if kind == "input_file" and target.rule("files") == "refused":
        yield Violation("content part file", at, "Unknown part type: input_file", None, True)
    details = target.rule("details", "responses")
    if kind == "input_image" and details and part.get("detail") not in (None, *details):
        yield Violation("image detail", f"{at}.detail", f"Invalid value: '{part['detail']}'.")


def _pairs(target: Target, items: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    calls = {item.get("call_id"): item for item in items if item.get("type") in _CALLS}
    outputs = {item.get("call_id"): item for item in items if item.get("type") in _CALLS.values()}
    for identity in calls.keys() - outputs.keys():
        yield Violation("call without its result", "input", f"No tool output found for function call {identity}.")
    for identity in outputs.keys() - calls.keys():
        yield Violation(
            "result without its call", "input", f"No tool call found for function call output with call_id {identity}."
        )
    for identity in calls.keys() & outputs.keys():
        if _CALLS[calls[identity]["type"]] != outputs[identity]["type"]:
            yield Violation("result of another type", "input", "No tool call found for custom tool call output")
    listed = [item["call_id"] for item in items if item.get("type") in _CALLS and "call_id" in item]
    if len({*listed}) < len(listed):
        yield Violation("ids of calls are not unique", "input", "Duplicate call_id")
    for identity in [*calls]:
        if not shared.fits(identity, target.rule("call_id", "responses")):
            message = "Invalid 'input[1].call_id': string too long. Expected a string with maximum length 64."
            yield Violation("id of a call", "input", message, "string_above_max_length")
