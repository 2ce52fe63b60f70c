"""Members of history, roles, and the order of messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts, Reasoning, System
from backends.fitting.fit import fit, plan
from backends.fitting.target import Author
from backends.translation.omissions import Omissions
from tests.backends.fitting.bodies import ASKED, CHAT, MESSAGES, RESPONSES, Json, fitted

CALL: Json = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT: Json = {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"}
THOUGHT: Json = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
SYSTEM: Json = {"role": "system", "content": "s"}


def messages(facts: Facts, *turns: Json, author: Author = Author.GATEWAY) -> list[Json]:
    found: list[Json] = fitted(facts, CHAT, {"messages": list(turns)}, author)[0]["messages"]
    return found


@pytest.mark.parametrize("author", Author)
@pytest.mark.parametrize("kind", ["mistral", "groq", "cerebras"])
def test_reasoning_and_other_members_that_a_server_refuses_are_left_out_whoever_wrote_them(
    kind: str, author: Author
) -> None:
    """Failover to a server that knows less than the first must not fail for what the first has answered."""
    extra = {"provider_specific_fields": {"a": 1}, "annotations": [], "refusal": None}
    told = Omissions()
    turns = [ASKED, {**THOUGHT, **extra}, RESULT]
    written = [msgspec.Raw(msgspec.json.encode(turn)) for turn in turns]  # as a caller's are
    body = {"messages": turns if author is Author.GATEWAY else written}
    sent = msgspec.json.decode(msgspec.json.encode(fit(body, plan(CHAT, facts_of(kind, "m"), author), told).body))
    assert sent["messages"] == [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    assert "messages.provider_specific_fields" in told.noted


def test_reasoning_goes_back_to_a_server_that_wants_it_with_each_call() -> None:
    """By the server's name of the member; a call of another model has a placeholder."""
    deepseek = facts_of("deepseek", "deepseek-flash")
    renamed = {**THOUGHT, "reasoning": "hm"}
    del renamed["reasoning_content"]
    for author in Author:
        assert messages(deepseek, ASKED, renamed, RESULT, author=author)[1] == THOUGHT
    bare = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert messages(deepseek, ASKED, bare, RESULT)[1]["reasoning_content"] == " "


def test_reasoning_that_a_translation_has_written_goes_to_servers_that_are_known_to_take_it() -> None:
    """A caller's own stays where nothing is known."""
    unknown = facts_of("compatible", "m")
    assert "reasoning_content" not in messages(unknown, ASKED, THOUGHT, RESULT)[1]
    assert messages(unknown, ASKED, THOUGHT, RESULT, author=Author.KNOWING)[1] == THOUGHT
    assert messages(facts_of("vllm", "qwen3"), ASKED, THOUGHT, RESULT)[1]["reasoning"] == "hm"
    assert messages(Facts(reasoning=Reasoning.REFUSED), ASKED, THOUGHT, author=Author.KNOWING)[1].keys() == {
        "role", "content", "tool_calls"
    }  # fmt: skip


@pytest.mark.parametrize("author", Author)
def test_a_learned_path_is_left_out_wherever_it_stands(author: Author) -> None:
    facts = replace(Facts(), refused=frozenset({"seed", "messages.tool_calls.function.strict"}))
    call = {**CALL, "function": {**CALL["function"], "strict": True}}
    raw = msgspec.Raw(msgspec.json.encode({"role": "assistant", "tool_calls": [call]}))
    told = Omissions()
    sent = fit({"seed": 7, "messages": [raw, ASKED]}, plan(CHAT, facts, author), told).body
    assert msgspec.json.decode(msgspec.json.encode(sent)) == {
        "messages": [{"role": "assistant", "tool_calls": [CALL]}, ASKED]
    }
    assert sorted(told.noted) == ["messages.tool_calls.function.strict", "seed"]


def test_a_developer_is_the_system_and_systems_are_one_at_the_beginning() -> None:
    """Later ones are the user's text, and never between a call and its results."""
    facts = Facts(developer=False, system=System.ONE)
    later = {"role": "developer", "content": "later"}
    found = messages(
        facts, SYSTEM, {"role": "developer", "content": "d"}, ASKED, {**THOUGHT, "tool_calls": [CALL]}, later, RESULT,
        {"role": "assistant", "content": "x"}, ASKED, SYSTEM,
    )  # fmt: skip
    assert [turn["role"] for turn in found] == ["system", "user", "assistant", "tool", "user", "assistant", "user"]
    assert found[0]["content"] == "s\n\nd"
    assert (found[4]["content"], found[-1]["content"]) == ("later", "hi\n\ns")


def test_a_later_system_of_a_caller_does_not_stand_between_a_call_and_its_result() -> None:
    """Nobody puts results of a caller's own body in order."""
    found = messages(Facts(system=System.ONE), ASKED, THOUGHT, SYSTEM, RESULT, ASKED, author=Author.CALLER)
    assert found == [ASKED, THOUGHT, RESULT, {"role": "user", "content": "s\n\nhi"}]


def test_results_stand_directly_after_their_calls() -> None:
    second = {**CALL, "id": "b"}
    said = {"role": "developer", "content": "d"}
    found = messages(
        Facts(), {"role": "assistant", "tool_calls": [CALL, second]}, RESULT, said, {**RESULT, "tool_call_id": "b"}
    )
    assert [turn["role"] for turn in found] == ["assistant", "tool", "tool", "user"]


def test_empty_texts_and_white_space_at_the_end_are_left_out_where_refused() -> None:
    text = {"type": "text", "text": "a"}
    turns = [
        {"role": "user", "content": [text, {"type": "text", "text": " "}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "so \n"},
    ]
    facts = facts_of("anthropic", "claude-haiku-4-5")
    sent = fitted(facts, MESSAGES, {"messages": turns, "system": [{"type": "text", "text": ""}]})[0]
    assert sent == {"messages": [{"role": "user", "content": [text]}, {"role": "assistant", "content": "so"}]}


@pytest.mark.parametrize("author", Author)
def test_a_call_without_the_state_that_a_server_wants_has_the_documented_placeholder(author: Author) -> None:
    """The first call of a turn, where no call of it has any: another model wrote the turn."""
    facts, path = facts_of("gemini", "gemini-3-pro"), "skip_thought_signature_validator"
    own = {**CALL, "extra_content": {"google": {"thought_signature": "own"}}}
    turn: Json = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    found = messages(facts, ASKED, turn, author=author)[1]["tool_calls"]
    assert found == [{**CALL, "extra_content": {"google": {"thought_signature": path}}}, CALL]
    signed = {**turn, "tool_calls": [own, CALL]}
    assert messages(facts, ASKED, signed, author=author)[1]["tool_calls"] == [own, CALL]


@pytest.mark.parametrize("author", Author)
def test_such_state_among_the_details_of_the_reasoning_has_its_placeholder_there(author: Author) -> None:
    """By the model, at a server that keeps state so. A turn with state of its own stays."""
    bare = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    own = {**bare, "reasoning_details": [{"type": "reasoning.encrypted", "data": "zz", "format": "google-gemini-v1"}]}
    facts = facts_of("openrouter", "google/gemini-3.8-flash")
    _, first, _, second, _ = messages(facts, ASKED, bare, RESULT, own, RESULT, author=author)
    assert first["reasoning_details"] == [{**facts.detail_placeholder, "id": CALL["id"], "index": 0}]
    assert second == own
    other = facts_of("openrouter", "openai/gpt-6-luna")
    assert messages(other, ASKED, bare, RESULT, author=author)[1] == bare


@pytest.mark.parametrize("author", Author)
def test_state_of_calls_of_another_server_is_left_out_for_one_that_judges_a_body(author: Author) -> None:
    extra = {"extra_content": {"google": {"thought_signature": "zz"}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [{**CALL, **extra}]}
    sent, told = fitted(facts_of("openai", "gpt-4.1"), CHAT, {"messages": [ASKED, turn, RESULT]}, author)
    assert sent["messages"][1]["tool_calls"] == [CALL]
    assert told == ["messages.tool_calls.members"]
    assert messages(facts_of("gemini", "gemini-3.8-flash"), ASKED, turn, RESULT, author=author)[1] == turn


@pytest.mark.parametrize("author", Author)
def test_thinking_among_the_parts_of_a_turn_is_left_out_where_no_server_reads_it(author: Author) -> None:
    """Mistral keeps its reasoning there."""
    thought, text = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}
    turn: Any = {"role": "assistant", "content": [thought, text]}
    turn = turn if author is Author.GATEWAY else msgspec.Raw(msgspec.json.encode(turn))  # as a caller's are
    sent, told = fitted(facts_of("dashscope", "qwen3.8-max"), CHAT, {"messages": [ASKED, turn, ASKED]}, author)
    assert (sent["messages"][1], told) == ({"role": "assistant", "content": [text]}, ["messages.content.thinking"])
    assert fitted(facts_of("mistral", "m"), CHAT, {"messages": [ASKED, turn, ASKED]}, author)[1] == []
    alone = {"role": "assistant", "content": [thought]}
    found = messages(facts_of("dashscope", "qwen3.8-max"), ASKED, alone, {**alone, "tool_calls": [CALL]}, RESULT)
    assert [found[1]["content"], found[1]["tool_calls"]] == [None, [CALL]]  # nothing was left of the turn before


def test_a_refusal_is_the_text_where_there_is_no_other_and_the_server_has_no_such_member() -> None:
    said = {"role": "assistant", "content": "a", "refusal": "no"}
    found = messages(facts_of("mistral", "m"), ASKED, said, ASKED, {**said, "content": None}, ASKED)
    assert [found[1], found[3]] == [{"role": "assistant", "content": each} for each in ("a", "no")]


# -- Responses -----------------------------------------------------------------------------------------

OWN: Json = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
KEPT: Json = {"type": "reasoning", "id": "rs_2", "summary": []}
TEXT: Json = {"type": "reasoning", "id": "rs_3", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ITEM: Json = {"role": "user", "content": "hi"}


def items(body: Json, author: Author, api: str = "openai") -> tuple[list[Json], list[str]]:
    written = [msgspec.Raw(msgspec.json.encode(each)) for each in (ITEM, OWN, KEPT, TEXT)]
    sent, told = fitted(facts_of(api, "m"), RESPONSES, {"input": written, **body}, author)
    return msgspec.json.decode(msgspec.json.encode(sent["input"])), told


@pytest.mark.parametrize("author", [Author.CALLER, Author.KNOWING])
def test_reasoning_that_a_server_of_responses_has_not_made_is_left_out_and_told(author: Author) -> None:
    """Its own is encrypted, or kept under its id where the caller lets it store."""
    assert items({}, author) == ([ITEM, OWN, KEPT], ["input.reasoning"])
    assert items({"store": False}, author) == ([ITEM, OWN], ["input.reasoning"])
    assert items({"store": False}, author, "vllm") == ([ITEM, OWN, KEPT, TEXT], [])


def test_reasoning_of_a_translation_has_no_id_that_a_server_knows() -> None:
    assert items({"store": True}, Author.GATEWAY) == ([ITEM, OWN], ["input.reasoning"])
