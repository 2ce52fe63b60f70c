"""Turns of a chat in an order that the server's template takes, and calls and limits that it takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts
from backends.fitting.target import Author
from tests.backends.fitting.bodies import ASKED, CHAT, MESSAGES, RESPONSES, fitted

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "be brief"}
SAID = {"role": "assistant", "content": "so"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
EMPTY = {"role": "assistant", "content": ""}
GEMMA, MISTRAL = facts_of("vllm", "gemma-4-31b"), facts_of("llamacpp", "mistral-small")
BY_CALLERS = pytest.mark.parametrize("author", [Author.CALLER, Author.KNOWING])


def spoken(facts: Facts, *turns: Json, author: Author = Author.CALLER) -> list[Json]:
    """Turns as they are sent; of a caller's own body they are undecoded."""
    given = [msgspec.Raw(msgspec.json.encode(turn)) for turn in turns]
    sent, _ = fitted(facts, CHAT, {"messages": given}, author)
    found: list[Json] = json.loads(msgspec.json.encode(sent["messages"]))
    return found


def roles(facts: Facts, *turns: Json) -> list[str]:
    return [turn["role"] for turn in spoken(facts, *turns)]


@BY_CALLERS
@pytest.mark.parametrize("facts", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_turns_of_one_role_are_merged_where_roles_have_to_alternate(facts: Facts, author: Author) -> None:
    """Their texts with a blank line between; a picture keeps its part."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = {"role": "user", "content": [picture]}
    found = spoken(facts, SYSTEM, ASKED, ASKED, SAID, SAID, asked, ASKED, author=author)
    assert [turn["role"] for turn in found] == ["system", "user", "assistant", "user"]
    assert [turn["content"] for turn in found[1:3]] == ["hi\n\nhi", "so\n\nso"]
    assert found[3]["content"] == [picture, {"type": "text", "text": "hi"}]


def test_a_call_after_a_text_is_of_the_same_turn() -> None:
    found = spoken(GEMMA, ASKED, SAID, CALLED, RESULT)
    assert found[1:] == [{**CALLED, "content": "so"}, RESULT]


@pytest.mark.parametrize("facts", [GEMMA, MISTRAL, facts_of("mistral", "mistral-large-2512")])
def test_the_assistant_speaks_between_results_and_a_user(facts: Facts) -> None:
    """Templates count results as the user's turn, or do not count calls and results at all."""
    assert roles(facts, ASKED, CALLED, RESULT, ASKED) == ["user", "assistant", "tool", "assistant", "user"]
    assert roles(facts, ASKED, CALLED, RESULT, SAID, ASKED) == ["user", "assistant", "tool", "assistant", "user"]


def test_newer_models_take_a_user_after_results() -> None:
    assert roles(facts_of("mistral", "mistral-medium-3-5"), ASKED, CALLED, RESULT, ASKED)[2:] == ["tool", "user"]


def test_a_reminder_of_the_system_leaves_no_two_turns_of_one_role() -> None:
    """A later system message becomes the user's text, which is merged."""
    assert roles(GEMMA, SYSTEM, ASKED, SYSTEM, SAID, SYSTEM, ASKED) == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("facts", [GEMMA, MISTRAL])
def test_the_user_opens_a_conversation_that_the_assistant_opened(facts: Facts) -> None:
    assert roles(facts, SYSTEM, SAID, ASKED) == ["system", "user", "assistant", "user"]


def test_the_user_opens_messages_too() -> None:
    sent, _ = fitted(facts_of("anthropic", "claude-opus-5"), MESSAGES, {"messages": [SAID, ASKED]})
    assert [turn["role"] for turn in sent["messages"]] == ["user", "assistant", "user"]


@BY_CALLERS
@pytest.mark.parametrize("turn", [EMPTY, {"role": "assistant", "content": None, "reasoning_content": "hm"}])
def test_an_empty_turn_of_the_assistant_is_left_out_where_it_is_refused(turn: Json, author: Author) -> None:
    """All of it went into thinking, or the user interrupted it."""
    assert spoken(facts_of("deepseek", "deepseek-flash"), ASKED, turn, ASKED, author=author) == [ASKED, ASKED]
    assert spoken(facts_of("vllm", "qwen3-8b"), ASKED, turn, ASKED, author=author)[1]["role"] == "assistant"


def test_a_turn_to_be_continued_is_marked_for_mistral() -> None:
    """Which refuses a last turn of the assistant without the mark."""
    facts = facts_of("mistral", "mistral-large-2512")
    assert spoken(facts, ASKED, SAID)[1] == {**SAID, "prefix": True}
    assert spoken(facts, ASKED, SAID, ASKED)[1] == SAID
    assert spoken(GEMMA, ASKED, SAID)[1] == SAID


def test_an_order_that_is_taken_stays_as_it_is() -> None:
    """And so does every turn, byte for byte."""
    given = [msgspec.Raw(b'{"role" :"user","content":"hi"}'), msgspec.Raw(b'{"role": "assistant","content":"so"}')]
    given.append(given[0])
    for facts in (GEMMA, facts_of("mistral", "mistral-large-2512")):
        sent, _ = fitted(facts, CHAT, {"messages": given}, Author.CALLER)
        assert all(new is old for new, old in zip(sent["messages"], given, strict=True))


@pytest.mark.parametrize("arguments", ['{"path": "a', "[1]", "no"])
def test_arguments_that_are_no_object_become_one_where_a_template_reads_them(arguments: str) -> None:
    """As a call that was cut short leaves them in a history."""
    function = {"name": "f", "arguments": arguments}
    turn = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "call_2", "function": function}]}
    results = [RESULT, {**RESULT, "tool_call_id": "call_2"}]
    [whole, cut] = spoken(facts_of("vllm", "qwen3-8b"), ASKED, turn, *results)[1]["tool_calls"]
    assert whole == CALL
    assert json.loads(cut["function"]["arguments"]) == {"arguments": arguments}
    kept = spoken(facts_of("deepseek", "deepseek-flash"), ASKED, turn, *results)[1]["tool_calls"]
    assert kept[1]["function"] == function


# ------------------------------------------------------------------- limits, stops and tools


@pytest.mark.parametrize(
    ("kind", "model", "operation", "members", "sent"),
    [
        ("anthropic", "claude-haiku-4-5", MESSAGES, {"max_tokens": 128_000}, {"max_tokens": 64_000}),
        ("gemini", "gemini-3.8-flash", CHAT, {"max_tokens": 100_000}, {"max_tokens": 65_536}),
        ("openai", "gpt-4.1", RESPONSES, {"max_output_tokens": 128_000}, {"max_output_tokens": 32_768}),
        ("openai", "gpt-5.4", RESPONSES, {"max_output_tokens": 8}, {"max_output_tokens": 16}),
    ],
)
def test_a_limit_of_the_output_is_one_that_the_model_takes(
    kind: str, model: str, operation: Any, members: Json, sent: Json
) -> None:
    """And told; a limit that the model takes, and one of a model that is not known, stays."""
    assert fitted(facts_of(kind, model), operation, members, Author.CALLER) == (sent, [*members])
    assert fitted(facts_of(kind, model), operation, sent, Author.CALLER) == (sent, [])
    assert fitted(Facts(), operation, members, Author.CALLER) == (members, [])


def test_a_budget_of_thinking_stays_below_a_lowered_limit() -> None:
    thinking = {"type": "enabled", "budget_tokens": 127_999}
    facts = facts_of("anthropic", "claude-haiku-4-5")
    sent, _ = fitted(facts, MESSAGES, {"max_tokens": 128_000, "thinking": thinking}, Author.CALLER)
    assert sent == {"max_tokens": 64_000, "thinking": {"type": "enabled", "budget_tokens": 63_999}}


def test_stops_of_white_space_are_left_out_for_anthropic() -> None:
    facts = facts_of("anthropic", "claude-opus-5")
    assert fitted(facts, MESSAGES, {"stop_sequences": ["\n\n", "END"]}) == (
        {"stop_sequences": ["END"]},
        ["stop_sequences"],
    )


@pytest.mark.parametrize("author", Author)
def test_a_list_of_no_tools_is_left_out_where_it_is_refused(author: Author) -> None:
    """With what needs tools; nothing is lost."""
    members = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    assert fitted(facts_of("mistral", "mistral-large-2512"), CHAT, members, author) == ({}, [])


def test_a_model_without_reasoning_is_asked_for_none_over_responses() -> None:
    members = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    assert fitted(facts_of("openai", "gpt-4.1"), RESPONSES, members, Author.KNOWING) == ({}, ["reasoning"])
    assert fitted(facts_of("openai", "gpt-5.4"), RESPONSES, members, Author.KNOWING) == (members, [])


def test_thinking_between_tools_has_an_effort_that_is_taken_beside_it() -> None:
    members = {"thinking": {"type": "between_tools"}, "output_config": {"effort": "max"}}
    sent, told = fitted(facts_of("anthropic", "claude-sonnet-5-5"), MESSAGES, members, Author.CALLER)
    assert (sent["thinking"], sent["output_config"]) == (members["thinking"], {"effort": "high"})
    assert told == ["output_config.effort"]


# ------------------------------------------------------------------- blocks


def test_blocks_of_a_providers_tools_are_texts_for_other_servers_of_messages() -> None:
    searched = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}
    turns = [{"role": "user", "content": [document]}, {"role": "assistant", "content": [searched]}, ASKED]
    sent, _ = fitted(facts_of("vllm", "qwen3-8b"), MESSAGES, {"messages": turns}, Author.CALLER)
    assert sent["messages"][0]["content"] == [{"type": "text", "text": "abc"}]
    [block] = sent["messages"][1]["content"]
    assert block == {"type": "text", "text": '[server_tool_use] web_search {"query":"x"}'}
    sent, _ = fitted(facts_of("anthropic", "claude-opus-5"), MESSAGES, {"messages": turns}, Author.CALLER)
    assert sent["messages"] == turns
