"""Finds members named by a refusal in the refused body, and decides which members a request may lose.

Rules:
- A name counts only where the body holds a member of this name: messages of refusals quote the texts of callers.
- Servers write a path with indices, with `body` before it, with the tags of unions between, in camel case; a name alone
  may be of any message. Nothing within the schema of a tool, or within arguments, is a member.
- Content that determines the answer is never dropped: tools, texts, schemas, images, limits, forced calls, and whatever
  holds such content. A null or empty member has no content.
- Work is bounded by the body: each level is opened once, and lists of more than MOST_HOLDERS elements not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from backends.body_changes import opened
from backends.lessons.refusal_rows import table

MOST_HOLDERS = 10_000  # elements of a list, messages for example, in which members are found
LONGEST_NAME = 300  # characters of a member as spelled by a server
MOST_WORDS_OF = 1 << 20  # bytes of a body that is compared with the words of a refusal
_PLAIN = re.compile(r"[\w$-]{1,100}", re.ASCII)
_TOKEN = re.compile(r"[^.\[\]'\"]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
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
_CHOICES = ("tool_choice", "function_call")
_FREE = ("auto", {"type": "auto"})
_DEEPEST = 2  # levels below a member, of which each may have a meaning
_MOST_INSIDE = 64  # names of a member's own members; of more, one may have a meaning
_NOTHING: tuple[Any, ...] = (None, [], {})


@dataclass(slots=True)
class RefusedBody:
    """A refused body, of which each level is opened once. `members`: nested values may be `Raw`. `raw`: the bytes."""

    members: Mapping[str, Any]
    raw: bytes = b""
    _holders: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # by path
    _paths: dict[str, str] = field(default_factory=dict)  # by name as spelled by the server
    _words: bytes | None = None

    def path(self, name: str) -> str:
        """The path of a member as sent; empty: the body has none of this name."""
        if (found := self._paths.get(name)) is None:
            found = self._paths[name] = self._found(name.strip()) if len(name) <= LONGEST_NAME else ""
        return found

    def holds(self, path: str) -> bool:
        holder, _, name = path.rpartition(".")
        return any(name in each for each in self.holders(holder))

    def values(self, path: str) -> list[Any]:
        """All values at the path, one level opened."""
        holder, _, name = path.rpartition(".")
        return [opened(each[name]) for each in self.holders(holder) if name in each]

    def holders(self, path: str) -> list[Mapping[str, Any]]:
        """All objects at the path, elements of lists among them. Empty path: the body."""
        if not path:
            return [self.members]
        if (found := self._holders.get(path)) is None:
            outer, _, name = path.rpartition(".")
            found = self._holders[path] = [
                inner for each in self.holders(outer) if name in each for inner in _objects(each[name])
            ][:MOST_HOLDERS]
        return found

    def meets(self, condition: str) -> bool:
        """Of the form of `BodyChange.beside`."""
        path, _, values = condition.partition("=")
        return not {*values.split("|")}.isdisjoint(map(str, self.values(path))) if values else self.holds(path)

    def has_meaning(self, path: str, deep: int = _DEEPEST) -> bool:
        """The request would not be the same without the member."""
        values = self.values(path)
        if all(each in _NOTHING for each in values):
            return False
        if (top := path.partition(".")[0]) in _CHOICES:
            return self._forces(top) and not means_nothing(path)
        if path == "store":
            return any(each is not False for each in values)
        if path in ("n", "best_of"):
            return values != [1]
        return may_mean(path) or (deep > 0 and self._holds_meaning(path, deep - 1))

    def _holds_meaning(self, path: str, deep: int) -> bool:
        names = {name for each in self.holders(path) for name in each}
        inner = [f"{path}.{name}" for name in names if "." not in name]
        return len(names) > _MOST_INSIDE or any(self.has_meaning(each, deep) for each in inner)

    def _forces(self, path: str) -> bool:
        return not all(_plain(each) in _FREE for each in self.values(path))

    def says(self, words: str) -> bool:
        """The body itself has these words, or is too large to tell: a refusal may quote them."""
        if len(self.raw) > MOST_WORDS_OF:
            return True
        if self._words is None:
            plain = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), self.raw)
            self._words = plain.replace(rb"\/", b"/").lower()
        return json.dumps(words, ensure_ascii=False)[1:-1].lower().encode("utf-8", "replace") in self._words

    # -- paths ------------------------------------------------------------------------------

    def _found(self, name: str) -> str:
        if name in self.members:
            return name if _PLAIN.fullmatch(name) else ""  # a path cannot lead to any other name
        tokens = [each for each in _TOKEN.findall(name) if not each.isdigit()]
        while len(tokens) > 1 and tokens[0] in _PREFIXES:
            del tokens[0]
        if not tokens or not _PLAIN.fullmatch(tokens[-1]):
            return ""
        snake = [_CAMEL.sub(r"_\1", each).lower() for each in tokens]
        outer, _, inner = snake[0].partition("_")  # reasoning_effort is reasoning.effort of the other dialect
        return self._placed(tokens) or self._placed(snake) or (self._walked([outer, inner]) if inner else "")

    def _placed(self, tokens: Sequence[str]) -> str:
        if found := self._walked(tokens):
            return found
        if len(tokens) > 1:
            return ""
        return next((path for each in _HOLDERS if self.holds(path := f"{each}.{tokens[0]}")), "")

    def _walked(self, tokens: Sequence[str]) -> str:
        """The path of an error path, without union tags; empty: the last token is not a member."""
        path = ""
        for place, token in enumerate(tokens):
            inner = f"{path}.{token}" if path else token
            if _PLAIN.fullmatch(token) and self.holds(inner):
                path = inner
            elif place == len(tokens) - 1:
                return ""
        return path


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Raw) and bytes(memoryview(value)[:1]) not in (b"{", b"["):
        return
    held = opened(value)
    elements = held if isinstance(held, list) else [held]
    if len(elements) <= MOST_HOLDERS:
        for each in elements:
            if not isinstance(each, Raw) or bytes(memoryview(each)[:1]) == b"{":
                inner = opened(each)
                if isinstance(inner, Mapping):
                    yield inner


def _plain(value: Any) -> Any:
    return {name: opened(each) for name, each in value.items()} if isinstance(value, dict) else value


def may_mean(path: str) -> bool:
    """A member at the path has a meaning, unless it is null or empty."""
    return table().meaning.fullmatch(path) is not None and not means_nothing(path)


def means_nothing(path: str) -> bool:
    return table().slight.fullmatch(path) is not None


def label_of(path: str) -> str:
    """Label of a metric."""
    return path if table().known.issuperset(path.split(".")) else "other"
