"""Names, ids, choices, schemas and custom tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts
from backends.fitting.custom_tools import as_functions
from backends.fitting.names import fitted as fitted_name
from backends.fitting.target import Author
from backends.translation.omissions import Omissions
from backends.translation.translation import UntranslatableError
from tests.backends.fitting.bodies import ASKED, CHAT, FUNCTION, MESSAGES, RESPONSES, Json, fitted, whole

LONG = "mcp__server__" + "x" * 70
OPENAI = facts_of("openai", "gpt-4.1")


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def test_a_name_that_does_not_fit_is_the_same_everywhere_and_mapped_back_in_answers() -> None:
    """In the tools, the choice and the history; in a whole answer and in a stream."""
    call = {"id": "a", "type": "function", "function": {"name": LONG, "arguments": "{}"}}
    members = {
        "tools": [named(LONG)],
        "tool_choice": {"type": "function", "function": {"name": LONG}},
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}],
    }
    found = whole(OPENAI, CHAT, members, Author.GATEWAY, Omissions())
    short = found.body["tools"][0]["function"]["name"]
    assert len(short) <= 64
    assert short.startswith("mcp__server__")
    assert found.body["tool_choice"]["function"]["name"] == short
    assert found.body["messages"][1]["tool_calls"][0]["function"]["name"] == short
    assert found.answer is not None
    written = {"id": "b", "type": "function", "function": {"name": short, "arguments": "{}"}}
    reply = found.answer.reply({"choices": [{"message": {"tool_calls": [written]}}]}, members)
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == LONG
    chunk = msgspec.json.encode({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **written}]}}]})
    text = b'data: {"choices":[{"index":0,"delta":{"content":"as it  was"}}]}\n\n'
    stream = found.answer.stream(members)
    assert stream.feed(text) == text
    assert LONG.encode() in stream.feed(b"data: " + chunk + b"\n\n")


@pytest.mark.parametrize(
    ("kind", "model"), [("mistral", "mistral-medium-3"), ("openai", "gpt-4.1"), ("anthropic", "claude-haiku-4-5")]
)
def test_ids_that_do_not_fit_are_alike_in_call_and_result(kind: str, model: str) -> None:
    """Two ids stay two."""
    ids = ["functions.f:0", "functions.f:1" + "y" * 50]
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "1"} for each in ids]
    facts = facts_of(kind, model)
    asked = [ASKED, {"role": "assistant", "tool_calls": calls}, *results]
    turns = fitted(facts, CHAT, {"messages": asked})[0]["messages"]
    sent = [call["id"] for call in turns[1]["tool_calls"]]
    assert sent == [turn["tool_call_id"] for turn in turns[2:]]
    assert len(set(sent)) == 2
    assert sent == [fitted_name(each, facts.call_id) for each in ids]
    assert sent != ids


def test_a_name_begins_with_a_letter_where_a_server_wants_one() -> None:
    assert fitted_name("1st tool", "[a-zA-Z_][a-zA-Z0-9_-]{0,63}").startswith("t_1st_tool_")


def test_members_that_lean_on_tools_go_with_them() -> None:
    """Of a body that a translation has written."""
    choice = {"type": "function", "function": {"name": "gone"}}
    for members in ({"tools": []}, {}):
        sent, _ = fitted(Facts(), CHAT, {**members, "tool_choice": "auto", "parallel_tool_calls": True})
        assert sent == {}
    sent, told = fitted(Facts(), CHAT, {"tools": [FUNCTION], "tool_choice": choice})
    assert (sent, told) == ({"tools": [FUNCTION]}, ["tool_choice"])


def test_a_choice_in_a_form_that_the_server_lacks_is_another_form_or_refused() -> None:
    lmstudio, glm = facts_of("lmstudio", "m"), facts_of("zai", "glm-5.3")
    choice = {"type": "function", "function": {"name": "f"}}
    sent, _ = fitted(lmstudio, CHAT, {"tools": [FUNCTION, named("g")], "tool_choice": choice})
    assert sent == {"tools": [FUNCTION], "tool_choice": "required"}
    with pytest.raises(UntranslatableError, match="tool_choice"):
        fitted(glm, CHAT, {"tools": [FUNCTION], "tool_choice": "required"})


# -- schemas -------------------------------------------------------------------------------------------


def test_a_schema_of_the_answer_is_closed_and_its_bounds_are_in_descriptions() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "description": "A number"}}}
    members = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    sent, told = fitted(facts_of("anthropic", "claude-opus-4-6"), MESSAGES, members)
    assert sent["output_config"]["format"]["schema"] == {
        "type": "object",
        "properties": {"n": {"type": "integer", "description": "A number (minimum: 1)"}},
        "additionalProperties": False,
    }
    assert told == ["output_config.format.schema"]


def test_alternatives_at_the_root_of_a_tool_are_one_object() -> None:
    """Required is what all of them require."""
    branches = [
        {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]},
        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": branches}}}
    [sent] = fitted(OPENAI, CHAT, {"tools": [tool]})[0]["tools"]
    assert sent["function"]["parameters"] == {
        "type": "object", "properties": branches[0]["properties"], "required": ["a"]
    }  # fmt: skip


def test_strict_is_left_out_of_a_schema_that_it_would_give_another_meaning() -> None:
    """A property that may be absent."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    sent, told = fitted(OPENAI, CHAT, {"response_format": shape})
    assert sent["response_format"]["json_schema"] == {"name": "x", "strict": False, "schema": schema}
    assert told == ["response_format.json_schema.strict"]


def test_strict_is_left_out_of_an_object_of_any_members() -> None:
    for extra in (True, {"type": "string"}):
        schema = {"type": "object", "properties": {}, "additionalProperties": extra}
        shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        assert not fitted(OPENAI, CHAT, {"response_format": shape})[0]["response_format"]["json_schema"]["strict"]


def test_parts_at_the_root_are_one_object_that_requires_what_any_of_them_requires() -> None:
    parts = [{"properties": {each: {"type": "string"}}, "required": [each]} for each in "ab"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"allOf": parts}}}
    [sent] = fitted(OPENAI, CHAT, {"tools": [tool]})[0]["tools"]
    assert sent["function"]["parameters"]["required"] == ["a", "b"]


def test_one_of_is_any_of_where_a_server_has_no_other() -> None:
    given = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": given}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    sent = fitted(OPENAI, CHAT, {"response_format": shape})[0]["response_format"]["json_schema"]["schema"]
    assert sent["properties"]["a"] == {"anyOf": given["oneOf"]}


# -- custom tools --------------------------------------------------------------------------------------

PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits.",
         "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}}}  # fmt: skip
RAW = '*** Begin "Patch"\n+\\u00e9 é \U0001f600\n'


def custom(*messages: Json) -> Any:
    body = {"tools": [PATCH, FUNCTION], "messages": list(messages)}
    step = as_functions(body)
    assert step is not None
    return step, step.request(body, Omissions())


def test_a_custom_tool_is_a_function_of_one_text_with_its_grammar_told() -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "apply_patch", "input": RAW}}
    _, sent = custom({"role": "assistant", "tool_calls": [call]})
    function = sent["tools"][0]["function"]
    assert sent["tools"][0]["type"] == "function"
    assert "start: X" in function["description"]
    assert list(function["parameters"]["properties"]) == ["input"]
    written = sent["messages"][0]["tool_calls"][0]
    assert written["type"] == "function"
    assert msgspec.json.decode(written["function"]["arguments"]) == {"input": RAW}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("arguments", [msgspec.json.encode({"input": RAW}).decode(), '{ "input" : "\\ud83d\\ude00"}'])
def test_a_call_of_it_is_custom_again_whole_and_streamed(arguments: str, size: int) -> None:
    """However the arguments are cut."""
    expected = msgspec.json.decode(arguments)["input"]
    step, _ = custom()
    call = {"id": "a", "type": "function", "function": {"name": "apply_patch", "arguments": arguments}}
    reply = step.reply({"choices": [{"message": {"tool_calls": [call]}}]}, {})
    assert reply["choices"][0]["message"]["tool_calls"] == [
        {"id": "a", "type": "custom", "custom": {"name": "apply_patch", "input": expected}}
    ]
    assert streamed(step, arguments, size) == expected


def streamed(step: Any, arguments: str, size: int) -> str:
    events, stream = [], step.stream({})
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    for number, piece in enumerate(pieces):
        head = {"id": "a", "type": "function", "extra_content": {"sig": "zz"}} if not number else {}
        function = {"arguments": piece, **({"name": "apply_patch"} if not number else {})}
        delta = {"tool_calls": [{"index": 0, **head, "function": function}]}
        events.append({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    data = b"".join(stream.feed(b"data: " + msgspec.json.encode(event) + b"\n\n") for event in events) + stream.close()
    found = [msgspec.json.decode(line[6:]) for line in data.split(b"\n\n") if line]
    calls = [call for event in found for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["type"] == "custom"
    assert calls[0]["custom"]["name"] == "apply_patch"
    assert calls[0]["extra_content"] == {"sig": "zz"}  # state that the server wants back
    return "".join(call["custom"]["input"] for call in calls)


def test_arguments_of_another_form_are_the_text() -> None:
    """A model that writes the raw text has meant it."""
    step, _ = custom()
    assert streamed(step, "*** Begin Patch", 4) == "*** Begin Patch"


def test_calls_of_two_choices_are_kept_apart_and_whole_before_the_end_of_each() -> None:
    """Both have the number 0; a text that is no `input` is known at the end."""
    stream, found = custom()[0].stream({}), []
    for choice in (0, 1):
        function = {"name": "apply_patch", "arguments": f"patch {choice}"}
        call = {"index": 0, "id": f"c{choice}", "type": "function", "function": function}
        found.append({"choices": [{"index": choice, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
    found += [{"choices": [{"index": choice, "delta": {}, "finish_reason": "tool_calls"}]} for choice in (0, 1)]
    data = b"".join(stream.feed(b"data: " + msgspec.json.encode(event) + b"\n\n") for event in found)
    said = [msgspec.json.decode(line[6:])["choices"][0] for line in data.split(b"\n\n") if line]
    for choice in (0, 1):
        own = [each for each in said if each["index"] == choice]
        calls = [call for each in own for call in each["delta"].get("tool_calls", ())]
        assert "".join(call["custom"]["input"] for call in calls) == f"patch {choice}"
        assert [call["id"] for call in calls if "id" in call] == [f"c{choice}"]
        assert own[-1]["finish_reason"] == "tool_calls"
    assert stream.close() == b""


# -- media and labels ----------------------------------------------------------------------------------


def test_an_image_that_the_server_does_not_take_is_refused_by_name() -> None:
    """It is meant: another tier is asked."""
    url = [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    with pytest.raises(UntranslatableError, match="image_url"):
        fitted(facts_of("moonshot", "kimi-k3"), CHAT, {"messages": [{"role": "user", "content": url}]})


def test_stops_labels_and_limits_fit() -> None:
    members = {"stop": list("abcde"), "user": "u" * 100, "metadata": {"k": "v" * 600}, "max_tokens": 5}
    sent, told = fitted(OPENAI, CHAT, members)
    assert (sent["stop"], len(sent["user"]), sent["max_completion_tokens"]) == (list("abcd"), 64, 5)
    assert told == ["metadata", "stop"]


def test_an_output_limit_above_the_models_own_becomes_that() -> None:
    """A server may refuse it, and no answer is longer; a budget of thinking stays below it. What fits stays."""
    short = Facts(output=4096)
    assert fitted(short, CHAT, {"max_completion_tokens": 8192}) == (
        {"max_completion_tokens": 4096},
        ["max_completion_tokens"],
    )
    assert fitted(short, RESPONSES, {"max_output_tokens": 8192})[0] == {"max_output_tokens": 4096}
    thinking = {"type": "enabled", "budget_tokens": 6000}
    sent, _ = fitted(short, MESSAGES, {"max_tokens": 8192, "thinking": thinking})
    assert sent == {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 4095}}
    for members in ({"max_completion_tokens": 4096}, {"max_completion_tokens": "9999"}, {}):
        assert fitted(short, CHAT, members) == (members, [])
    assert fitted(Facts(), CHAT, {"max_completion_tokens": 10**6})[1] == []
    assert fitted(short, CHAT, {"max_completion_tokens": 8192}, Author.KNOWING)[1] == []


@pytest.mark.parametrize(("most", "length"), [(None, 100), (64, 64), (20, 20), (100, 100)])
def test_the_name_of_a_user_has_the_length_of_the_server(most: int | None, length: int) -> None:
    """Of a translated chat too; two users stay two."""
    lengths = {len(fitted(Facts(user_length=most), CHAT, {"user": each * 100})[0]["user"]) for each in "ab"}
    names = {fitted(Facts(user_length=most), CHAT, {"user": each * 100})[0]["user"] for each in "ab"}
    assert (lengths, len(names)) == ({length}, 2)


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
def test_a_server_without_the_form_of_an_answer_is_not_asked(form: str) -> None:
    """The form is meant. The one server of a route judges it itself."""
    facts = Facts(json_schema=False, json_object=False)
    asked: Json = {"response_format": {"type": form}}
    with pytest.raises(UntranslatableError, match="response_format"):
        fitted(facts, CHAT, asked)
    assert fitted(facts, CHAT, asked, Author.KNOWING) == (asked, [])
    assert fitted(Facts(), CHAT, asked) == (asked, [])
