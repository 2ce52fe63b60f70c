"""Reasoning effort as a request asks for it: the known words of each dialect, and no other text of a caller."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import MESSAGES_TO_CHAT
from gateway.api.inference_request import parse
from gateway.api.parsed_body import reasoning_effort
from policies.routes.when import place_of

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("operation", "members", "effort"),
    [
        (Operation.CHAT, {"reasoning_effort": "high"}, "high"),
        (Operation.CHAT, {"reasoning": {"effort": "low"}}, "low"),
        (Operation.CHAT, {"reasoning": {"max_tokens": 2000}}, "2000 tokens"),
        (Operation.CHAT, {"extra_body": {"google": {"thinking_config": {"thinking_budget": 800}}}}, "800 tokens"),
        (Operation.CHAT, {"extra_body": {"google": {"thinking_config": {"thinking_level": "low"}}}}, "low"),
        (Operation.CHAT, {"extra_body": {"google": {"thinking_config": {"thinking_budget": -1}}}}, ""),
        (Operation.CHAT, {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0}}}}, "none"),
        (Operation.CHAT, {"enable_thinking": True, "thinking_budget": 4000}, "4000 tokens"),
        (Operation.CHAT, {"enable_thinking": True}, "medium"),
        (Operation.CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "none"),
        (Operation.CHAT, {"chat_template_kwargs": {"thinking": True}}, "medium"),
        (Operation.CHAT, {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "high"}, "high"),
        (Operation.CHAT, {"chat_template_kwargs": {"thinking": 1, "other": "text"}}, ""),
        (Operation.CHAT, {}, ""),
        (Operation.CHAT, {"reasoning": None, "thinking": "yes"}, ""),
        (Operation.RESPONSES, {"reasoning": {"effort": "minimal", "summary": "auto"}}, "minimal"),
        (Operation.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 8192}}, "8192 tokens"),
        (Operation.MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max"),
        (Operation.MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none"),
    ],
)
def test_the_effort_is_read_from_a_body_of_each_dialect(
    operation: Operation, members: dict[str, Any], effort: str
) -> None:
    """As the gateway parses it: nested members may still be JSON."""
    prompt = {"input": "hi"} if operation is Operation.RESPONSES else {"messages": MESSAGES, "max_tokens": 9000}
    request = parse(operation, json.dumps({"model": "m", **prompt, **members}).encode(), {}, 0.0, "req-1")
    assert request.members.get("reasoning_effort", "") == effort
    assert bool(request.job_class) is bool(effort)


@pytest.mark.parametrize("effort", ["my secret plan", "HIGH", "", 7, -1, True, None, ["high"], {"a": 1}, 10**30])
def test_any_other_value_is_no_effort(effort: object) -> None:
    """A caller cannot write its own text into logs and onto the page."""
    assert reasoning_effort({"reasoning_effort": effort}) == ""
    for member in ("reasoning", "output_config"):
        assert reasoning_effort({member: {"effort": effort}}) == ""
    if type(effort) is not int or effort < 0 or effort > 10_000_000:
        assert reasoning_effort({"thinking": {"budget_tokens": effort}}) == ""


@pytest.mark.parametrize("budget", [1, 2048, 2049, 8192, 8193, 100_000])
def test_a_budget_of_thinking_counts_as_the_effort_that_its_translation_asks_for(budget: int) -> None:
    """`backends` and `policies` never meet, so each has the table: a condition of a tier must mean what is sent."""
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": MESSAGES,
        "thinking": {"type": "enabled", "budget_tokens": budget},
    }
    asked = MESSAGES_TO_CHAT.request(body, Omissions())["reasoning_effort"]
    assert place_of(f"{budget} tokens") == place_of(asked)
