"""Tools that clients offer: odd names, and schemas with all that some API refuses."""

from __future__ import annotations

from typing import Any

from tests.programs.field.dice import Dice

_PROPERTIES: tuple[dict[str, Any], ...] = (
    {"type": "string", "description": "A path"},
    {"type": "string", "format": "uri"},
    {"type": "string", "minLength": 1, "maxLength": 4000},
    {"type": "integer", "minimum": 1, "maximum": 10, "default": 2},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"enum": ["a", "b"]},
    {"const": "fixed"},
    {"type": "array", "items": {"type": "string"}, "minItems": 2},
    {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^x-": {"type": "string"}}},
    {"type": "boolean"},
)


_ROOTS: tuple[dict[str, Any], ...] = (
    {"type": "object"},
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "anyOf": [{"required": ["a"]}],
    },
    {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "number"}]}}},
)


def schema(random: Dice) -> dict[str, Any]:
    """The schema of a tool, as libraries write it."""
    chosen = random.sample(_PROPERTIES, 3)
    found: dict[str, Any] = {"type": "object", "properties": {f"p{n}": each for n, each in enumerate(chosen)}}
    found["required"] = ["p0"]
    if random.random() < 0.5:
        found["$schema"] = "http://json-schema.org/draft-07/schema#"
    if random.random() < 0.5:
        found["additionalProperties"] = False
    if random.rarely(0.1):
        found["$defs"] = {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}
        found["properties"]["p2"] = {"$ref": "#/$defs/place"}
    return random.choice(_ROOTS) if random.rarely(0.1) else found


def strict_schema(random: Dice) -> dict[str, Any]:
    """A schema of a structured answer that OpenAI's strict mode takes."""
    properties: dict[str, Any] = {"title": {"type": "string"}, "score": {"type": "number", "minimum": 0}}
    if random.random() < 0.5:
        properties["tags"] = {"type": "array", "items": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _names(random: Dice, longest: int) -> list[str]:
    odd = ["3d_render", "read-file", "mcp__github__" + "create_pull_request_review_comment_thread"[:50], "x" * longest]
    return ["shell", "read_file", "edit", *random.sample(odd, 2), "search"]


def chat_tools(random: Dice, number: int) -> list[Any]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"Tool {name[:20]}", "parameters": schema(random)},
        }
        for name in _names(random, 64)[:number]
    ]


def strict_tools(random: Dice, number: int) -> list[Any]:
    """Tools whose arguments are held to their schema."""
    tools = chat_tools(random, number)
    for tool in tools:
        tool["function"] |= {"strict": True, "parameters": strict_schema(random)}
    return tools


def custom_tool() -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "run_code", "description": "Runs", "format": {"type": "text"}}}


def messages_tools(random: Dice, *, search: bool) -> list[Any]:
    """Claude Code's own and those of MCP servers; with `search`, the latter are loaded on demand."""
    long_name = "mcp__plugin_atlassian_confluence__get_all_pages_of_the_space_with_labels_and_owners"
    tools = [
        {"name": name, "description": "A tool", "input_schema": schema(random)} for name in ("Bash", "Edit", "Read")
    ]
    mcp = {"name": long_name, "description": "MCP", "input_schema": schema(random)}
    if search:
        query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
        tools.append({"name": "ToolSearch", "description": "Finds tools", "input_schema": query})
        mcp["defer_loading"] = True
    return [*tools, mcp]


def codex_tools(random: Dice) -> list[Any]:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
    shell = {"type": "function", "name": "shell", "description": "Runs", "strict": False, "parameters": schema(random)}
    patch = {"type": "custom", "name": "apply_patch", "description": "Patches", "format": grammar}
    inner = {"type": "function", "name": "search", "description": "Searches", "parameters": schema(random)}
    space = {"type": "namespace", "name": "mcp__web", "description": "Web", "tools": [inner]}
    return [
        shell,
        patch,
        *([space] if random.random() < 0.6 else []),
        *([{"type": "web_search"}] if random.random() < 0.5 else []),
    ]
