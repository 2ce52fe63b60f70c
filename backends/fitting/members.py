"""Members that a server is known to refuse: left out wherever they stand, and told.

Without tools, a schema or a forced call an answer is another answer: a server that refuses these is not asked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from backends.fitting.member_paths import ABSENT, Absent, Json, altered, opened, path_of
from backends.fitting.target import Author, Target
from backends.fitting.thinking import is_forced
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

_NEEDED = frozenset({"model", "messages", "input", "system", "instructions", "stream", "store", "messages.content"})
_MEANT = frozenset({"tools", "response_format", "response_format.json_schema", "text.format", "output_config.format"})
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_path = lru_cache(1024)(path_of)


def fit_members(body: Json, target: Target, told: Omissions) -> Json:
    for name in target.facts.refused:
        if name not in _NEEDED:
            body = _without(body, name, target, told)
    return body


def _without(body: Json, name: str, target: Target, told: Omissions) -> Json:
    said: list[Any] = []

    def leave_out(value: Any) -> Absent:
        said.append(value)
        return ABSENT

    found: Json = altered(body, _path(name), leave_out)
    if found is body or all(value in _NOTHING for value in said):
        return found
    if _is_meant(body, name):
        if target.author is Author.KNOWING:
            return body
        refuse(name, told, "the server does not take it")
    else:
        told.leave_out(name)
    return found


def _is_meant(body: Json, name: str) -> bool:
    if name == "response_format" and opened(opened(body[name]).get("type")) == "text":
        return False
    return name in _MEANT or (name == "tool_choice" and is_forced(body))


def fit_names_of_members(body: Json, target: Target, told: Omissions) -> Json:
    """Members by the server's names. Of two spellings in a body, the server's own counts."""
    facts, found = target.facts, body
    for name, known in facts.renamed.items():
        if name in found:
            found = {known: found[name], **{each: value for each, value in found.items() if each != name}}
    return found
