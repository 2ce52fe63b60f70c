"""A model at an API, as a body is made to fit it; and the places of the same thing in each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from backends.facts.model_facts import Facts
from backends.interface import Operation
from backends.member_paths import Json, Path
from backends.translation.omissions import Omissions


class Author(Enum):
    """The writer of a body in the dialect of the server."""

    GATEWAY = "gateway"  # a translation's
    CALLER = "caller"  # caller's body on a route with several pools: the caller cannot know every server
    KNOWING = "knowing"  # caller's body on a route with one pool: refusals are relayed


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    operation: Operation
    facts: Facts
    author: Author = Author.GATEWAY


Rule = Callable[[Json, Target, Omissions], Json]

_CHAT, _MESSAGES, _RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES

EFFORT: Mapping[Operation, Path] = {
    _CHAT: ("reasoning_effort",),
    _MESSAGES: ("output_config", "effort"),
    _RESPONSES: ("reasoning", "effort"),
}
SCHEMA_OF_TOOL: Mapping[Operation, Path] = {
    _CHAT: ("tools", "function", "parameters"),
    _MESSAGES: ("tools", "input_schema"),
    _RESPONSES: ("tools", "parameters"),
}
SCHEMA_OF_ANSWER: Mapping[Operation, Path] = {
    _CHAT: ("response_format", "json_schema", "schema"),
    _MESSAGES: ("output_config", "format", "schema"),
    _RESPONSES: ("text", "format", "schema"),
}
STRICT_OF_TOOL: Mapping[Operation, Path] = {
    _CHAT: ("tools", "function", "strict"),
    _MESSAGES: ("tools", "strict"),
    _RESPONSES: ("tools", "strict"),
}
