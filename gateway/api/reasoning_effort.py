"""The effort of reasoning that a request asks for, in the words of its dialect.

Chat completions: `reasoning_effort`. Responses, OpenRouter: `reasoning.effort` or `.max_tokens`. Messages:
`thinking.budget_tokens`, and `output_config.effort` where thinking is adaptive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from gateway.strict_json import decode

EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
_MEMBERS = frozenset(("reasoning_effort", "reasoning", "thinking", "output_config"))
MOST = 10_000_000  # tokens, beyond which a budget is none


def reasoning_effort(body: Mapping[str, Any]) -> str:
    """One of EFFORTS, or a budget as `8192 tokens`; empty: none is named that is known. No other text of a caller."""
    if _MEMBERS.isdisjoint(body):
        return ""
    thinking = _object(body, "thinking")
    if _plain(thinking.get("type")) == "disabled":
        return "none"
    reasoning = _object(body, "reasoning")
    for budget in (thinking.get("budget_tokens"), reasoning.get("max_tokens")):
        if type(tokens := _plain(budget)) is int and 0 <= tokens <= MOST:
            return f"{tokens} tokens"
    named = body.get("reasoning_effort"), reasoning.get("effort"), _object(body, "output_config").get("effort")
    return next((effort for each in named if isinstance(effort := _plain(each), str) and effort in EFFORTS), "")


def effort_class(effort: str) -> str:
    """The same for budgets of about the same size."""
    tokens, _, unit = effort.partition(" ")
    return f"{int(tokens).bit_length()} bits" if unit else effort


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    return decode(value) if isinstance(value, Raw) else value
