"""Requests as the servers get them, and answers as the callers do, over real sockets: reports of users of other
gateways, each a kind of request that a server refused for a member, a form or an order that the gateway had written."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from backends.translation.turn_state.seals import sealed
from tests.e2e.test_anthropic import ASKED, COMPLETION, MESSAGE, error, streamed, whole
from tests.support.dialect_strategies import Json
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SAID: Json = {**MESSAGE, "content": [{"type": "text", "text": "so"}], "stop_reason": "end_turn"}
RESPONSE: Json = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "served",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 9, "output_tokens": 1, "total_tokens": 10},
}
OBJECT: Json = {"type": "object", "properties": {"q": {"type": "string", "minLength": 1}}, "required": ["q"]}
LONG = "mcp__a_server_with_a_long_name__" + "x" * 49


class Exchange:
    """One request through a gateway with one route over pools, each with a server that plays its script."""

    def __init__(self, status: int, headers: Any, body: bytes, sent: list[list[tuple[str, Json]]]) -> None:
        self.status, self.headers, self.raw, self.sent = status, headers, body, sent

    @property
    def body(self) -> Json:
        found: Json = json.loads(self.raw)
        return found

    @property
    def got(self) -> Json:
        """The body that the last pool's server got last."""
        assert self.sent[-1], self.raw
        return self.sent[-1][-1][1]

    @property
    def told(self) -> set[str]:
        return set(self.headers.get("x-firsttoken-left-out", "").split(", ")) - {""}

    @property
    def events(self) -> list[Json]:
        lines = [line[6:] for line in self.raw.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


async def exchange(path: str, body: Json, *pools: tuple[Json, Script], **route: Any) -> Exchange:
    """`pools`: the section of each beside its URL, and what its server answers."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Upstream(*[script] * 3)) for _, script in pools]
        named = {
            f"p{number}": pool(server.url, prompt_caching="off", **section)
            for number, (server, (section, _)) in enumerate(zip(servers, pools, strict=True))
        }
        gateway = await stack.enter_async_context(running(named, {"r": {"tiers": list(named), **route}}))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(f"{gateway.url}{path}", json={"model": "r", **body}) as answer:
            read = await answer.read()
        sent = [[(each.target, json.loads(each.body)) for each in server.requests if each.body] for server in servers]
        return Exchange(answer.status, answer.headers, read, sent)


def claude(model: str, answer: Json = SAID) -> tuple[Json, Script]:
    return {"backend": "anthropic", "model": model, "api_key": "sk-own"}, whole(answer)


def chat(backend: str, model: str, answer: Json = COMPLETION, **section: Any) -> tuple[Json, Script]:
    keyed = {} if backend in ("compatible", "tgi", "ollama") else {"api_key": "sk-own"}
    return {"backend": backend, "model": model, **keyed, **section}, whole(answer)


def function(name: str = "f", schema: Json = OBJECT) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def calls(*calls: Json, **message: Any) -> Json:
    said = {"role": "assistant", "content": None, "tool_calls": list(calls), **message}
    return {**COMPLETION, "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}]}


def call(name: str = "f", identity: str = "call_1", arguments: str = "{}") -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(body: Json) -> str:
    return json.dumps(body)


# ------------------------------------------------------------------- what nothing is about

WRITTEN = (
    b'{"role" : "user", "content":"h\\u0069 \\/ <>"}',
    b'{"role":"assistant","content": null,"tool_calls":[{"id":"call_1", "type":"function",'
    b'"function":{"name":"f","arguments":"{ \\"q\\": 1.0 }"}}]}',
    b'{"tool_call_id":"call_1","role":"tool","content":"r"}',
)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("backend", "model"), [("openai", "gpt-4.1"), ("vllm", "qwen3"), ("compatible", "m")])
async def test_messages_that_no_fact_is_about_are_sent_as_they_were_written(
    backend: str, model: str, more: int
) -> None:
    """To the byte, on a route with one pool and on one with several, with tools beside them."""
    tools = json.dumps([function(schema={"type": "object", "properties": {}})])
    body = b'{"model":"r","tools":%b,"messages":[%b]}' % (tools.encode(), b",".join(WRITTEN))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Upstream(*[whole(COMPLETION)] * 3))
        section, _ = chat(backend, model)
        pools = {f"p{number}": pool(server.url, **section) for number in range(1 + more)}
        gateway = await stack.enter_async_context(running(pools, {"r": {"tiers": list(pools)}}))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(
            f"{gateway.url}{CHAT}", data=body, headers={"content-type": "application/json"}
        ) as answer:
            assert (answer.status, answer.headers.get("x-firsttoken-left-out")) == (200, None)
        [received] = [each.body for each in server.requests if each.body]
    assert b'"messages":[%b]' % b",".join(WRITTEN) in received
    assert tools.encode() in received


# ------------------------------------------------------------------- members that a model refuses (1, 5, 7)


@pytest.mark.parametrize("model", ["claude-opus-4-7", "claude-opus-5", "claude-sonnet-5"])
async def test_a_temperature_that_the_model_refuses_is_left_out_and_told(model: str) -> None:
    result = await exchange(CHAT, {"messages": ASKED, "temperature": 0}, claude(model))
    assert (result.status, "temperature" in result.got, result.told) == (200, False, {"temperature"})


async def test_of_a_temperature_and_a_top_p_one_is_sent_where_the_model_takes_one() -> None:
    both = {"messages": ASKED, "temperature": 0.5, "top_p": 1}
    result = await exchange(CHAT, both, claude("claude-opus-4-5"))
    assert (result.status, result.got["temperature"], "top_p" in result.got) == (200, 0.5, False)


async def test_a_temperature_beside_an_effort_is_told_where_it_is_left_out() -> None:
    asked = {"messages": ASKED, "temperature": 0.2, "reasoning_effort": "low"}
    result = await exchange(CHAT, asked, claude("claude-opus-4-5"))
    assert (result.status, "temperature" in result.got, result.told) == (200, False, {"temperature"})
    asked = {"messages": ASKED, "temperature": 1, "reasoning_effort": "low"}
    result = await exchange(CHAT, asked, claude("claude-opus-5"))
    assert (result.status, "temperature" in result.got, result.told) == (200, False, set())


async def test_thinking_that_cannot_be_switched_off_is_the_least() -> None:
    asked = {"messages": ASKED, "reasoning_effort": "none"}
    result = await exchange(CHAT, asked, claude("claude-fable-5"))
    assert result.got.get("thinking") != {"type": "disabled"}
    assert result.told


@pytest.mark.parametrize("backend", ["mistral", "groq"])
async def test_reasoning_in_a_history_is_left_out_where_the_server_refuses_the_member(backend: str) -> None:
    """A chat caller returns it as another provider wants; more of a message that this one does not know goes too."""
    turn = {"role": "assistant", "content": "a", "reasoning_content": "hm", "provider_specific_fields": {"x": 1}}
    history = [*ASKED, turn, *ASKED]
    down = (
        {"backend": "deepseek", "model": "deepseek-v4", "api_key": "k"},
        whole({"error": {"message": "no"}}, "503 No"),
    )
    result = await exchange(CHAT, {"messages": history}, down, chat(backend, "m-large"))
    assert result.status == 200
    assert result.got["messages"][1] == {"role": "assistant", "content": "a"}
    assert result.told == {"messages.reasoning_content", "messages.provider_specific_fields"}


async def test_what_a_pool_drops_is_told() -> None:
    asked = {"messages": ASKED, "temperature": 0, "top_p": 0.5}
    result = await exchange(CHAT, asked, chat("compatible", "m", drop=["temperature", "seed"]))
    assert ("temperature" in result.got, result.got["top_p"], result.told) == (False, 0.5, {"temperature"})


async def test_a_developer_is_the_system_where_the_pool_says_that_its_servers_know_none() -> None:
    """For chat callers too: a translated chat never has one."""
    turns = [{"role": "developer", "content": "d"}, *ASKED]
    result = await exchange(CHAT, {"messages": turns}, chat("compatible", "m", accepts={"developer": False}))
    assert [turn["role"] for turn in result.got["messages"]] == ["system", "user"]


async def test_a_speed_hint_is_left_out_and_told() -> None:
    result = await exchange(CHAT, {"messages": ASKED, "service_tier": "fast"}, claude("claude-opus-4-5"))
    assert (result.status, result.told) == (200, {"service_tier"})
    hints: Json = {"speed": "fast", "fallbacks": [{"model": "x"}], "diagnostics": {"a": 1}}
    asked = {"max_tokens": 9, "messages": ASKED, **hints}
    result = await exchange(MESSAGES, asked, chat("compatible", "m"))
    assert (result.status, result.told) == (200, set(hints))


async def test_hints_of_other_servers_are_left_out_and_told_and_an_effort_among_them_is_the_dialects() -> None:
    """Members of OpenRouter and of vLLM, from a chat caller whose route has a Claude."""
    hints: Json = {"provider": {"sort": "price"}, "transforms": [], "min_p": 0.1, "chat_template_kwargs": {}}
    asked = {"messages": ASKED, "reasoning": {"effort": "high"}, **hints}
    result = await exchange(CHAT, asked, claude("claude-opus-5"))
    assert (result.status, result.told) == (200, {"provider", "min_p"})
    assert result.got["output_config"] == {"effort": "high"}
    result = await exchange(CHAT, {"messages": ASKED, "enable_thinking": False}, claude("claude-opus-4-6"))
    assert (result.got["thinking"], result.told) == ({"type": "disabled"}, set())


# ------------------------------------------------------------------- reasoning that a model wants back (4)


@pytest.mark.parametrize("section", [{"model": "kimi-k3"}, {"model": "m", "reasoning": "returned"}])
async def test_reasoning_returns_within_a_tool_loop_to_a_server_that_wants_it(section: Json) -> None:
    """By the facts of the model, or by the pool's word."""
    first = calls(call(), reasoning_content="hm")
    reply = ({"backend": "compatible", **section}, whole(first))
    asked = {"max_tokens": 9, "messages": ASKED, "tools": [{"name": "f", "input_schema": OBJECT}]}
    begun = await exchange(MESSAGES, asked, reply)
    content = begun.body["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "r"}
    turns = [*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    again = await exchange(MESSAGES, {**asked, "messages": turns}, reply)
    assert again.status == 200
    assert again.got["messages"][1]["reasoning_content"] == "hm"


# ------------------------------------------------------------------- tools (2, 6, 11, 12, 18, 23)


async def test_tools_go_over_responses_where_the_model_takes_them_there_alone() -> None:
    asked = {"max_tokens": 99, "messages": ASKED, "tools": [{"name": "f", "input_schema": OBJECT}]}
    result = await exchange(MESSAGES, asked, chat("openai", "gpt-5.6", RESPONSE))
    assert (result.status, result.sent[-1][-1][0]) == (200, RESPONSES)
    assert result.body["content"][0]["text"] == "two"


async def test_a_custom_tool_is_a_function_of_one_text_where_the_server_knows_no_other() -> None:
    """The caller reads a custom call with the raw text."""
    tools: list[Json] = [{"type": "custom", "name": "apply_patch", "description": "Patch."}]
    answer = calls(call("apply_patch", arguments='{"input": "*** Begin\\n\\"x\\""}'))
    result = await exchange(RESPONSES, {"input": "hi", "tools": tools}, chat("deepseek", "deepseek-v4", answer))
    assert result.status == 200
    [tool] = result.got["tools"]
    assert (tool["type"], tool["function"]["parameters"]["required"]) == ("function", ["input"])
    [item] = result.body["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", '*** Begin\n"x"')
    history = [
        {"role": "user", "content": "hi"},
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"},
    ]
    result = await exchange(RESPONSES, {"input": history, "tools": tools}, chat("deepseek", "deepseek-v4"))
    [called] = result.got["messages"][1]["tool_calls"]
    assert (called["type"], json.loads(called["function"]["arguments"])) == ("function", {"input": '*** Begin\n"x"'})


async def test_a_custom_call_of_a_server_without_ids_has_an_id() -> None:
    """The result names it."""
    tools = [{"type": "custom", "custom": {"name": "run"}}]
    made = {"type": "function", "function": {"name": "run", "arguments": '{"input": "x"}'}}
    result = await exchange(CHAT, {"messages": ASKED, "tools": tools}, chat("compatible", "m", calls(made)))
    [called] = result.body["choices"][0]["message"]["tool_calls"]
    assert called["custom"] == {"name": "run", "input": "x"}
    assert called["id"]


NAMESPACE: Json = {
    "type": "namespace",
    "name": "mcp__web",
    "description": "d",
    "tools": [{"type": "function", "name": "search", "parameters": OBJECT}],
}
SHELL: Json = {"type": "function", "name": "shell", "parameters": OBJECT}


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_of_a_namespace_are_flattened_and_mapped_back(streams: bool) -> None:
    delta = {"role": "assistant", "tool_calls": [{"index": 0, **call("mcp__web__search")}]}
    events = [
        {"id": "1", "choices": [{"index": 0, "delta": delta}]},
        {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    script = streamed(*(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events), b"data: [DONE]\n\n")
    section, answer = chat("compatible", "m", calls(call("mcp__web__search")))
    asked = {"input": "hi", "tools": [SHELL, NAMESPACE], "stream": streams}
    result = await exchange(RESPONSES, asked, (section, script if streams else answer))
    assert [tool["function"]["name"] for tool in result.got["tools"]] == ["shell", "mcp__web__search"]
    response = result.events[-1]["response"] if streams else result.body
    [item] = response["output"]
    assert (item["name"], item["namespace"]) == ("search", "mcp__web")
    history = [
        {"role": "user", "content": "hi"},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "r"},
    ]
    again = await exchange(RESPONSES, {"input": history, "tools": [SHELL, NAMESPACE]}, chat("compatible", "m"))
    assert again.got["messages"][1]["tool_calls"][0]["function"]["name"] == "mcp__web__search"


async def test_a_tool_reference_and_a_search_of_the_provider_stay_as_text() -> None:
    turns = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "srv_1",
                    "content": [
                        {"type": "web_search_result", "title": "T", "url": "https://e.org", "encrypted_content": "zz"}
                    ],
                },
                {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "tool_reference", "tool_name": "f"}],
                }
            ],
        },
    ]
    tools = [
        {"name": "ToolSearch", "input_schema": OBJECT},
        {"name": "f", "input_schema": OBJECT, "defer_loading": True},
    ]
    result = await exchange(MESSAGES, {"max_tokens": 9, "messages": turns, "tools": tools}, chat("compatible", "m"))
    assert result.status == 200
    assert "f" in result.got["messages"][-1]["content"]
    assert "https://e.org" in said(result.got)


async def test_a_name_too_long_for_a_server_is_shortened_and_mapped_back() -> None:
    turns = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": LONG, "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}]},
    ]
    asked = {"max_tokens": 9, "messages": turns, "tools": [{"name": LONG, "input_schema": OBJECT}]}
    first = await exchange(MESSAGES, asked, chat("openai", "gpt-4.1"))
    name = first.got["tools"][0]["function"]["name"]
    assert len(name) <= 64
    assert first.got["messages"][1]["tool_calls"][0]["function"]["name"] == name
    answered = await exchange(MESSAGES, asked, chat("openai", "gpt-4.1", calls(call(name))))
    assert answered.body["content"][0]["name"] == LONG


async def test_members_that_lean_on_tools_go_with_them() -> None:
    asked: Json = {"input": "hi", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    result = await exchange(RESPONSES, asked, chat("compatible", "m"))
    assert {"tools", "tool_choice", "parallel_tool_calls"}.isdisjoint(result.got)
    searching: Json = {"type": "web_search_20250305", "name": "web_search"}
    asked = {
        "max_tokens": 9,
        "messages": ASKED,
        "tools": [searching],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }
    result = await exchange(
        MESSAGES, asked, chat("compatible", "m"), drop=["tools.web_search_20250305", "tools.web_search"]
    )
    assert {"tools", "tool_choice"}.isdisjoint(result.got)


async def test_results_follow_their_calls() -> None:
    """A developer's item between the outputs of two parallel calls moves behind them."""
    items = [
        {"role": "user", "content": "hi"},
        *({"type": "function_call", "call_id": f"c{n}", "name": "shell", "arguments": "{}"} for n in (1, 2)),
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"role": "developer", "content": "be quick"},
        {"type": "function_call_output", "call_id": "c2", "output": "r"},
    ]
    result = await exchange(RESPONSES, {"input": items, "tools": [SHELL]}, chat("compatible", "m"))
    assert [turn["role"] for turn in result.got["messages"]][:4] == ["user", "assistant", "tool", "tool"]


# ------------------------------------------------------------------- roles (8)


@pytest.mark.parametrize(("backend", "model"), [("compatible", "m"), ("tgi", "qwen3.5"), ("ollama", "qwen3.5")])
async def test_instructions_and_a_developers_item_are_one_system_message(backend: str, model: str) -> None:
    items = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "hi"}]
    result = await exchange(RESPONSES, {"instructions": "be", "input": items}, chat(backend, model))
    assert [turn["role"] for turn in result.got["messages"]] == ["system", "user"]
    assert "be" in said(result.got["messages"][0])
    assert "rules" in said(result.got["messages"][0])


async def test_a_later_system_message_joins_the_users_turn_where_one_may_stand_first_alone() -> None:
    turns = [*ASKED, {"role": "assistant", "content": "a"}, {"role": "system", "content": "now"}, *ASKED]
    result = await exchange(
        MESSAGES, {"max_tokens": 9, "system": "s", "messages": turns}, chat("compatible", "qwen3.5")
    )
    roles = [turn["role"] for turn in result.got["messages"]]
    assert roles.index("system") == 0
    assert roles.count("system") == 1
    assert "now" in said(result.got)


# ------------------------------------------------------------------- schemas (17)


async def test_a_schema_is_closed_and_its_bounds_are_told_in_words() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    result = await exchange(CHAT, {"messages": ASKED, "response_format": shape}, claude("claude-opus-4-5"))
    got = result.got["output_config"]["format"]["schema"]
    assert got["additionalProperties"] is False
    assert "minimum" not in got["properties"]["n"]
    assert "3" in got["properties"]["n"]["description"]


# ------------------------------------------------------------------- ends, ids, counts (9, 14, 16)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("end", ["insufficient_system_resource", "abort", "error"])
async def test_a_whole_answer_that_failed_is_asked_of_the_next_endpoint(path: str, end: str) -> None:
    failed = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "finish_reason": end}]}
    body: Json = {"input": "hi"} if path == RESPONSES else {"max_tokens": 9, "messages": ASKED}
    result = await exchange(path, body, chat("compatible", "a", failed), chat("compatible", "b"))
    assert (result.status, len(result.sent[0]), len(result.sent[1])) == (200, 1, 1)
    assert "two" in said(result.body)


@pytest.mark.parametrize("end", ["abort", "an_end_of_tomorrow"])
async def test_a_stream_with_an_end_that_is_not_good_ends_in_an_error_in_another_dialect(end: str) -> None:
    events = [
        {"id": "1", "choices": [{"index": 0, "delta": {"content": "two"}}]},
        {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
    ]
    first, last = (b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    script: Script = [STREAM_HEAD + chunk(first), Pause(0.05), chunk(last + b"data: [DONE]\n\n"), LAST_CHUNK]
    asked = {"max_tokens": 9, "messages": ASKED, "stream": True}
    result = await exchange(MESSAGES, asked, (chat("compatible", "a")[0], script))
    assert result.events[-1]["type"] == "error"
    assert "end_turn" not in result.raw.decode()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_end_that_nobody_knows_passes_untouched_in_its_own_dialect(streams: bool) -> None:
    answer = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "finish_reason": "an_end_of_tomorrow"}]}
    events = [
        {"id": "1", "choices": [{"index": 0, "delta": {"content": "two"}}]},
        {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "an_end_of_tomorrow"}]},
    ]
    written = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events] + [b"data: [DONE]\n\n"]
    section, script = chat("compatible", "a", answer)
    result = await exchange(
        CHAT, {"messages": ASKED, "stream": streams}, (section, streamed(*written) if streams else script)
    )
    assert result.raw == (b"".join(written) if streams else json.dumps(answer).encode())


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("identity", ["", None])
async def test_calls_without_ids_get_random_ones(path: str, identity: Any) -> None:
    tools: Json = {"tools": [SHELL]} if path == RESPONSES else {"tools": [{"name": "shell", "input_schema": OBJECT}]}
    body: Json = {"input": "hi"} if path == RESPONSES else {"max_tokens": 9, "messages": ASKED}
    answer = calls({**call("shell"), "id": identity})
    found = [await exchange(path, {**body, **tools}, chat("compatible", "m", answer)) for _ in range(2)]
    kind, member = ("output", "call_id") if path == RESPONSES else ("content", "id")
    ids = {each.body[kind][0][member] for each in found}
    assert len(ids) == 2
    assert all(len(each) >= 16 for each in ids)


async def test_the_start_of_a_message_has_the_estimate_of_its_prompt() -> None:
    events = [
        {"id": "1", "choices": [{"index": 0, "delta": {"content": "two"}}]},
        {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"id": "1", "choices": [], "usage": {"prompt_tokens": 1200, "completion_tokens": 1}},
    ]
    script = streamed(*(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events), b"data: [DONE]\n\n")
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "word " * 300}], "stream": True}
    result = await exchange(MESSAGES, asked, (chat("compatible", "a")[0], script))
    start, delta = result.events[0], next(each for each in result.events if each["type"] == "message_delta")
    assert 200 < start["message"]["usage"]["input_tokens"] < 600
    assert delta["usage"]["input_tokens"] == 1200


# ------------------------------------------------------------------- a session changes its model (19)


async def test_a_fallback_among_models_of_one_provider_gets_no_foreign_signature() -> None:
    """The first model is overloaded; the second gets the history without the first one's signature."""
    overloaded = {"backend": "anthropic", "model": "claude-opus-4-5", "api_key": "k"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "opus+signature/=="}
    signed = {**SAID, "content": [thought, {"type": "text", "text": "so"}]}
    async with (
        Upstream(whole(signed), *[whole(error("overloaded_error"), "529 Busy")] * 9) as opus,
        Upstream(whole(SAID)) as sonnet,
    ):
        pools = {
            "opus": pool(opus.url, **overloaded),
            "sonnet": pool(sonnet.url, **{**overloaded, "model": "claude-sonnet-4-5"}),
        }
        async with running(pools, {"r": {"tiers": ["opus", "sonnet"]}}) as gateway, aiohttp.ClientSession() as session:
            asked: Json = {"model": "r", "max_tokens": 9, "messages": ASKED}
            async with session.post(f"{gateway.url}{MESSAGES}", json=asked) as answer:
                content = (await answer.json())["content"]
            asked["messages"] = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
            async with session.post(f"{gateway.url}{MESSAGES}", json=asked) as answer:
                assert answer.status == 200
                assert answer.headers["x-firsttoken-pool"] == "sonnet"
    got = json.loads(sonnet.requests[-1].body)
    assert "signature" not in said(got)
    assert got["messages"][1]["content"] == [{"type": "text", "text": "so"}]


async def test_an_error_is_of_the_pool_that_wrote_it() -> None:
    busy = claude("claude-opus-4-5")[0], whole(error("overloaded_error"), "529 Busy")
    refusing = claude("claude-sonnet-4-5")[0], whole(error("invalid_request_error"), "400 Bad")
    result = await exchange(MESSAGES, {"max_tokens": 9, "messages": ASKED}, busy, refusing)
    assert (result.status, result.headers["x-firsttoken-pool"], result.headers["x-firsttoken-attempts"]) == (
        400,
        "p1",
        "2",
    )


# ------------------------------------------------------------------- a client's own line

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"


@pytest.mark.parametrize(
    "members", [{}, {"temperature": 0.5, "top_p": 0.5}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}]
)
@pytest.mark.parametrize("has_others", [False, True])
async def test_a_fitted_body_has_the_line_of_the_client_that_its_server_reads(members: Json, has_others: bool) -> None:
    """Whatever else is made to fit, and whatever state of other makers is left out: the server reads this line, other
    servers do not get it."""
    system = [{"type": "text", "text": LINE}, {"type": "text", "text": "be brief"}]
    asked: Json = {"max_tokens": 2000, "system": system, "messages": ASKED, **members}
    if has_others:
        thought = {"type": "thinking", "thinking": "hm", "signature": sealed("0" * 12, "other")}
        said_before = {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}]}
        asked["messages"] = [*ASKED, said_before, *ASKED]
    result = await exchange(MESSAGES, asked, claude("claude-opus-5"), claude("claude-sonnet-4-5"))
    [own] = [body for sent in result.sent for _, body in sent]
    assert own["system"] == system
    assert "0" * 12 not in said(own)
    asked_elsewhere = await exchange(MESSAGES, asked, chat("compatible", "m"))
    assert "cch=" not in said(asked_elsewhere.got)


# ------------------------------------------------------------------- explain (20)


async def test_explain_makes_the_checks_of_a_request() -> None:
    """A pool that cannot express the request is rejected by name, and what another would lose is told."""
    sections = {"a": {"backend": "anthropic", "model": "claude-opus-5"}, "b": {"backend": "openai", "model": "gpt-4.1"}}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Upstream(whole(COMPLETION)))
        pools = {name: pool(server.url, api_key="k", **section) for name, section in sections.items()}
        gateway = await stack.enter_async_context(running(pools, {"r": {"tiers": ["a", "b"]}}))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def explained(**members: Any) -> Json:
            asked = {"model": "r", "messages": ASKED, **members}
            async with session.post(f"{gateway.admin_url}/explain?path={CHAT}", json=asked) as answer:
                found: Json = await answer.json()
            return found

        refused = await explained(n=2)
        assert [each["reason"] for each in refused["rejected"]] == [
            "'n' cannot be expressed in the dialect of the backend"
        ]
        lost = await explained(temperature=0)
        assert lost["left_out"] == {"a": ["temperature"]}
        assert not server.requests


@pytest.mark.parametrize("more", [{}, {"store": True}])
async def test_items_go_over_chat_where_a_template_wants_an_order_of_turns(more: Json) -> None:
    """A server makes two turns of two items of one role. What the server stores stays in its dialect."""
    item = {"type": "message", "role": "user", "content": "hi"}
    pools = chat("vllm", "gemma-4-31b", RESPONSE if more else COMPLETION)
    result = await exchange(RESPONSES, {"input": [item, item], **more}, pools)
    [(path, body)] = result.sent[-1]
    assert path == (RESPONSES if more else CHAT)
    assert more or [turn["content"] for turn in body["messages"]] == ["hi\n\nhi"]


async def test_results_beside_a_text_go_over_chat_where_a_template_wants_an_order_of_turns() -> None:
    result_block = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [result_block, {"type": "text", "text": "go on"}]},
    ]
    result = await exchange(MESSAGES, {"max_tokens": 9, "messages": turns}, chat("vllm", "gemma-4-31b"))
    roles = [turn["role"] for turn in result.got["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
