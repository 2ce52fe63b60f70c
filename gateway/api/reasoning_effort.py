"""The effort of reasoning that a request asks for, in the words of its dialect.

Chat completions: `reasoning_effort`. Responses, OpenRouter: `reasoning.effort` or `.max_tokens`. Messages:
`thinking.budget_tokens`, and `output_config.effort` where thinking is adaptive. Gemini's chat completions: a level or a
budget in `extra_body.google.thinking_config`. Qwen and other open models: `enable_thinking` and `thinking_budget`, or
a switch of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from gateway.strict_json import decode
from policies.routes.when import EFFORTS

MOST = 10_000_000  # tokens, beyond which a budget is none
SWITCHED_ON = "medium"  # of thinking that is switched on without an effort or a budget: OpenAI's default

_GEMINI, _TEMPLATE = ("extra_body", "google", "thinking_config"), "chat_template_kwargs"
_SWITCHES = (("enable_thinking",), (_TEMPLATE, "enable_thinking"), (_TEMPLATE, "thinking"))
_BUDGETS = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    (*_GEMINI, "thinking_budget"),
    ("thinking_budget",),
)
_NAMED = ("reasoning_effort",), ("reasoning", "effort"), ("output_config", "effort"), (*_GEMINI, "thinking_level")
EFFORT_MEMBERS = frozenset(path[0] for path in (*_SWITCHES, *_BUDGETS, *_NAMED))  # a body without these names none
_WORDS = frozenset(EFFORTS)


def reasoning_effort(body: Mapping[str, Any]) -> str:
    """One of EFFORTS, or a budget as `8192 tokens`; empty: none is named that is known. No other text of a caller."""
    switches = [_at(body, path) for path in _SWITCHES]
    if _at(body, ("thinking", "type")) == "disabled" or any(switch is False for switch in switches):
        return "none"
    for path in _BUDGETS:
        if type(tokens := _at(body, path)) is int and 0 <= tokens <= MOST:
            return f"{tokens} tokens" if tokens else "none"
    for path in _NAMED:
        if isinstance(effort := _at(body, path), str) and effort in _WORDS:
            return effort
    return SWITCHED_ON if any(switch is True for switch in switches) else ""


def _at(body: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The member at the path; None: there is none."""
    found: Any = body
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
        found = decode(found) if isinstance(found, Raw) else found
    return found
