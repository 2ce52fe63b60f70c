"""Efforts of reasoning, in their order.

Rules:
- An effort is a word of `EFFORTS`, or a budget of thinking tokens: `8192 tokens`. Empty: the request names none.
- A budget counts as the effort that Messages are translated to (`backends.translation.messages_to_chat`).
- `class_of` gathers budgets of about the same size, by powers of two: what is learned by class has a bounded memory.
"""

from __future__ import annotations

from difflib import get_close_matches

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BUDGETS = ((2048, "low"), (8192, "medium"))  # tokens at most; more is high


def class_of(effort: str) -> str:
    """The same for budgets of about the same size."""
    tokens, _, unit = effort.partition(" ")
    return f"{int(tokens).bit_length()} bits" if unit else effort


def place_of(effort: str) -> int:
    """Position in EFFORTS. Raises ValueError with a suggestion."""
    tokens, _, unit = effort.partition(" ")
    word = next((word for most, word in _BUDGETS if int(tokens) <= most), "high") if unit == "tokens" else effort
    if word in EFFORTS:
        return EFFORTS.index(word)
    near = get_close_matches(word, EFFORTS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(EFFORTS)}"
    raise ValueError(f"'{word}' is no effort of reasoning; {hint}")
