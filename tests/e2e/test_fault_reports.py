"""Reports of what gateways do wrong to a request: members, roles, tools and schemas that a server refuses.

The numbers are those of the reports. Fakes verify as the APIs do, and refuse in the APIs' words. Costs (10) are held by
test_cost_header.py, a full queue of vLLM (22) by test_queue_limits.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Operation
from tests.support.fault_reports import SHELL_SCHEMA, USER, Caller, Json, before, completion, post, refusal
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream

CHAT, MESSAGES, RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
OPUS, HAIKU, FABLE = "claude-opus-5", "claude-haiku-4-5", "claude-fable-5-1"
LONG = "mcp__plugin_atlassian_confluence__get_all_pages_of_the_space_with_labels_and_owner"
SAID: Json = {"max_tokens": 900, "messages": [USER]}
SHELL: Json = {"type": "function", "function": {"name": "shell", "parameters": SHELL_SCHEMA}}
BASH: Json = {"name": "Bash", "description": "Runs", "input_schema": SHELL_SCHEMA}
SEARCH: Json = {"type": "function", "name": "search", "parameters": SHELL_SCHEMA}
NAMESPACE: Json = {"type": "namespace", "name": "mcp__web", "description": "Web", "tools": [SEARCH]}
DEPRECATED = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "temperature is deprecated for this model."},
}
NO_PARSER = {
    "object": "error",
    "message": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}


def said_by(role: str, text: str) -> Json:
    """An item of Responses."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


# --------------------------------------------------------------------------- 1: the next tier


@pytest.mark.parametrize(
    ("kind", "words", "body"),
    [
        ("anthropic", DEPRECATED, {"temperature": 0}),
        ("vllm", NO_PARSER, {"tools": [SHELL], "tool_choice": "auto"}),
    ],
)
async def test_a_refusal_of_what_one_server_lacks_goes_to_the_next_tier(kind: str, words: Json, body: Json) -> None:
    async with (
        Upstream([refusal("400 Bad Request", words)]) as first,
        Upstream([completion(content="two")]) as second,
        running({"first": pool(first.url, backend=kind), "second": pool(second.url)}) as gateway,
    ):
        answer = await post(gateway.url, CHAT, {"model": "chat", "messages": [USER], **body})
    assert answer.status == 200


# --------------------------------------------------------------------------- 2, 11, 12: tools of Codex and Claude Code


async def test_tools_of_a_namespace_reach_a_chat_server() -> None:
    """By names that hold the namespace's."""
    body = {"input": [said_by("user", "hello")], "tools": [NAMESPACE]}
    sent = await sent_to_a_chat_server(RESPONSES, body)
    names = [tool["function"]["name"] for tool in sent["tools"]]
    assert [("mcp__web" in name, "search" in name) for name in names] == [(True, True)]


async def test_a_call_of_a_namespace_in_a_history_reaches_a_chat_server() -> None:
    call = {"type": "function_call", "name": "search", "namespace": "mcp__web", "call_id": "call_1", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    sent = await sent_to_a_chat_server(
        RESPONSES, {"input": [said_by("user", "hello"), call, output], "tools": [NAMESPACE]}
    )
    called = sent["messages"][-2]["tool_calls"][0]["function"]["name"]
    assert called == sent["tools"][0]["function"]["name"]


async def test_a_custom_tool_is_a_function_of_one_string_where_the_server_has_none() -> None:
    """And its call is custom again."""
    patch = {"type": "custom", "name": "apply_patch", "description": "Patches"}
    async with before("deepseek") as apis:
        body = {"input": [said_by("user", "hello")], "tools": [patch], "tool_choice": "auto"}
        answer = await Caller(apis).ask("deepseek-flash", RESPONSES, body)
        assert answer.status == 200
    assert [tool["type"] for tool in answer.sent["tools"]] == ["function"]


async def test_a_reference_to_a_tool_reaches_a_chat_server() -> None:
    """Claude Code with its own search of tools, whose results stay in the history."""
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [tool_result("toolu_1", [{"type": "tool_reference", "tool_name": "Bash"}])]},
    ]
    sent = await sent_to_a_chat_server(MESSAGES, {"max_tokens": 900, "messages": history, "tools": [BASH]})
    assert "Bash" in sent["messages"][-1]["content"]


async def test_a_history_with_a_search_of_the_provider_reaches_a_chat_server() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    history = [
        USER,
        {"role": "assistant", "content": [search, result, {"type": "text", "text": "It rains."}]},
        {"role": "user", "content": "thanks"},
    ]
    sent = await sent_to_a_chat_server(MESSAGES, {"max_tokens": 900, "messages": history})
    assert "It rains." in json.dumps(sent["messages"])


# --------------------------------------------------------------------------- 5 to 7: members of some models


@pytest.mark.parametrize("model", ["mistral-large-2512", "qwen/qwen3-32b"])
async def test_reasoning_of_a_history_is_left_out_where_the_server_refuses_it(model: str) -> None:
    turn = {"role": "assistant", "content": "two", "reasoning_content": "I think."}
    async with before("mistral", "groq") as apis:
        answer = await Caller(apis).ask(model, CHAT, {"messages": [USER, turn, USER]})
    assert answer.status == 200


async def test_tools_of_messages_go_over_responses_where_the_model_has_them_there_alone() -> None:
    async with before("openai") as apis:
        answer = await Caller(apis).ask("gpt-5.6-terra", MESSAGES, {**SAID, "tools": [BASH]})
    assert (answer.status, answer.exchanges[-1].dialect) == (200, "responses")


@pytest.mark.parametrize(
    ("model", "members"),
    [
        (OPUS, {"temperature": 0}),
        (HAIKU, {"temperature": 0.5, "top_p": 1}),
        (OPUS, {"reasoning_effort": "low", "temperature": 1}),
        (FABLE, {"reasoning_effort": "none"}),
    ],
    ids=str,
)
async def test_members_that_the_newer_claude_refuses_are_left_out(model: str, members: Json) -> None:
    async with before("anthropic") as apis:
        answer = await Caller(apis).ask(model, CHAT, {"messages": [USER], **members})
    assert (answer.status, [found.kind for each in answer.exchanges for found in each.violations]) == (200, [])


async def test_a_temperature_that_is_left_out_is_told() -> None:
    async with before("anthropic") as apis:
        answer = await Caller(apis).ask(HAIKU, CHAT, {"messages": [USER], "temperature": 0.2, "top_p": 0.5})
    assert answer.status == 200
    assert "top_p" in answer.headers.get("x-firsttoken-left-out", "")


# --------------------------------------------------------------------------- 8, 23: roles and order


async def test_leading_texts_of_system_and_developer_are_one_system_message() -> None:
    """Codex' request, before a template that takes one."""
    body = {"instructions": "You are Codex.", "input": [said_by("developer", "read only"), said_by("user", "hello")]}
    sent = await sent_to_a_chat_server(RESPONSES, body)
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]


async def test_a_later_system_message_of_messages_is_none_where_the_template_has_no_place_for_it() -> None:
    history = [
        USER,
        {"role": "assistant", "content": "two"},
        USER,
        {"role": "system", "content": "The folder changed."},
    ]
    async with before("dashscope") as apis:
        answer = await Caller(apis).ask("qwen3.8-max", MESSAGES, {"max_tokens": 900, "messages": history})
    assert answer.status == 200
    assert "The folder changed." in json.dumps(answer.sent)


@pytest.mark.parametrize("left", ["tool_choice", "parallel_tool_calls"])
async def test_members_of_tools_are_not_sent_without_tools(left: str) -> None:
    body = {"input": "hello", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    assert left not in await sent_to_a_chat_server(RESPONSES, body)


async def test_a_choice_of_a_tool_that_is_left_out_is_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {**SAID, "tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}}
    sent = await sent_to_a_chat_server(MESSAGES, body, route={"drop": ["tools.web_search_20250305"]})
    assert "tool_choice" not in sent


async def test_results_stand_directly_after_their_calls() -> None:
    """A message of the developer came between the outputs of two parallel calls."""
    items: list[Json] = [said_by("user", "hello")]
    items += [{"type": "function_call", "name": "search", "call_id": f"call_{n}", "arguments": "{}"} for n in (1, 2)]
    first, second = ({"type": "function_call_output", "call_id": f"call_{n}", "output": "done"} for n in (1, 2))
    items += [first, said_by("developer", "be quick"), second]
    sent = await sent_to_a_chat_server(RESPONSES, {"input": items, "tools": [SEARCH]})
    roles = [message["role"] for message in sent["messages"]]
    place = roles.index("assistant")
    assert roles[place : place + 3] == ["assistant", "tool", "tool"]


# --------------------------------------------------------------------------- 17, 18, 20: schemas, names and hints


async def test_a_schema_is_within_the_subset_of_the_server() -> None:
    """An open object, and a bound that Anthropic's structured answers do not have."""
    schema = {"type": "object", "properties": {"score": {"type": "number", "minimum": 0}}, "required": ["score"]}
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with before("anthropic") as apis:
        answer = await Caller(apis).ask(OPUS, CHAT, {"messages": [USER], "response_format": shape})
    assert (answer.status, [found.kind for each in answer.exchanges for found in each.violations]) == (200, [])


async def test_a_long_name_of_a_tool_fits_the_server_and_comes_back_whole() -> None:
    """81 characters, of which OpenAI takes 64."""
    tool = {**BASH, "name": LONG[:81]}
    async with before("openai") as apis:
        body = {**SAID, "tools": [tool], "tool_choice": {"type": "any"}}
        answer = await Caller(apis).ask("gpt-4.1", MESSAGES, body)
    assert answer.status == 200
    assert [block["name"] for block in answer.whole["content"] if block["type"] == "tool_use"] == [LONG[:81]]


@pytest.mark.parametrize(
    ("operation", "hint"),
    [
        (CHAT, {"service_tier": "flex"}),
        (CHAT, {"seed": 7}),
        (MESSAGES, {"speed": "slow"}),
        (MESSAGES, {"fallbacks": [{"model": "claude-opus-5"}]}),
        (MESSAGES, {"diagnostics": {"previous_message_id": None}}),
    ],
    ids=str,
)
async def test_a_hint_is_left_out_and_told(operation: Operation, hint: Json) -> None:
    api, model = ("anthropic", OPUS) if operation is CHAT else ("openai", "gpt-4.1")
    async with before(api) as apis:
        answer = await Caller(apis).ask(model, operation, {**SAID, **hint})
    assert answer.status == 200
    assert next(iter(hint)) in answer.headers.get("x-firsttoken-left-out", "")


@pytest.mark.parametrize(
    ("operation", "wish"), [(CHAT, {"service_tier": "fast"}), (MESSAGES, {"speed": "fast"})], ids=str
)
async def test_a_speed_is_asked_for_by_the_name_of_the_api_that_sells_it(operation: Operation, wish: Json) -> None:
    api, model = ("anthropic", OPUS) if operation is CHAT else ("openai", "gpt-4.1")
    async with before(api) as apis:
        answer = await Caller(apis).ask(model, operation, {**SAID, **wish})
    assert answer.status == 200
    assert "x-firsttoken-left-out" not in answer.headers


# ---------------------------------------------------------------------------


async def sent_to_a_chat_server(operation: Operation, body: Json, *, route: Json | None = None) -> Json:
    """The body that a server of chat completions gets."""
    routes = {"chat": {"tiers": ["only"], **(route or {})}}
    async with (
        Upstream([completion(content="two")]) as upstream,
        running({"only": pool(upstream.url)}, routes) as gateway,
    ):
        answer = await post(gateway.url, operation, {"model": "chat", **body})
    assert answer.status == 200, answer.data
    sent: Json = json.loads(upstream.requests[-1].body)
    return sent


def tool_result(identity: str, content: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": identity, "content": content}


@pytest.mark.parametrize("operation", [CHAT, MESSAGES])
async def test_a_stop_that_the_model_refuses_over_every_operation_is_left_out_and_told(operation: Operation) -> None:
    """Tools lead a reasoning model to Responses, which has no stop; over chat it refuses one too."""
    tool = SHELL if operation is CHAT else BASH
    name = "stop" if operation is CHAT else "stop_sequences"
    async with before("openai") as apis:
        answer = await Caller(apis).ask("gpt-6-luna", operation, {**SAID, "tools": [tool], name: ["END"]})
    assert answer.status == 200
    assert name in answer.headers.get("x-firsttoken-left-out", "")
