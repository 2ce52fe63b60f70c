"""Requests and replies of Messages callers at chat backends: the cases without a way back."""

from __future__ import annotations

from typing import Any

import pytest

from backends.translation.omissions import Omissions
from backends.translation.registry import MESSAGES_TO_CHAT
from backends.translation.translation import UntranslatableError
from tests.support.dialect_strategies import Json

ASKED = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


def chat(**members: Any) -> Json:
    return MESSAGES_TO_CHAT.request({"model": "m", "max_tokens": 9, "messages": [ASKED], **members}, Omissions())


def said(*blocks: Json, role: str = "user") -> list[Json]:
    """Messages of a turn with these blocks."""
    turns = [{"role": role, "content": list(blocks)}, *([ASKED] if role == "assistant" else [])]
    messages: list[Json] = chat(messages=turns)["messages"]
    return messages[: len(messages) - (role == "assistant")]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"user_profile_id": "u"}, "user_profile_id"),
        ({"invented": 1}, "invented"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"thinking": {"type": "invented"}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.web_search_20250305"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.bash_20250124"),
        ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]}, "tools.input_examples"),
        ({"messages": [ASKED, {"role": "assistant", "content": "{"}]}, "messages"),
    ],
)
def test_a_member_without_equivalent_is_refused_by_name(members: Json, param: str) -> None:
    """Refused before anything is sent; left out where the route drops the name."""
    body = {"model": "m", "max_tokens": 9, "messages": [ASKED], **members}
    with pytest.raises(UntranslatableError) as refusal:
        MESSAGES_TO_CHAT.request(body, Omissions())
    assert refusal.value.param == param
    assert f"'{param}'" in str(refusal.value)
    assert MESSAGES_TO_CHAT.request(body, Omissions({param}))["model"] == "m"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages.content.source"),
        ({"type": "document", "source": {"type": "url", "url": "u"}}, "messages.content.source"),
        (
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                "citations": {"enabled": True},
            },
            "messages.content.document.citations",
        ),
        ({"type": "container_upload", "file_id": "f"}, "messages.content.container_upload"),
        ({"type": "text", "text": "x", "invented": 1}, "messages.content.text.invented"),
    ],
)
def test_content_without_equivalent_is_refused_by_name(block: Json, param: str) -> None:
    with pytest.raises(UntranslatableError) as refusal:
        said(block)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("members", "tier"),
    [
        ({"speed": "fast"}, "priority"),
        ({"speed": "fast", "service_tier": "auto"}, "priority"),
        ({"speed": "standard"}, "default"),
        ({"service_tier": "standard_only"}, "default"),
    ],
)
def test_the_speed_of_a_message_is_a_tier_of_the_chat(members: Json, tier: str) -> None:
    assert chat(**members)["service_tier"] == tier


@pytest.mark.parametrize(("tier", "speed"), [("fast", "fast"), ("priority", "fast"), ("default", None), (None, None)])
def test_a_message_names_the_speed_that_was_served(tier: str | None, speed: str | None) -> None:
    choice = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    answer = MESSAGES_TO_CHAT.reply({"service_tier": tier, "choices": [choice]}, {})
    assert answer["usage"].get("speed") == speed


def test_hints_about_caches_are_left_out() -> None:
    """A chat's servers cache by themselves."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = chat(
        system=[{"type": "text", "text": "s", **hint}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **hint}]}],
        tools=[
            {
                "name": "f",
                "input_schema": {"type": "object"},
                **hint,
                "eager_input_streaming": True,
                "defer_loading": True,
            }
        ],
        diagnostics={"previous_message_id": None},
        **hint,
    )
    assert body == {
        "model": "m",
        "max_completion_tokens": 9,
        "messages": [{"role": "system", "content": "s"}, ASKED],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }


def test_an_edit_of_the_context_that_keeps_all_is_none() -> None:
    """Claude Code sends one with every request (2.1, November 2026)."""
    body = chat(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    assert "context_management" not in body


def test_a_request_of_claude_code_needs_no_drops() -> None:
    """As Claude Code 2.1.330 sends it (November 2026), shortened: instructions follow the user's message."""
    mark, user = {"cache_control": {"type": "ephemeral"}}, '{"device_id":"%s","session_id":"s"}' % ("c7" * 32)
    body = chat(
        system=[{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Rules.", **mark}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
            {"role": "system", "content": [{"type": "text", "text": "Today is Sunday."}]},
        ],
        tools=[{"name": "Edit", "description": "Edits.", "input_schema": {"type": "object"}, "defer_loading": True}],
        metadata={"user_id": user},
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        stream=True,
    )
    assert [message["role"] for message in body["messages"]] == ["system", "user", "system"]
    assert (body["reasoning_effort"], body["stream"], body["user"]) == ("high", True, user)


@pytest.mark.parametrize(("budget", "effort"), [(1024, "low"), (2048, "low"), (8192, "medium"), (31999, "high")])
def test_a_budget_of_thinking_becomes_an_effort(budget: int, effort: str) -> None:
    assert chat(thinking={"type": "enabled", "budget_tokens": budget})["reasoning_effort"] == effort


def test_adaptive_thinking_is_the_default_of_a_chat() -> None:
    """The model decides in both."""
    assert "reasoning_effort" not in chat(thinking={"type": "adaptive"})
    assert chat(output_config={"effort": "max"})["reasoning_effort"] == "max"
    assert chat(thinking={"type": "disabled"}, output_config={"effort": "max"})["reasoning_effort"] == "none"


def test_results_of_tools_precede_the_rest_of_the_turn() -> None:
    """A chat expects a result after each call at once; media of a result follow in the user's message."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAEC"}}
    messages = said(
        {"type": "text", "text": "look"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}, image]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "tool_result", "tool_use_id": "t4", "is_error": False, "content": []},
    )
    assert messages == [
        {"role": "tool", "tool_call_id": "t1", "content": "seen"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "tool", "tool_call_id": "t4", "content": ""},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}},
            ],
        },
    ]


def test_a_text_document_is_a_text_after_its_title() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    [message] = said({"type": "document", "title": "T", "context": "C", "source": source})
    assert message == {"role": "user", "content": "T\nC\nbody"}
    inner = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    [message] = said({"type": "document", "title": "T", "source": inner})
    assert [part["text"] for part in message["content"]] == ["T", "a", "b"]


def test_blocks_of_the_assistant_become_one_message() -> None:
    """In the order of a chat: reasoning, text, calls."""
    [message] = said(
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {**CALL, "caller": {"type": "direct"}},
        {"type": "text", "text": "after", "citations": None},
        role="assistant",
    )
    assert (message["reasoning_content"], message["content"]) == ("hm", "after")
    assert message["tool_calls"] == [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("content", ["", None, []], ids=repr)
def test_a_turn_of_the_assistant_without_content_stays(content: Any) -> None:
    """As an empty text, which chat servers accept."""
    assert chat(messages=[ASKED, {"role": "assistant", "content": content}, ASKED])["messages"] == [
        ASKED,
        {"role": "assistant", "content": ""},
        ASKED,
    ]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"a": [1]}, '{"a":[1]}'),
        ([1], '{"arguments":"[1]"}'),
        ('{"a": tru', '{"arguments":"{\\"a\\": tru"}'),
        (None, "{}"),
        ("", "{}"),
    ],
)
def test_an_input_of_the_history_that_is_no_object_is_wrapped(given: Any, written: str) -> None:
    """Templates of engines read the arguments as an object."""
    [message] = said({**CALL, "input": given}, role="assistant")
    assert message["tool_calls"][0]["function"]["arguments"] == written


# --------------------------------------------------------------------------- replies


@pytest.mark.parametrize("finish", ["length", "content_filter"])
@pytest.mark.parametrize(("written", "found"), [('{"a": "b', {}), ('{"a":1}', {"a": 1}), ("[1]", {}), ("", {})])
def test_a_call_that_was_cut_is_a_call_of_a_cut_answer(finish: str, written: str, found: Json) -> None:
    """With its input, if that was complete; calls before the last one were not cut."""
    calls = [{"id": f"t{n}", "function": {"name": "f", "arguments": text}} for n, text in enumerate(("[2]", written))]
    answer = reply(finish, content="so", tool_calls=calls)
    assert answer["stop_reason"] == {"length": "max_tokens", "content_filter": "refusal"}[finish]
    assert answer["content"] == [
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "t0", "name": "f", "input": {"arguments": "[2]"}},
        {"type": "tool_use", "id": "t1", "name": "f", "input": found},
    ]


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
@pytest.mark.parametrize("written", ["[1]", '"x"', "null", '{"a": tru', "true"])
def test_arguments_that_are_no_object_are_wrapped(finish: str, written: str) -> None:
    """Anthropic's input is an object; the text is kept as the engine wrote it."""
    [call] = reply(finish, tool_calls=[{"id": "t", "function": {"name": "f", "arguments": written}}])["content"]
    assert call["input"] == {"arguments": written}


def reply(finish: str | None = "stop", body: Json | None = None, **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return MESSAGES_TO_CHAT.reply({"id": "c", "model": "m", "choices": [choice]}, body or {})


@pytest.mark.parametrize(
    ("finish", "message", "reason"),
    [
        ("stop", {"content": "x"}, "end_turn"),
        ("length", {"content": "x"}, "max_tokens"),
        ("tool_calls", {"tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]}, "tool_use"),
        ("stop", {"tool_calls": [{"id": "t", "function": {"name": "f", "arguments": ""}}]}, "tool_use"),
        ("content_filter", {"content": "x"}, "refusal"),
        ("stop", {"refusal": "I cannot"}, "refusal"),
        ("eos_token", {"content": "x"}, "end_turn"),
        (None, {"content": "x"}, "end_turn"),
    ],
)
def test_stop_reasons(finish: str | None, message: Json, reason: str) -> None:
    assert reply(finish, **message)["stop_reason"] == reason


def test_a_refusal_is_the_text_of_the_answer() -> None:
    assert reply(refusal="I cannot")["content"] == [{"type": "text", "text": "I cannot"}]


def test_reasoning_has_two_names() -> None:
    """`reasoning_content` at DeepSeek, SGLang and llama.cpp; `reasoning` at vLLM and OpenRouter."""
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert reply(content="x", reasoning="hm")["content"][0] == thought
    assert reply(content="x", reasoning_content="hm")["content"][0] == thought


def test_mistrals_reasoning_is_a_part_of_the_content() -> None:
    """Mistral's API reference, reasoning (November 2026)."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    blocks = reply(content=[thought, {"type": "text", "text": "x"}])["content"]
    assert blocks == [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "x"}]


def test_omitted_thinking_is_not_shown() -> None:
    body = {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert reply(body=body, content="x", reasoning="hm")["content"] == [{"type": "text", "text": "x"}]


def test_more_cached_tokens_than_tokens_are_no_negative_count() -> None:
    """Some engines count the prompt after the cache."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}
    answer = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage}
    assert MESSAGES_TO_CHAT.reply(answer, {})["usage"] == {
        "input_tokens": 0,
        "output_tokens": 1,
        "cache_read_input_tokens": 64,
    }
