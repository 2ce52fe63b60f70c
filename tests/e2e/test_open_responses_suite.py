"""The cases of Open Responses' own suite (openresponses.org, version 2026-04-24), by the names that they have there.

Each is run on three routes: to servers that speak Responses, chat completions, and Anthropic's Messages. The case
`response-output-phase-schema` sends no request. The suite itself, run against these routes with bun, is not kept here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.programs.clients.rehearsed_server import RehearsedServer
from tests.support.dialogues import Json
from tests.support.gateways import pool, running
from tests.support.open_responses import faults
from tests.support.responses_server import ResponsesServer
from tests.support.sockets import SocketCaller

ROUTES = ("native", "chat", "anthropic")
TOOL: Json = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAP8AAP8AACwAAAAAAQABAAACAkQBADs="


def said(role: str, content: Any, **more: str) -> Json:
    return {"type": "message", "role": role, "content": content, **more}


def text(of: str, kind: str = "input_text") -> list[Json]:
    return [{"type": kind, "text": of}]


@asynccontextmanager
async def session(**more: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A caller of a gateway with the three routes."""
    rehearsed = RehearsedServer()
    await rehearsed.start()
    async with ResponsesServer("s") as native:
        pools = {
            "native": pool(native.url, backend="openai"),
            "chat": pool(rehearsed.url),
            "anthropic": pool(rehearsed.url, backend="anthropic"),
        }
        routes = {name: {"tiers": [name]} for name in ROUTES}
        async with running(pools, routes, **more) as gateway, aiohttp.ClientSession(gateway.url) as caller:
            yield caller
    await rehearsed.stop()


async def ask(caller: aiohttp.ClientSession, body: Json, path: str = "") -> tuple[int, Any]:
    async with caller.post(f"/v1/responses{path}", json=body) as reply:
        return reply.status, await reply.json()


CASES: Mapping[str, Json] = {
    "basic-response": {"input": [said("user", "Say hello.")]},
    "assistant-phase": {
        "input": [
            said("assistant", "I look for the number.", phase="commentary"),
            said("assistant", "The number is four.", phase="final_answer"),
            said("user", "Say it again."),
        ]
    },
    "system-prompt": {"input": [said("system", "You are a pirate."), said("user", "Say hello.")]},
    "image-input": {"input": [said("user", [*text("What is this?"), {"type": "input_image", "image_url": PIXEL}])]},
    "multi-turn": {"input": [said("user", "I am Ann."), said("assistant", "Hello!"), said("user", "Who am I?")]},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
async def test_a_whole_response_is_complete_and_has_every_required_member(case: str, route: str) -> None:
    async with session() as caller:
        status, response = await ask(caller, {"model": route, **CASES[case]})
    assert (status, response["status"], faults(response)) == (200, "completed", [])
    assert response["output"][-1]["content"][0]["text"]


@pytest.mark.parametrize("route", ROUTES)
async def test_tool_calling(route: str) -> None:
    body = {"model": route, "input": [said("user", "What is the weather in Paris?")], "tools": [TOOL]}
    async with session() as caller:
        status, response = await ask(caller, body)
    assert (status, faults(response)) == (200, [])
    assert route == "native" or [item["type"] for item in response["output"]] == ["function_call"]


@pytest.mark.parametrize("route", ROUTES)
async def test_streaming_response(route: str) -> None:
    body = {"model": route, "input": [said("user", "Count from 1 to 5.")], "stream": True}
    async with session() as caller, caller.post("/v1/responses", json=body) as reply:
        events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
    assert events[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [faults(event["response"]) for event in events if "response" in event] == [[], [], []]


# ------------------------------------------------------------------- compact, input_tokens

HISTORY = [said("user", "We start on Tuesday."), said("assistant", "On Tuesday, then.")]


async def test_compact_response() -> None:
    """Passed on to a server that compacts; what comes back is accepted as input, by the same server alone."""
    async with session() as caller:
        status, found = await ask(caller, {"model": "native", "input": HISTORY, "prompt_cache_key": "k"}, "/compact")
        again, response = await ask(caller, {"model": "native", "input": [*found["output"], said("user", "Go on.")]})
    assert (status, found["object"], [item["type"] for item in found["output"]]) == (
        200,
        "response.compaction",
        ["compaction"],
    )
    assert (again, response["status"]) == (200, "completed")


@pytest.mark.parametrize("route", ["chat", "anthropic"])
async def test_compaction_is_refused_by_name_where_no_server_compacts(route: str) -> None:
    async with session() as caller:
        status, found = await ask(caller, {"model": route, "input": HISTORY}, "/compact")
    assert (status, found["error"]["code"]) == (400, "no_suitable_tier")
    assert "do not serve /v1/responses/compact" in found["error"]["message"]


async def test_compact_missing_model() -> None:
    async with session() as caller:
        status, found = await ask(caller, {"input": HISTORY}, "/compact")
    assert (status, found["error"]["param"]) == (400, "model")


async def test_the_tokens_of_an_input_are_counted_by_the_server_or_by_the_gateway() -> None:
    async with session() as caller:
        native = await ask(caller, {"model": "native", "input": HISTORY}, "/input_tokens")
        status, own = await ask(caller, {"model": "chat", "input": HISTORY, "stream": True}, "/input_tokens")
        _, longer = await ask(caller, {"model": "chat", "input": HISTORY * 9}, "/input_tokens")
    assert native == (200, {"object": "response.input_tokens", "input_tokens": 14})
    assert (status, own["object"]) == (200, "response.input_tokens")
    assert 0 < own["input_tokens"] < longer["input_tokens"]


# ------------------------------------------------------------------- WebSocket


@asynccontextmanager
async def socket(caller: aiohttp.ClientSession) -> AsyncIterator[SocketCaller]:
    async with caller.ws_connect("/v1/responses") as opened:
        yield SocketCaller(opened)


@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_response(route: str) -> None:
    """The same events as over HTTP, a message each, with nothing after the last."""
    body = {"model": route, "input": [said("user", "Count from 1 to 3.")]}
    async with session() as caller, socket(caller) as ws:
        await ws.send(**body)
        events = await ws.events()
        async with caller.post("/v1/responses", json={**body, "stream": True}) as reply:
            streamed = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
    assert [event["type"] for event in events] == [event["type"] for event in streamed]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [faults(event["response"]) for event in events if "response" in event] == [[], [], []]


@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_sequential_responses(route: str) -> None:
    """Two messages at once are answered one after the other."""
    async with session() as caller, socket(caller) as ws:
        for _ in range(2):
            await ws.send(model=route, store=False, input="Hello.")
        first, second = await ws.events(), await ws.events()
    assert [turn[-1]["type"] for turn in (first, second)] == ["response.completed"] * 2
    assert [turn[0]["type"] for turn in (first, second)] == ["response.created"] * 2


@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_continuation(route: str) -> None:
    async with session() as caller, socket(caller) as ws:
        first = await ws.ask(model=route, store=False, input="The word is cobalt.")
        again: Json = {"store": False, "previous_response_id": first["response"]["id"]}
        second = await ws.ask(model=route, input="What is the word?", **again)
    assert (second["type"], faults(second["response"])) == ("response.completed", [])


@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_reconnect_store_false_recovery(route: str) -> None:
    async with session() as caller:
        async with socket(caller) as ws:
            first = await ws.ask(model=route, store=False, input="Hello.")
        async with socket(caller) as ws:
            again: Json = {"store": False, "previous_response_id": first["response"]["id"]}
            lost = await ws.ask(model=route, input="Go on.", **again)
            found = await ws.ask(model=route, store=False, input="Start anew.")
    assert (lost["type"], lost["status"], lost["error"]["code"]) == ("error", 400, "previous_response_not_found")
    assert found["type"] == "response.completed"


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_previous_response_not_found(route: str, stores: bool) -> None:
    async with session() as caller, socket(caller) as ws:
        lost = await ws.ask(model=route, store=stores, previous_response_id="resp_unknown", input="Go on.")
    assert (lost["type"], lost["error"]["code"]) == ("error", "previous_response_not_found")


@pytest.mark.parametrize("route", ROUTES)
async def test_websocket_failed_continuation_evicts_cache(route: str) -> None:
    output = {"type": "function_call_output", "call_id": "call_missing", "output": "42"}
    async with session() as caller, socket(caller) as ws:
        first = await ws.ask(model=route, store=False, input="Hello.")
        again: Json = {"model": route, "store": False, "previous_response_id": first["response"]["id"]}
        failed = await ws.ask(input=[output], **again)
        lost = await ws.ask(input="Go on.", **again)
    assert (failed["type"], failed["status"], failed["error"]["param"]) == ("error", 400, "input")
    assert lost["error"]["code"] == "previous_response_not_found"


async def test_websocket_compact_new_chain() -> None:
    async with session() as caller, socket(caller) as ws:
        _, found = await ask(caller, {"model": "native", "input": HISTORY}, "/compact")
        items = [*found["output"], said("user", "Go on.")]
        last = await ws.ask(model="native", store=False, input=items, tools=[])
    assert (last["type"], faults(last["response"])) == ("response.completed", [])
