"""Answers of a rehearsed model: tool calls, structured output, reasoning, images and long texts, by the last message.

Checks compare the answer at the client, so each answer follows from the request: cities in the question become tool
calls, a schema becomes a valid example, an image becomes a sentence with the size.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CITIES = ("Paris", "Rome", "Oslo")
TEXT = "Latency is the time between a question and its answer."
REASONING = "The question is short, so the answer can be short too."
EXAMPLES = {"city": "Paris", "temperature": 21, "sunny": True}
RUN = re.compile(r"run this command: `([^`]+)`")
SUMMARY = re.compile(r"summary of (?:the|our|this) conversation|COMPACTION")  # Claude Code, Codex: no tools then
CHANGE = re.compile(r"change (\S+) to: `([^`]+)`")  # by text, for an agent without tools: aider's whole files
COUNT = re.compile(r"count to (\d+)")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Answer:
    """`pace`: seconds between two words."""

    text: str = ""
    calls: Sequence[Call] = ()
    reasoning: str = ""
    pace: float = 0.0
    finish: str = "stop"
    words: list[str] = field(default_factory=list)


def answer(body: Json) -> Answer:
    """The answer to a chat request."""
    messages = body["messages"]
    asked = next((text_of(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")
    reasoning = REASONING if _reasons(body) else ""
    if SUMMARY.search(asked):
        return Answer(TEXT)
    if calls := _calls(body, asked):
        return Answer(calls=calls, reasoning=reasoning, finish="tool_calls")
    if changed := CHANGE.search(asked):
        return Answer(f"{changed[1]}\n```\n{changed[2]}\n```\n")
    if counted := COUNT.search(asked):
        return Answer(" ".join(map(str, range(1, int(counted[1]) + 1))), pace=0.02)
    return Answer(_text(body, messages), reasoning=reasoning)


def text_of(content: str | list[Json] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return " ".join(str(part.get("text", "")) for part in content)


def _reasons(body: Json) -> bool:
    return body.get("reasoning_effort") not in (None, "none", "minimal")


def _text(body: Json, messages: list[Json]) -> str:
    last = messages[-1]
    if schema := _schema(body):
        return json.dumps(example(schema))
    if last["role"] == "tool":
        results = [text_of(m["content"]) for m in messages[_turn(messages) :] if m["role"] == "tool"]
        return "The tools say: " + "; ".join(results)
    images = [image for message in messages for image in _images(message.get("content"))]
    return "I see " + " and ".join(images) if images else TEXT


def _turn(messages: list[Json]) -> int:
    """Index of the first message of this turn."""
    return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)


def _images(content: str | list[Json] | None) -> list[str]:
    parts = content if isinstance(content, list) else []
    urls = [part["image_url"]["url"].partition(";base64,") for part in parts if part.get("type") == "image_url"]
    return [f"{kind}, {len(base64.b64decode(data))} bytes" for kind, _, data in urls]


def _schema(body: Json) -> Json:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_object":
        return {"type": "object", "properties": {"city": {}, "temperature": {}, "sunny": {}}}
    schema: Json = (wanted.get("json_schema") or {}).get("schema") or {}
    return schema


# --------------------------------------------------------------------------- tool calls


def _calls(body: Json, asked: str) -> list[Call]:
    functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        return [_example_call(functions[choice["function"]["name"]])]
    if choice == "none" or not functions:
        return []
    if body["messages"][-1]["role"] != "tool" and (called := _asked_calls(body, functions, asked)):
        return called
    unforced = choice != "required"
    return [] if unforced else [_example_call(next(reversed(functions.values())))]


def _asked_calls(body: Json, functions: Mapping[str, Json], asked: str) -> list[Call]:
    """Calls demanded by the last user message."""
    if command := RUN.search(asked):
        return [call for function in functions.values() for call in _command(function, command[1])][:1]
    cities = [city for city in CITIES if city in asked]
    takers = [f["name"] for f in functions.values() if list(_properties(f)) == ["city"]]
    calls = [Call(takers[0], {"city": city}) for city in cities if takers]
    return calls[:1] if body.get("parallel_tool_calls") is False else calls


def _command(function: Json, command: str) -> list[Call]:
    """A call of a shell tool: a coding agent's."""
    for name in ("command", "cmd"):
        if name in _properties(function):
            words = _properties(function)[name].get("type") == "array"
            return [Call(function["name"], {name: ["sh", "-c", command] if words else command})]
    if "commands" in _properties(function):  # Cline's
        return [Call(function["name"], {"commands": [command]})]
    return []


def _properties(function: Json) -> Json:
    found: Json = (function.get("parameters") or {}).get("properties") or {}
    return found


def _example_call(function: Json) -> Call:
    return Call(function["name"], example(function.get("parameters") or {"type": "object"}))


def example(schema: Json, root: Json | None = None, name: str = "") -> Any:
    """A value of a JSON schema; known properties have known values."""
    root = root or schema
    if "$ref" in schema:
        return example(_resolve(schema["$ref"], root), root, name)
    if name in EXAMPLES:
        return EXAMPLES[name]
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema:
        return example(schema["anyOf"][0], root, name)
    kind = schema.get("type", "string")
    if kind == "object":
        return {key: example(value, root, key) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items", {}), root)]
    return {"integer": 7, "number": 1.5, "boolean": True, "null": None}.get(kind, "water")


def _resolve(reference: str, root: Json) -> Json:
    found = root
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found
