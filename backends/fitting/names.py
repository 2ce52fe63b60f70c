"""Fits names of tools and ids of calls to the characters and lengths that a server accepts.

A name or id that does not fit is truncated and gets a hash, so that it is the same in a call, its result, the tool
choice and every turn, for all requests. Names are mapped back in the answer; an id in an answer is the server's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any

from backends.fitting.target import Target
from backends.interface import Operation
from backends.member_paths import Json, Path, altered, values_at
from backends.translation.omissions import Omissions

_NOT_SAFE = re.compile(r"[^a-zA-Z0-9_-]")
_HASH = 8  # hexadecimal digits behind what is left of a name
_LENGTHS = (128, 64, 40)  # characters, of the servers' limits

_CHAT, _MESSAGES, _RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
_OF_TOOLS: Mapping[Operation, tuple[Path, ...]] = {
    _CHAT: (("tools", "function", "name"), ("tools", "custom", "name")),
    _MESSAGES: (("tools", "name"),),
    _RESPONSES: (("tools", "name"), ("tools", "tools", "name")),
}
_NAMES: Mapping[Operation, tuple[Path, ...]] = {
    _CHAT: (
        *_OF_TOOLS[_CHAT],
        *(("tool_choice", kind, "name") for kind in ("function", "custom")),
        *(("tool_choice", "allowed_tools", "tools", kind, "name") for kind in ("function", "custom")),
        *(("messages", "tool_calls", kind, "name") for kind in ("function", "custom")),
    ),
    _MESSAGES: (*_OF_TOOLS[_MESSAGES], ("tool_choice", "name"), ("messages", "content", "name")),
    _RESPONSES: (*_OF_TOOLS[_RESPONSES], ("tool_choice", "name"), ("tool_choice", "tools", "name"), ("input", "name")),
}
_IDS: Mapping[Operation, tuple[Path, ...]] = {
    _CHAT: (("messages", "tool_calls", "id"), ("messages", "tool_call_id")),
    _MESSAGES: (("messages", "content", "id"), ("messages", "content", "tool_use_id")),
    _RESPONSES: (("input", "call_id"),),
}


@lru_cache(4096)
def fitted(name: str, pattern: str) -> str:
    """Return a name that matches the pattern; the name itself if it matches, or if no substitute does."""
    if re.fullmatch(pattern, name):
        return name
    return next((each for each in _candidates(name) if re.fullmatch(pattern, each)), name)


def _candidates(name: str) -> Iterator[str]:
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    safe = _NOT_SAFE.sub("_", name)
    for begin in ("", "t_"):  # some servers require a leading letter
        for length in _LENGTHS:
            yield f"{begin}{safe}"[: length - _HASH - 1] + f"_{digest[:_HASH]}"
    for length in (32, 16, 9):
        yield digest[:length]


def names_in_the_way(body: Json, target: Target) -> dict[str, str]:
    """Original names of renamed tools, by the substitute names sent to the server."""
    pattern = target.facts.tool_name
    names = (each for path in _OF_TOOLS[target.operation] for each in values_at(body, path))
    renamed = {fitted(name, pattern): name for name in names if isinstance(name, str)}
    return {new: old for new, old in renamed.items() if new != old}


def fit_names(body: Json, target: Target, told: Omissions) -> Json:
    return _all_fitted(body, _NAMES[target.operation], target.facts.tool_name)


def fit_ids(body: Json, target: Target, told: Omissions) -> Json:
    return _all_fitted(body, _IDS[target.operation], target.facts.call_id)


def _all_fitted(body: Json, paths: tuple[Path, ...], pattern: str) -> Json:
    change = partial(_fitted, pattern=pattern)
    for path in paths:
        body = altered(body, path, change)
    return body


def _fitted(value: Any, pattern: str) -> Any:
    """The fitted value; the same object if unchanged, to avoid encoding the body again."""
    found = fitted(value, pattern) if isinstance(value, str) else value
    return value if found == value else found
