"""What a simulated model says: common words, one token each, the same answer to the same prompt.

All engines of a pool therefore agree, and an answer that was cut off can be continued by a peer:
given its beginning, the rest is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

import msgspec

from backends.simulated.bodies import Function

# Each is one token in the common byte-pair vocabularies, after a space too.
_COMMON = """
    the of to and in is it you that for on are with as they be at one have this from by hot word but what some
    out other were all there when up use your how said an each she which do their time if will way about many then
    them write would like so these her long make thing see him two has look more day could go come did number sound
    no most people my over know water than call first who may down side been now find any new work part take get
    place made live where after back little only round man year came show every good me give our under name very
    through just form great think say help low line before turn cause same mean move right boy old too does tell
    set three want air well also play small end put home read hand large add even land here must big high such
    follow act why ask men change went light kind off need house picture try us again animal point mother world
    near build self earth father"""
_WORDS = tuple(_COMMON.split())

_SIGMA = 0.8
_MU = log(150) - _SIGMA**2 / 2  # log-normal lengths, 150 tokens in the mean
_FRAGMENT = 4  # characters of a token in JSON


@dataclass(frozen=True, slots=True)
class SimulatedReply:
    """`pieces` are the tokens. A tool call has its function's name and then fragments of its arguments."""

    pieces: tuple[str, ...]
    finish: str  # stop | length | tool_calls
    tool: str | None = None

    @property
    def text(self) -> str:
        """The whole answer; of a tool call, what the next turn's prompt holds of it."""
        return (self.tool or "") + "".join(self.pieces)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What the caller asked of the length. `limit`: max_tokens, or the room that is left in the context."""

    limit: int
    at_least: int = 0
    ignore_eos: bool = False


def write_text(seed: int, wish: OutputSpec, begun: str = "") -> SimulatedReply:
    """The answer to the prompt with that seed, after the words of `begun`."""
    random = Random(seed)
    given = len(begun.split())
    drawn = max(1, round(random.lognormvariate(_MU, _SIGMA)) - given, wish.at_least)
    length = wish.limit if wish.ignore_eos else min(drawn, wish.limit)
    words = [" " + word for word in random.choices(_WORDS, k=given + length)]
    words[0] = words[0].strip()
    return SimulatedReply(tuple(words[given:]), "length" if wish.ignore_eos or drawn > wish.limit else "stop")


def call_tool(function: Function, wish: OutputSpec) -> SimulatedReply:
    """A call of `function` with arguments that fit its schema. The function's name is the first token."""
    arguments = msgspec.json.encode(_example(function.parameters or {"type": "object"})).decode()
    fragments = [arguments[i : i + _FRAGMENT] for i in range(0, len(arguments), _FRAGMENT)]
    pieces = ("", *fragments)[: wish.limit]
    return SimulatedReply(pieces, "tool_calls" if len(pieces) > len(fragments) else "length", function.name)


def _example(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return {name: _example(value) for name, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {}))]
    return {"integer": 7, "number": 1.5, "boolean": True, "null": None}.get(kind, "water")
