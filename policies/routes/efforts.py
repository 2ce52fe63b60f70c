"""Efforts of reasoning, in their order, and the condition on them.

Rules:
- An effort is a word of `EFFORTS`, or a budget of thinking tokens: `8192 tokens`. Empty: the request names none.
- A budget counts as the effort that Messages are translated to (`backends.translation.messages_to_chat`): at most 2048
  tokens are `low`, 8192 `medium`, more `high`.
- `class_of` gathers budgets of about the same size, by powers of two: what is learned by class has a bounded memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BUDGETS = ((2048, "low"), (8192, "medium"))  # tokens at most; more is high
_COMPARISON = re.compile(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*")
_RANGE = re.compile(r"\s*(\w+)\s*\.\.\s*(\w+)\s*")
_OPERATORS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


def class_of(effort: str) -> str:
    """The same for budgets of about the same size."""
    tokens, _, unit = effort.partition(" ")
    return f"{int(tokens).bit_length()} bits" if unit else effort


def word_of(effort: str) -> str:
    """The word that a budget counts as; any other effort is its own."""
    tokens, _, unit = effort.partition(" ")
    return next((word for most, word in _BUDGETS if int(tokens) <= most), "high") if unit else effort


@dataclass(frozen=True, slots=True)
class EffortTest:
    """The efforts for which a condition holds; `text` is the YAML form."""

    text: str | tuple[str, ...]
    words: frozenset[str]

    def refusal(self, effort: str) -> str | None:
        """Reason why the condition does not hold; None: it does."""
        wanted = self.text if isinstance(self.text, str) else " or ".join(self.text)
        if not effort:
            return f"reasoning_effort is not given, and must be {wanted}"
        return None if word_of(effort) in self.words else f"reasoning_effort {effort} is not {wanted}"


def effort_test(value: Any) -> EffortTest:
    """Parses `high`, `>= medium`, `low..high` or a list of words. Raises ValueError."""
    if isinstance(value, EffortTest):
        return value
    if isinstance(value, (list, tuple)) and value:
        return EffortTest(tuple(value), frozenset(EFFORTS[_place(word)] for word in value))
    if not isinstance(value, str):
        raise ValueError("write an effort like high, a comparison like '>= medium', or a list like [low, medium]")
    if match := _RANGE.fullmatch(value):
        low, high = _place(match[1]), _place(match[2])
        if low > high:
            raise ValueError(f"{match[1]}..{match[2]} holds for no effort; write {match[2]}..{match[1]}")
        return EffortTest(f"{match[1]}..{match[2]}", frozenset(EFFORTS[low : high + 1]))
    match = _COMPARISON.fullmatch(value)
    sign, word = (match[1], match[2]) if match else ("==", value.strip())
    bound, holds = _place(word), _OPERATORS[sign]
    words = frozenset(each for place, each in enumerate(EFFORTS) if holds(place, bound))
    if not words:
        raise ValueError(f"'{value}' holds for no effort: {EFFORTS[0]} is the least, {EFFORTS[-1]} the most")
    return EffortTest(f"{sign} {word}" if match else word, words)


def _place(word: Any) -> int:
    if word in EFFORTS:
        return EFFORTS.index(word)
    near = get_close_matches(str(word), EFFORTS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(EFFORTS)}"
    raise ValueError(f"'{word}' is no effort of reasoning; {hint}")
