"""The table of docs/dialects.md and the translations say the same of the newest members of clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.interface import Operation
from gateway.api.operation_fit import OperationFit, Servers
from tests.support import builders

Json = dict[str, Any]
PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"
ROW = re.compile(r"^\| (Messages|Responses|chat) \| `([^`]+)` \| (\w[\w ]*) \|(?: (\w[\w ]*) \|)?", re.MULTILINE)
SCHEMA: Json = {"type": "object", "properties": {}}
USER: Json = {"role": "user", "content": "hi"}
MESSAGES: Json = {"model": "m", "max_tokens": 9, "messages": [USER]}
MESSAGES_TOOL: Json = {"name": "f", "input_schema": SCHEMA}
RESPONSES: Json = {"model": "m", "input": [{"type": "message", **USER}]}
RESPONSES_TOOL: Json = {"type": "function", "name": "f", "parameters": SCHEMA}
CHAT: Json = {"model": "m", "messages": [USER]}
CHAT_TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PICTURE = "data:image/png;base64,aGk="


def messages(*blocks: Json, result: Any = None, **members: Any) -> Json:
    """A request with a turn of the assistant and, where there is one, the content of a tool's result."""
    turns = [USER, *([{"role": "assistant", "content": list(blocks)}] if blocks else []), USER]
    if result is not None:
        call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result}
        turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    return {**MESSAGES, "messages": turns, **members}


def responses(*items: Json, tools: Any = (), **members: Any) -> Json:
    offered = {"tools": [RESPONSES_TOOL, *tools]} if tools else {}
    return {**RESPONSES, "input": [*RESPONSES["input"], *items], **offered, **members}


def chat(*parts: Json, **members: Any) -> Json:
    return {**CHAT, "messages": [{"role": "user", "content": list(parts) or "hi"}], **members}


SEARCHED: Json = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
OF_MCP: Json = {"type": "mcp_tool_use", "id": "mcp_1", "name": "f", "server_name": "s", "input": {}}
FOUND: Json = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}
NAMESPACE: Json = {"type": "namespace", "name": "mcp__web", "tools": [RESPONSES_TOOL]}
PATCH: Json = {"type": "custom", "name": "apply_patch"}
SAMPLES: Mapping[str, Mapping[str, Json]] = {
    "Messages": {
        "speed": messages(speed="fast"),
        "fallbacks": messages(fallbacks=[{"model": "x"}]),
        "diagnostics": messages(diagnostics={"a": 1}),
        "service_tier: priority": messages(service_tier="priority"),
        "tools.defer_loading": messages(tools=[{**MESSAGES_TOOL, "defer_loading": True}]),
        "tools.web_search_20250305": messages(
            tools=[MESSAGES_TOOL, {"type": "web_search_20250305", "name": "web_search"}]
        ),
        "tools.tool_search_tool_regex_20251119": messages(
            tools=[MESSAGES_TOOL, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
        ),
        "content.tool_reference": messages(result=[{"type": "tool_reference", "tool_name": "f"}]),
        "content.server_tool_use": messages(SEARCHED),
        "content.mcp_tool_use": messages(OF_MCP),
        "content.search_result": messages(result=[FOUND]),
        "mcp_servers": messages(mcp_servers=[{"type": "url", "url": "https://e.org", "name": "s"}]),
        "container": messages(container="c"),
    },
    "Responses": {
        "tools.namespace": responses(tools=[NAMESPACE]),
        "tools.custom": responses(tools=[PATCH]),
        "tools.web_search": responses(tools=[{"type": "web_search"}]),
        "tools.tool_search": responses(tools=[{"type": "tool_search"}]),
        "tools.image_generation": responses(tools=[{"type": "image_generation"}]),
        "tools.defer_loading": responses(tools=[{**RESPONSES_TOOL, "name": "g", "defer_loading": True}]),
        "input.function_call.namespace": responses(
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "mcp__web", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            tools=[NAMESPACE],
        ),
        "input.web_search_call": responses(
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}
        ),
        "input.tool_search_call": responses(
            {"type": "tool_search_call", "id": "t", "call_id": "c", "status": "completed", "arguments": {"q": "x"}}
        ),
        "input.item_reference": responses({"type": "item_reference", "id": "msg_1"}),
        "input.compaction": responses({"type": "compaction", "encrypted_content": "zz"}),
        "input_image.detail: original": responses(
            {**USER, "content": [{"type": "input_image", "image_url": PICTURE, "detail": "original"}]}
        ),
        "client_metadata": responses(client_metadata={"a": "b"}),
        "previous_response_id": responses(previous_response_id="resp_1"),
    },
    "chat": {
        "service_tier: fast": chat(service_tier="fast"),
        "service_tier: flex": chat(service_tier="flex"),
        "prompt_cache_key": chat(prompt_cache_key="k"),
        "safety_identifier": chat(safety_identifier="u"),
        "verbosity": chat(verbosity="low"),
        "seed": chat(seed=7),
        "tools.custom": chat(tools=[{"type": "custom", "custom": {"name": "apply_patch"}}]),
        "image_url.detail: original": chat(
            {"type": "image_url", "image_url": {"url": PICTURE, "detail": "original"}}, {"type": "text", "text": "x"}
        ),
        "web_search_options": chat(web_search_options={}),
    },
}
OPERATIONS = {"Messages": Operation.MESSAGES, "Responses": Operation.RESPONSES, "chat": Operation.CHAT}


ELSEWHERE = {
    "Messages": [Operation.CHAT],
    "Responses": [Operation.CHAT],
    "chat": [Operation.MESSAGES, Operation.RESPONSES],
}
ROUTE = builders.route(tiers=["p"])


def outcomes(dialect: str, body: Json) -> tuple[str, ...]:
    return tuple(outcome(OPERATIONS[dialect], spoken, body) for spoken in ELSEWHERE[dialect])


def outcome(operation: Operation, spoken: Operation, body: Json) -> str:
    """At servers that speak another dialect: `taken`, `left out` and told, or `refused` by name."""
    request = builders.request(input="x")
    request.operation, request.body = operation, body
    OperationFit().fit(request, ROUTE, Servers({"p": frozenset({spoken})}))
    if request.unfit:
        return "refused"
    return "left out" if request.translated["p"].left_out else "taken"


def written() -> dict[tuple[str, str], tuple[str, ...]]:
    found = ROW.findall(PAGE.read_text("utf-8"))
    return {(dialect, member): tuple(filter(None, said)) for dialect, member, *said in found}


@pytest.mark.parametrize(
    ("dialect", "member"), [(dialect, member) for dialect, samples in SAMPLES.items() for member in samples]
)
def test_the_page_says_what_becomes_of_a_member(dialect: str, member: str) -> None:
    """Of a chat: over Messages, then over Responses; of the others: over chat."""
    assert written()[dialect, member] == outcomes(dialect, SAMPLES[dialect][member])


def test_every_row_of_the_page_is_held_by_a_sample() -> None:
    assert written().keys() == {(dialect, member) for dialect, samples in SAMPLES.items() for member in samples}
