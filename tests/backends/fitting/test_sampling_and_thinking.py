"""Sampling, efforts and thinking, by the shipped facts."""

from __future__ import annotations

import pytest

from backends.facts.lookup import facts_of
from backends.fitting.target import Author
from backends.interface import Operation
from backends.translation.translation import UntranslatableError
from tests.backends.fitting.bodies import CHAT, FUNCTION, MESSAGES, RESPONSES, Json, fitted

OPUS, OPUS_46, HAIKU_45 = "claude-opus-5-5", "claude-opus-4-6", "claude-haiku-4-5"
ADAPTIVE = {"type": "adaptive"}


@pytest.mark.parametrize(
    ("kind", "model", "operation", "members", "sent", "told"),
    [
        ("anthropic", "claude-opus-4-7", MESSAGES, {"temperature": 0, "top_k": 4}, {}, ["temperature", "top_k"]),
        ("anthropic", "claude-sonnet-5", MESSAGES, {"temperature": 1, "top_p": 1}, {}, []),
        ("anthropic", OPUS_46, MESSAGES, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5}, ["top_p"]),
        ("anthropic", OPUS_46, MESSAGES, {"temperature": 1, "top_p": 0.9}, {"top_p": 0.9}, []),
        ("anthropic", OPUS_46, MESSAGES, {"temperature": 0.5}, {"temperature": 0.5}, []),
        ("openai", "gpt-6-luna", CHAT, {"temperature": 0}, {}, ["temperature"]),
        ("openai", "gpt-6-luna", CHAT, {"temperature": 0, "reasoning_effort": "none"},
         {"temperature": 0, "reasoning_effort": "none"}, []),
        ("openai", "gpt-4.1", CHAT, {"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}, []),
        ("compatible", "anything", CHAT, {"temperature": 2, "top_k": 3}, {"temperature": 2, "top_k": 3}, []),
    ],
)  # fmt: skip
def test_sampling_that_a_model_does_not_take_is_left_out_and_told(
    kind: str, model: str, operation: Operation, members: Json, sent: Json, told: list[str]
) -> None:
    """A default says nothing, and is left out untold. An unknown model takes everything."""
    assert fitted(facts_of(kind, model), operation, members) == (sent, told)


@pytest.mark.parametrize(
    ("kind", "model", "operation", "members", "sent", "told"),
    [
        ("anthropic", OPUS, MESSAGES, {"thinking": {"type": "disabled"}},
         {"output_config": {"effort": "low"}}, ["thinking"]),
        ("anthropic", "claude-opus-5", MESSAGES, {"thinking": {"type": "disabled"}},
         {"thinking": {"type": "disabled"}}, []),
        ("anthropic", "claude-opus-5", MESSAGES,
         {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
         {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, ["output_config.effort"]),
        ("anthropic", OPUS, MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5000}},
         {"thinking": ADAPTIVE, "output_config": {"effort": "medium"}}, ["thinking.budget_tokens"]),
        ("anthropic", OPUS_46, MESSAGES, {"thinking": ADAPTIVE, "output_config": {"effort": "xhigh"}},
         {"thinking": ADAPTIVE, "output_config": {"effort": "max"}}, ["output_config.effort"]),
        ("anthropic", HAIKU_45, MESSAGES, {"thinking": ADAPTIVE, "output_config": {"effort": "low"}},
         {"thinking": {"type": "enabled", "budget_tokens": 2048}}, ["output_config.effort"]),
        ("anthropic", HAIKU_45, MESSAGES, {"thinking": ADAPTIVE, "max_tokens": 900}, {"max_tokens": 900}, ["thinking"]),
        ("openai", "gpt-6-astra", CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "low"},
         ["reasoning_effort"]),
        ("openai", "gpt-6-astra", CHAT, {"reasoning_effort": "max"}, {"reasoning_effort": "xhigh"},
         ["reasoning_effort"]),
        ("openai", "gpt-6-astra", RESPONSES, {"reasoning": {"effort": "max"}}, {"reasoning": {"effort": "max"}}, []),
        ("openai", "gpt-4.1", CHAT, {"reasoning_effort": "none"}, {}, []),
        ("openai", "gpt-4.1", CHAT, {"reasoning_effort": "low"}, {}, ["reasoning_effort"]),
    ],
)  # fmt: skip
def test_thinking_is_as_near_to_what_was_asked_as_the_model_has_it(
    kind: str, model: str, operation: Operation, members: Json, sent: Json, told: list[str]
) -> None:
    """Thinking that cannot be switched off is the lowest effort; a budget is an effort, and the reverse."""
    assert fitted(facts_of(kind, model), operation, members) == (sent, told)


def test_a_forced_call_goes_before_thinking_and_is_refused_where_it_cannot_be_forced() -> None:
    """A forced call is meant: another tier is asked."""
    forced = {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
              "tool_choice": {"type": "any"}, "thinking": ADAPTIVE}  # fmt: skip
    sent, told = fitted(facts_of("anthropic", OPUS_46), MESSAGES, forced)
    assert ("thinking" in sent, sent["tool_choice"], told) == (False, {"type": "any"}, ["thinking"])
    with pytest.raises(UntranslatableError, match="tool_choice"):
        fitted(facts_of("anthropic", OPUS), MESSAGES, forced)


def test_a_callers_own_sampling_stays_where_one_pool_is_asked() -> None:
    """With several pools no caller can know what each takes; with one, a refusal is the caller's to read."""
    facts, members = facts_of("anthropic", OPUS), {"temperature": 0.2}
    assert fitted(facts, MESSAGES, members, Author.KNOWING) == (members, [])
    assert fitted(facts, MESSAGES, members, Author.CALLER) == ({}, ["temperature"])


def test_tools_that_a_model_takes_without_thinking_alone_switch_thinking_off_over_chat() -> None:
    sent, told = fitted(facts_of("openai", "gpt-5.6-sol"), CHAT, {"tools": [FUNCTION]})
    assert (sent["reasoning_effort"], told) == ("none", ["reasoning_effort"])
    with pytest.raises(UntranslatableError, match="tools"):
        fitted(facts_of("openai", "gpt-6-astra"), CHAT, {"tools": [FUNCTION]})


def test_beside_an_answer_in_json_thinking_is_switched_off_where_the_model_has_one_of_the_two() -> None:
    """The form of the answer is meant. A text is no form."""
    dashscope, shape = facts_of("dashscope", "qwen3.8-max"), {"response_format": {"type": "json_object"}}
    assert fitted(dashscope, CHAT, shape) == ({**shape, "enable_thinking": False}, ["reasoning_effort"])
    text = {"response_format": {"type": "text"}}
    assert fitted(dashscope, CHAT, text) == (text, [])
    assert fitted(facts_of("vllm", "qwen3.6-27b"), CHAT, shape) == (shape, [])
