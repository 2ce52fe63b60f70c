"""Finds members named by a refusal in the request body, and decides which members a request may lose.

Rules:
- A name counts only where the body holds a member of this name: messages of refusals quote the texts of callers.
- Servers write a path with indices, with `body` before it, with the tags of unions between, in camel case; a name alone
  may be of any message. Nothing within the schema of a tool, or within arguments, is a member.
- Content that determines the answer is never dropped: tools, texts, schemas, images, limits, forced calls. A null or
  empty member has no content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from backends.body_changes import holds, opened, values_at
from backends.lessons.refusal_rows import table

_TOKEN = re.compile(r"[^.\[\]'\"\s]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_PREFIXES = ("body", "request", "$")
_HOLDERS = (
    "messages",
    "input",
    "tools",
    "messages.content",
    "input.content",
    "messages.tool_calls",
    "tools.function",
    "reasoning",
    "output_config",
)
_FREE_CHOICES = ("auto",)


def member_path(name: str, sent: Mapping[str, Any]) -> str:
    """The path of a member as sent; empty: the body has none of this name."""
    tokens = [each for each in _TOKEN.findall(name) if not each.isdigit()]
    while len(tokens) > 1 and tokens[0] in _PREFIXES:
        del tokens[0]
    if not tokens:
        return ""
    snake = [_CAMEL.sub(r"_\1", each).lower() for each in tokens]
    outer, _, inner = snake[0].partition("_")  # reasoning_effort is reasoning.effort of the other dialect
    return _found(tokens, sent) or _found(snake, sent) or (inner and ".".join(_walked([outer, inner], [sent])))


def _found(tokens: Sequence[str], sent: Mapping[str, Any]) -> str:
    names = _walked(tokens, [sent])
    if names:
        return ".".join(names)
    if len(tokens) > 1:
        return ""
    return next((path for each in _HOLDERS if holds(sent, path := f"{each}.{tokens[0]}")), "")


def _walked(tokens: Sequence[str], holders: list[Any]) -> list[str]:
    """Member names of an error path, without union tags; empty: the last token is not a member."""
    names: list[str] = []
    for place, token in enumerate(tokens):
        inner = [opened(each[token]) for each in holders if isinstance(each, Mapping) and token in each]
        if inner:
            names.append(token)
            holders = [opened(one) for each in inner for one in (each if isinstance(each, list) else [each])]
        elif place == len(tokens) - 1:
            return []
    return names


def has_meaning(path: str, sent: Mapping[str, Any]) -> bool:
    """The request would not be the same without the member."""
    values = values_at(sent, path)
    if all(each is None or each in ([], {}) for each in values):
        return False
    if path == "store":
        return any(each is not False for each in values)
    if path == "tool_choice":
        return not all(each in _FREE_CHOICES or each == {"type": "auto"} for each in map(_plain, values))
    if path in ("n", "best_of"):
        return values != [1]
    return any(pattern.fullmatch(path) for pattern in table().meaning)


def _plain(value: Any) -> Any:
    return {name: opened(each) for name, each in value.items()} if isinstance(value, dict) else value


def label_of(path: str) -> str:
    """Label of a metric."""
    return path if table().known.issuperset(path.split(".")) else "other"
