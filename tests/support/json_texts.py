"""Random JSON texts: any spacing and escapes in the grammar, and repeated keys."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

from hypothesis import strategies as st

BLANK = st.text(" \t\r\n", max_size=2)


class Writer:
    """Writes a value as JSON with random white space and escapes.

    `twice`: some objects repeat a key; `doubled` is true if any did.
    """

    def __init__(self, draw: Any, twice: bool = False) -> None:
        self.draw, self.twice = draw, twice
        self.doubled = False

    def write(self, value: Any) -> str:
        if isinstance(value, dict):
            return self._between("{", self._members(value), "}")
        if isinstance(value, list):
            return self._between("[", [self._spaced(self.write(item)) for item in value], "]")
        return self.string(value) if isinstance(value, str) else json.dumps(value)

    def member(self, key: str, value: Any) -> str:
        return self._spaced(self.string(key)) + ":" + self._spaced(self.write(value))

    def string(self, text: str) -> str:
        drawn = min(len(text), 12)  # characters with a spelling of their own; a long text repeats the pattern
        escaped = cycle(self.draw(st.lists(st.booleans(), min_size=drawn, max_size=drawn)))
        plain = [json.dumps(character, ensure_ascii=False)[1:-1] for character in text]
        return '"' + "".join(_escape(c) if e else p for c, p, e in zip(text, plain, escaped, strict=False)) + '"'

    def _members(self, value: dict[str, Any]) -> list[str]:
        written = [self.member(key, item) for key, item in value.items()]
        if self.twice and value and self.draw(st.integers(0, 9)) == 0:
            self.doubled = True
            key = self.draw(st.sampled_from(list(value)))
            written.insert(self.draw(st.integers(0, len(written))), self.member(key, 0))
        return written

    def _between(self, begin: str, parts: list[str], end: str) -> str:
        return begin + (",".join(parts) or self.draw(BLANK)) + end

    def _spaced(self, text: str) -> str:
        return f"{self.draw(BLANK)}{text}{self.draw(BLANK)}"


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
