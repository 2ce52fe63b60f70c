"""Requests and replies of chat callers at Messages backends: the cases without a way back."""

from __future__ import annotations

from typing import Any

import pytest

from backends.translation.omissions import Omissions
from backends.translation.registry import CHAT_TO_MESSAGES
from backends.translation.translation import UntranslatableError
from tests.support.dialect_strategies import Json

ASKED = {"role": "user", "content": "hi"}


def messages(*turns: Json, **members: Any) -> Json:
    return CHAT_TO_MESSAGES.request({"model": "m", "messages": list(turns) or [ASKED], **members}, Omissions())


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_p": 0.1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools.custom"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "allowed_tools"}},
         "tool_choice.allowed_tools"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.role.function"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "c"}]}]},
         "messages.tool_calls.custom"),
    ],
)  # fmt: skip
def test_a_member_without_equivalent_is_refused_by_name(members: Json, param: str) -> None:
    """Refused before anything is sent; left out where the route drops the name."""
    body = {"model": "m", "messages": [ASKED], **members}
    with pytest.raises(UntranslatableError) as refusal:
        CHAT_TO_MESSAGES.request(body, Omissions())
    assert refusal.value.param == param
    assert f"'{param}'" in str(refusal.value)
    assert CHAT_TO_MESSAGES.request(body, Omissions({param}))["model"] == "m"


@pytest.mark.parametrize(
    ("members", "sent"),
    [
        ({"temperature": 1.5}, {"temperature": 1}),
        ({"service_tier": "flex"}, {}),
        ({"verbosity": "low"}, {}),
        ({"reasoning_effort": "minimal"}, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
    ],
)
def test_a_hint_or_a_value_beyond_the_dialect_is_left_out_or_the_nearest_and_told(members: Json, sent: Json) -> None:
    """No request is refused for one."""
    told = Omissions()
    body = CHAT_TO_MESSAGES.request({"model": "m", "messages": [ASKED], **members}, told)
    assert body == {"model": "m", "messages": [ASKED], **sent}
    assert [*told.noted] == [*members]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_audio", "input_audio": {}}, "messages.content.input_audio"),
        ({"type": "video_url", "video_url": {}}, "messages.content.video_url"),
        ({"type": "file", "file": {"file_id": "f"}}, "messages.content.file"),
        ({"type": "file", "file": {"file_data": "data:text/csv;base64,AAEC"}}, "messages.content.file"),
    ],
)
def test_content_without_equivalent_is_refused_by_name(part: Json, param: str) -> None:
    with pytest.raises(UntranslatableError) as refusal:
        messages({"role": "user", "content": [part]})
    assert refusal.value.param == param


def test_the_detail_of_a_picture_is_a_hint() -> None:
    told = Omissions()
    part = {"type": "image_url", "image_url": {"url": "u", "detail": "high"}}
    sent = CHAT_TO_MESSAGES.request({"model": "m", "messages": [{"role": "user", "content": [part]}]}, told)
    assert sent["messages"][0]["content"] == [{"type": "image", "source": {"type": "url", "url": "u"}}]
    assert [*told.noted] == ["messages.content.image_url.detail"]


def test_values_that_say_nothing_are_left_out() -> None:
    """Clients send defaults; hints about caches change no answer."""
    body = messages(
        n=1, logprobs=False, logit_bias={}, frequency_penalty=0, presence_penalty=0.0, modalities=["text"],
        store=False, response_format={"type": "text"}, seed=None, stop=None, tools=[], parallel_tool_calls=True,
        stream_options={"include_usage": True}, prompt_cache_key="k", cache_salt="s", verbosity="medium",
    )  # fmt: skip
    assert body == {"model": "m", "messages": [ASKED]}


def test_the_smaller_of_two_limits_counts() -> None:
    assert messages(max_tokens=50, max_completion_tokens=40)["max_tokens"] == 40
    assert messages(max_tokens=50)["max_tokens"] == 50


def test_one_stop_sequence_is_a_list() -> None:
    assert messages(stop="END")["stop_sequences"] == ["END"]


def test_instructions_at_the_beginning_are_the_system() -> None:
    """Later ones stay in their place."""
    body = messages(
        {"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, ASKED,
        {"role": "assistant", "content": "c"}, {"role": "developer", "content": "d"}, ASKED,
    )  # fmt: skip
    assert body["system"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "system", "user"]


def test_results_of_parallel_calls_are_one_turn() -> None:
    """Anthropic wants all of them in the message after the calls. Ids keep to Anthropic's letters in both places."""
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    body = messages(
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "b"}], "annotations": []},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "1", "name": "f"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "and?"},
    )
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "functions_f_0", "name": "f", "input": {}},
                {"type": "tool_use", "id": "b", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "functions_f_0", "content": "1"},
                {"type": "tool_result", "tool_use_id": "b"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]


def test_a_name_that_tells_no_speakers_apart_is_left_out() -> None:
    """AutoGen names every message; Anthropic has no such member."""
    system, said = {"role": "system", "content": "s"}, {"role": "assistant", "content": "x"}
    turns = [{**each, "name": each["role"]} for each in (system, ASKED, said, ASKED)]
    assert messages(*turns) == {"model": "m", "system": "s", "messages": [ASKED, said, ASKED]}


def test_unsigned_reasoning_is_left_out() -> None:
    """Anthropic refuses thinking that it has not signed."""
    details = [{"type": "reasoning.text", "text": "hm"}, {"type": "reasoning.encrypted", "data": "d", "format": "x"}]
    said = {"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning_details": details}
    assert messages(ASKED, said, ASKED)["messages"][1] == {"role": "assistant", "content": "x"}


def test_a_refusal_of_the_assistant_is_its_text() -> None:
    said = {"role": "assistant", "content": None, "refusal": "I cannot"}
    assert messages(ASKED, said, ASKED)["messages"][1] == {"role": "assistant", "content": "I cannot"}


def test_a_mark_for_the_cache_stays_at_its_block() -> None:
    """Clients of OpenRouter and LiteLLM place Anthropic's marks in chats."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body = messages(
        {"role": "system", "content": [{"type": "text", "text": "s", **mark}]}, ASKED,
        tools=[{"type": "function", "function": {"name": "f"}, **mark}],
    )  # fmt: skip
    assert body["system"] == [{"type": "text", "text": "s", **mark}]
    assert body["tools"] == [{"name": "f", "input_schema": {"type": "object", "properties": {}}, **mark}]


def test_a_description_of_the_format_is_the_schemas() -> None:
    described = {"name": "person", "description": "A person.", "schema": {"type": "object"}, "strict": True}
    body = messages(response_format={"type": "json_schema", "json_schema": described})
    assert body["output_config"]["format"]["schema"] == {"type": "object", "description": "A person."}


WRAPPED = ["[1]", "nonsense", '"x"', "null", '{"a": tru', '{"a":1} and', "1e999", '{"a":1e999}', "[" * 5000, "\u00a0"]


@pytest.mark.parametrize("written", WRAPPED)
def test_arguments_of_the_history_that_are_no_object_are_wrapped(written: str) -> None:
    """Anthropic's input is an object. A conversation with a malformed call can go on, and its words are kept."""
    assert input_of(written) == {"arguments": written}


@pytest.mark.parametrize(
    ("written", "found"), [("", {}), (" \n", {}), (None, {}), (' {"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1})]
)
def test_arguments_of_the_history_that_are_an_object_or_none_are_the_input(written: Any, found: Json) -> None:
    assert input_of(written) == found


def input_of(arguments: Any) -> Any:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [block] = messages(ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ASKED)["messages"][1][
        "content"
    ]
    return block["input"]


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]], ids=repr)
def test_a_turn_of_the_assistant_without_content_is_left_out(content: Any) -> None:
    """Anthropic refuses it; an answer that was all reasoning leaves one in the history."""
    said = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    assert messages(ASKED, said, ASKED)["messages"] == [ASKED, ASKED]


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ({"temperature": 0.2}, {}),
        ({"temperature": 1.5}, {}),
        ({"temperature": 1}, {"temperature": 1}),
        ({"top_p": 0.9, "top_k": 5}, {}),
        ({"top_p": 0.95}, {"top_p": 0.95}),
    ],
)
def test_an_effort_counts_before_members_that_thinking_excludes(members: Json, kept: Json) -> None:
    """Anthropic refuses thinking beside a temperature other than 1, a top_p below 0.95 or a top_k."""
    thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    assert messages(reasoning_effort="low", **members) == {"model": "m", "messages": [ASKED], **thinking, **kept}
    without = messages(reasoning_effort="none", **members | {"temperature": 0.2})
    assert without == {
        "model": "m",
        "messages": [ASKED],
        "thinking": {"type": "disabled"},
        **members,
        "temperature": 0.2,
    }


def test_a_forced_call_comes_without_thinking() -> None:
    """Anthropic refuses thinking where `tool_choice` forces a tool."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = messages(reasoning_effort="low", temperature=0.2, tools=tools, tool_choice="required")
    assert (body["output_config"], body["temperature"], "thinking" in body) == ({"effort": "low"}, 0.2, False)
    assert "thinking" in messages(reasoning_effort="low", tools=tools, tool_choice="auto")


# --------------------------------------------------------------------------- replies


def reply(*content: Json, **members: Any) -> Json:
    usage = {"input_tokens": 1, "output_tokens": 2}
    answer = {"id": "msg", "model": "m", "content": list(content), "stop_reason": "end_turn", "usage": usage, **members}
    return CHAT_TO_MESSAGES.reply(answer, {})


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        (None, "stop"),
    ],
)
def test_finish_reasons(reason: str | None, finish: str) -> None:
    """All stop reasons of the Messages API (November 2026)."""
    assert reply(stop_reason=reason)["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize("reason", ["a reason of the future", "error", "insufficient_system_resource", "abort"])
def test_an_unknown_end_is_no_success(reason: str) -> None:
    """Ends are never invented: such a reply is the server's failure, and the next endpoint is asked."""
    with pytest.raises(ValueError, match="unknown end"):
        reply(stop_reason=reason)


@pytest.mark.parametrize("tier", ["fast", "priority"])
def test_the_fast_tier_of_a_chat_is_the_speed_of_a_message(tier: str) -> None:
    told = Omissions()
    body = CHAT_TO_MESSAGES.request({"model": "m", "messages": [ASKED], "service_tier": tier}, told)
    assert (body, [*told.noted]) == ({"model": "m", "messages": [ASKED], "speed": "fast"}, [])


@pytest.mark.parametrize(("speed", "tier"), [("fast", "priority"), ("standard", None), (None, None)])
def test_a_chat_names_the_tier_that_was_served(speed: str | None, tier: str | None) -> None:
    assert reply(usage={"input_tokens": 3, "output_tokens": 7, "speed": speed}).get("service_tier") == tier


def test_the_prompt_of_a_chat_includes_what_caches_hold() -> None:
    """Anthropic's `input_tokens` are the rest."""
    usage = {
        "input_tokens": 3,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 20,
        "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 5},
        "service_tier": "standard",
    }
    assert reply(usage=usage)["usage"] == {
        "prompt_tokens": 123,
        "completion_tokens": 7,
        "total_tokens": 130,
        "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 20},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_the_explanation_of_a_refusal_is_the_refusal() -> None:
    details = {"type": "refusal", "category": "bio", "explanation": "Not this."}
    choice = reply(stop_reason="refusal", stop_details=details)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["refusal"]) == ("content_filter", "Not this.")


@pytest.mark.parametrize(("given", "written"), [([1], '{"arguments":"[1]"}'), ({}, "{}"), (None, "{}")])
def test_arguments_of_a_chat_are_an_object(given: Any, written: str) -> None:
    """Whatever another server of the dialect has for `input`."""
    [call] = reply({"type": "tool_use", "id": "t", "name": "f", "input": given})["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == written


def test_results_of_the_providers_own_tools_have_no_place_in_a_chat() -> None:
    """No chat can ask for such tools."""
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    message = reply(search, {"type": "web_search_tool_result"}, {"type": "text", "text": "x"})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "x", "refusal": None}
