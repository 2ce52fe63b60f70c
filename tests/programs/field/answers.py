"""Answers of a model, before any dialect: text, reasoning, tool calls, and the words by which a turn is known again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.programs.field.dice import Dice

MARK = re.compile(r"zq[0-9a-f]{12}")  # of a turn: in its text and in the arguments of its calls
_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    text: str  # arguments as JSON; the input of a custom tool
    custom: bool = False
    namespace: str = ""  # of Responses


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant. `end`: stop, calls or length."""

    mark: str
    text: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    end: str = "stop"


@dataclass(frozen=True)
class Offered:
    """A tool as the model sees it."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    custom: bool = False
    namespace: str = ""


@dataclass(frozen=True)
class Asked:
    """What a request asks of the model, read from any dialect."""

    tools: tuple[Offered, ...] = ()
    forced: str | None = None  # name of a tool; empty: any
    parallel: bool = True
    schema: Mapping[str, Any] | None = None  # of a structured answer
    is_json: bool = False
    thinks: bool = False


def new_turn(asked: Asked, ids: str, random: Dice) -> Turn:
    """`ids`: the way in which the API makes the ids of calls."""
    mark = f"zq{random.getrandbits(48):012x}"
    thought = f"I consider {mark} carefully." if asked.thinks else ""
    if thought and asked.forced is None and random.rarely(0.02):
        return Turn(mark, "", thought, (), "length")  # all of the limit went into thinking
    calls_any = asked.forced is not None or (bool(asked.tools) and asked.schema is None and random.random() < 0.6)
    if calls_any and asked.tools:
        known = [tool for tool in asked.tools if tool.name == asked.forced] or list(asked.tools)
        number = 2 if asked.parallel and asked.forced is None and random.random() < 0.3 else 1
        calls = tuple(_call(random.choice(known), mark, ids, place, random) for place in range(number))
        text = f"Working on {mark}." if random.random() < 0.5 else ""
        return Turn(mark, text, thought, calls, "calls")
    text = f'The answer {mark} is ready: größer, 東京, "quoted".'
    if asked.schema is not None or asked.is_json:
        text = json.dumps(_value(asked.schema or {"type": "object"}, mark))
    return Turn(mark, text, thought, (), "length" if random.random() < 0.05 else "stop")


def _call(tool: Offered, mark: str, ids: str, place: int, random: Dice) -> Call:
    text = f"*** Begin Patch\n+{mark}\n*** End Patch" if tool.custom else json.dumps(_arguments(tool.schema, mark))
    return Call(new_id(ids, tool.name, place, random), tool.name, text, tool.custom, tool.namespace)


def new_id(style: str, name: str, place: int, random: Dice) -> str:
    if style == "nine":
        return "".join(random.choice(_ALNUM) for _ in range(9))
    if style == "hex9":
        return f"{random.getrandbits(36):09x}"
    if style == "none":
        return ""
    if style == "functions.":
        return f"functions.{name}:{random.randrange(10**9)}{place}"
    return f"{style}{''.join(random.choice(_ALNUM) for _ in range(22))}"[:40]


def _arguments(schema: Mapping[str, Any], mark: str) -> Any:
    found = {name: _value(inner, mark) for name, inner in (schema.get("properties") or {}).items()}
    return found if MARK.search(json.dumps(found)) else {**found, "note": mark}


def _value(schema: Mapping[str, Any], mark: str) -> Any:
    """A value of a schema; texts hold the mark."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for name in ("anyOf", "oneOf"):
        if schema.get(name):
            return _value(schema[name][0], mark)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        return {name: _value(inner, mark) for name, inner in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [_value(schema.get("items") or {}, mark)]
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0)) + 1
    return kind == "boolean" or mark
