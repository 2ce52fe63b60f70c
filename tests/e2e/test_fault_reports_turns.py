"""Reports of what gateways lose or invent between two turns: state of a provider, ids of calls, ends, counts.

The numbers are those of the reports. Fakes sign their turns, and verify what comes back bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from backends.interface import Operation
from tests.programs.field.caller_checks import read
from tests.support.fault_reports import SHELL_SCHEMA, USER, Asked, Caller, Json, before, completion, events, post
from tests.support.gateways import pool, running
from tests.support.upstream import Script, Upstream

CHAT, MESSAGES, RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
BASH: Json = {"name": "Bash", "description": "Runs", "input_schema": SHELL_SCHEMA}
SHELL: Json = {"type": "function", "name": "shell", "parameters": SHELL_SCHEMA}
AGENT: Json = {"max_tokens": 9000, "tools": [BASH]}
KIMI, GEMINI, OPUS, SONNET = "kimi-k3", "gemini-3.8-flash", "claude-opus-5", "claude-sonnet-5-5"
OPENROUTER = "anthropic/claude-opus-5.5"


def kinds(answer: Asked) -> list[str]:
    return [found.kind for each in answer.exchanges for found in each.violations]


# --------------------------------------------------------------------------- 3, 4, 19: state of a provider


async def second_turn_of_messages(caller: Caller, first: str, second: str, **more: Any) -> Asked:
    """The answer of a second model to the results of the calls of a first."""
    body = {**AGENT, **more, "messages": [USER]}
    answer = await caller.ask(first, MESSAGES, {**body, "tool_choice": {"type": "any"}})
    assert answer.status == 200, answer.data
    content = answer.whole["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
        for block in content
        if block["type"] == "tool_use"
    ]
    turn = [{"role": "assistant", "content": content}, {"role": "user", "content": results or "go on"}]
    return await caller.ask(second, MESSAGES, {**body, "messages": [USER, *turn]})


@pytest.mark.parametrize("model", [KIMI, GEMINI, "deepseek-flash"])
async def test_state_of_a_call_comes_back_from_a_caller_of_messages(model: str) -> None:
    async with before("moonshot", "gemini", "deepseek") as apis:
        answer = await second_turn_of_messages(Caller(apis), model, model, thinking={"type": "disabled"})
    assert (answer.status, kinds(answer), answer.exchanges[-1].lost) == (200, [], [])


@pytest.mark.parametrize("model", [KIMI, GEMINI])
async def test_state_of_a_call_comes_back_from_a_caller_of_responses(model: str) -> None:
    body: Json = {"tools": [SHELL], "store": False}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    async with before("moonshot", "gemini") as apis:
        caller = Caller(apis)
        first = await caller.ask(model, RESPONSES, {**body, "input": [user], "tool_choice": "required"})
        assert first.status == 200, first.data
        items = first.whole["output"]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
            for item in items
            if item["type"] == "function_call"
        ]
        answer = await caller.ask(model, RESPONSES, {**body, "input": [user, *items, *outputs]})
    assert (answer.status, kinds(answer), answer.exchanges[-1].lost) == (200, [], [])


async def test_state_of_one_provider_goes_to_no_other() -> None:
    """A thinking block that OpenRouter's provider has signed."""
    async with before("openrouter", "anthropic") as apis:
        caller, body = Caller(apis), {"max_tokens": 9000}
        first = await caller.ask(OPENROUTER, MESSAGES, {**body, "messages": [USER]})
        turn = {"role": "assistant", "content": first.whole["content"]}
        answer = await caller.ask(OPUS, MESSAGES, {**body, "messages": [USER, turn, USER]})
    assert (answer.status, kinds(answer)) == (200, [])


async def test_a_session_may_change_its_claude_model() -> None:
    """And goes back to the first with the state of its own turn."""
    async with before("anthropic") as apis:
        caller, body = Caller(apis), {"max_tokens": 9000}
        first = await caller.ask(OPUS, MESSAGES, {**body, "messages": [USER]})
        history = [USER, {"role": "assistant", "content": first.whole["content"]}, USER]
        moved = await caller.ask(SONNET, MESSAGES, {**body, "messages": history})
        assert (moved.status, kinds(moved)) == (200, [])
        history += [{"role": "assistant", "content": moved.whole["content"]}, USER]
        back = await caller.ask(OPUS, MESSAGES, {**body, "messages": history})
    assert (back.status, kinds(back), back.exchanges[-1].lost) == (200, [], [])


# --------------------------------------------------------------------------- 9, 14, 16: ends, ids and counts


async def answered(*scripts: Script, operation: Operation = MESSAGES, stream: bool, turns: int = 1) -> list[Json]:
    """Answers of a chat server as the caller reads them, of one session where there are several."""
    found = []
    body: Json = {"max_tokens": 900, "messages": [USER], "tools": [BASH]}
    if operation is RESPONSES:
        body = {"input": "hello", "tools": [SHELL]}
    async with (
        Upstream(*scripts) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
    ):
        for _ in range(turns):
            answer = await post(gateway.url, operation, {"model": "chat", **body, "stream": stream})
            found.append(read(operation.name.lower(), answer.data, stream=stream))
            if turns > 1:
                body["messages"] = [*body["messages"], *_turn(found[-1]["content"])]
    return found


def _turn(content: list[Json]) -> list[Json]:
    """A turn of the assistant, and the results of its calls."""
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "done"} for each in content]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["insufficient_system_resource", "abort", "error"])
@pytest.mark.parametrize("operation", [MESSAGES, RESPONSES])
async def test_an_unknown_end_is_no_success(end: str, stream: bool, operation: Operation) -> None:
    """No answer at all, an error event, or an answer that says so."""
    script: Script = events({"content": "half"}, end=end) if stream else [completion(content="half", finish_reason=end)]
    try:
        answer = (await answered(script, operation=operation, stream=stream))[0]
    except (ValueError, KeyError):
        return
    assert answer.get("stop_reason", answer.get("status")) not in ("end_turn", "completed")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("identity", ["", None, "call_0"])
async def test_ids_of_calls_are_unique_in_a_session(identity: str | None, stream: bool) -> None:
    function = {"name": "Bash", "arguments": "{}"}
    call: Json = {"type": "function", "function": function} | ({} if identity is None else {"id": identity})
    script: Script = [completion(tool_calls=[call])]
    if stream:
        script = events({"tool_calls": [{"index": 0, **call}]}, end="tool_calls")
    answers = await answered(script, stream=stream, turns=3)
    ids = [block["id"] for answer in answers for block in answer["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 3


async def test_a_message_begins_with_an_estimate_of_its_input() -> None:
    answer = (await answered(events({"content": "two"}), stream=True))[0]
    assert answer["started_with"] > 0


# --------------------------------------------------------------------------- 20: explain


async def test_explain_says_what_a_request_would_meet() -> None:
    """A request that no tier can express is not placed by `explain` either."""
    body = {"model": "chat", "messages": [USER], "n": 2}
    async with (
        Upstream([completion(content="two")]) as upstream,
        running({"only": pool(upstream.url, backend="anthropic")}) as gateway,
    ):
        refused = await post(gateway.url, CHAT, body)
        explained = await post_explain(gateway.admin_url, body)
    assert refused.status == 400
    assert "'n'" in json.dumps(explained)


async def post_explain(admin: str, body: Json) -> Json:
    async with aiohttp.ClientSession() as session, session.post(f"{admin}/explain", json=body) as answer:
        found: Json = await answer.json(content_type=None)
    return found
