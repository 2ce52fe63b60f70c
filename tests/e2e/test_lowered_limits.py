"""Output limits of callers beside long prompts, before engines that refuse one token too many."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from gateway.tokenize.tokenizers import encoder
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

WINDOW = 32_768  # of the profile 8b-l4
LONG = "prose with words of a usual length, and a number such as 1234. " * 800  # about 12,800 tokens
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("max_completion_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "chat, old name": ("max_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "completions": ("max_tokens", {"prompt": LONG}),
    "responses": ("max_output_tokens", {"input": LONG, "store": False}),
    "messages": ("max_tokens", {"messages": [{"role": "user", "content": LONG}]}),
}
PATHS = {"chat": "chat/completions", "chat, old name": "chat/completions"}
HEADER = "x-firsttoken-max-tokens"
JSON = "content-type: application/json"


async def post(url: str, dialect: str, **body: Any) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    asked = {"model": "chat", **body}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/{PATHS.get(dialect, dialect)}", json=asked) as reply,
    ):
        return reply.status, reply.headers, await reply.json()


@pytest.mark.parametrize("dialect", ASKED)
async def test_a_limit_beyond_the_context_window_is_lowered_to_what_fits(dialect: str) -> None:
    """The first request of a fresh gateway too, which knows nothing of the engine's tokenizer."""
    limit, body = ASKED[dialect]
    async with (
        engines(1, "8b-l4") as only,
        running({"only": engine_pool(*only, context_window=WINDOW)}) as gateway,
    ):
        status, headers, reply = await post(gateway.url, dialect, **body, **{limit: 32_000})
        assert status == 200, reply
        record = gateway.recorder.recent[-1]
        lowered = int(headers[HEADER])
        assert 10_000 < lowered <= WINDOW - (record.answer.prompt_tokens or 0)
        assert (record.asked.max_tokens, record.placed.max_tokens) == (32_000, lowered)
        _, headers, _ = await post(gateway.url, dialect, **body, **{limit: 32_000})
        assert int(headers[HEADER]) > lowered + 1_000  # a report has taught the engine's count
        _, headers, _ = await post(gateway.url, dialect, **body, **{limit: 4_000})
        assert HEADER not in headers


async def test_the_first_request_fits_an_engine_whose_tokenizer_the_gateway_does_not_know() -> None:
    """A refusal teaches no tokenizer: it would come again and again."""
    known = encoder("o200k_base").encode
    counts_more = {
        "encode": lambda text: [token for i, token in enumerate(known(text)) for _ in range(1 + (i % 5 == 0))]
    }
    asked = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 32_000}
    async with (
        engines(1, "8b-l4", **counts_more) as only,
        running({"only": engine_pool(*only, context_window=WINDOW)}) as gateway,
    ):
        for _ in range(3):
            status, _, reply = await post(gateway.url, "chat", **asked)
            assert status == 200, reply
        record = gateway.recorder.recent[0]
    assert (record.answer.prompt_tokens or 0) > 1.1 * (record.placed.prompt_tokens or 0)


async def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_in_words_that_agents_know() -> None:
    """Claude Code reads both numbers of Anthropic's sentence, and compacts the conversation; others read the code."""
    asked = {"messages": [{"role": "user", "content": LONG * 3}], "max_tokens": 32_000}
    async with (
        engines(1, "8b-l4") as only,
        running({"only": engine_pool(*only, context_window=WINDOW)}) as gateway,
    ):
        status, _, reply = await post(gateway.url, "messages", **asked)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        numbers = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", reply["error"]["message"])
        assert numbers is not None
        assert int(numbers[1]) > int(numbers[2]) == WINDOW - 1024
        status, _, reply = await post(gateway.url, "chat", **asked)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert not only[0].requests


@pytest.mark.parametrize("backend", ["vllm", "compatible"])
async def test_the_tokens_of_a_prompt_beyond_the_context_window_are_counted(backend: str) -> None:
    """An agent asks how much it has to leave out. vLLM counts too, and is not asked for what it cannot take."""
    asked = {"messages": [{"role": "user", "content": LONG * 3}]}
    only = {"backend": backend, "model": "served", "endpoints": ["http://127.0.0.1:1"], "context_window": WINDOW}
    async with running({"only": only}) as gateway:
        status, _, reply = await post(gateway.url, "messages/count_tokens", **asked)
    assert status == 200, reply
    assert reply["input_tokens"] > WINDOW


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_caller_without_a_limit_gets_what_fits_of_an_engine_that_speaks_messages_alone(dialect: str) -> None:
    """Messages require a limit, and the default of 32,000 does not fit beside a prompt."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}], "id": "msg_1"}
    said = json.dumps({**message, "stop_reason": "end_turn", "usage": {"input_tokens": 9, "output_tokens": 1}})
    async with Upstream([reply(said.encode(), "200 OK", "content-type: application/json")]) as engine:
        only = {"backend": "anthropic", "model": "m", "api_key": "sk-engine", "base_url": engine.url}
        sent = []
        for window in (WINDOW, None):
            async with running({"only": {**only, **({"context_window": window} if window else {})}}) as gateway:
                status, headers, answer = await post(gateway.url, dialect, **ASKED[dialect][1])
            assert status == 200, answer
            sent.append((json.loads(engine.requests[-1].body)["max_tokens"], HEADER in headers))
    (fits, told), unknown = sent
    assert (10_000 < fits < WINDOW - 12_000, told, unknown) == (True, True, (32_000, False))


@pytest.mark.parametrize("dialect", ["chat", "chat, old name", "completions"])
@pytest.mark.parametrize("backend", ["vllm", "sglang", "compatible"])
async def test_the_least_number_of_tokens_follows_the_limit_down(backend: str, dialect: str) -> None:
    """An engine would refuse the caller by a number that the caller has never sent."""
    limit, body = ASKED[dialect]
    async with Upstream([reply(b"{}", "200 OK", JSON)]) as engine:
        pools = {"only": pool(engine.url, backend=backend)}
        routes = {"chat": {"tiers": ["only"], "limits": {"output_tokens": 1024}, "upstream_stream": "off"}}
        async with running(pools, routes) as gateway:
            for least in (2000, 2000.0, 7):
                await post(gateway.url, dialect, **body, **{limit: 3000}, min_tokens=least)
        sent = [
            json.loads(each.body) for each in engine.requests if each.method == "POST" and b"min_tokens" in each.body
        ]
    assert [each["min_tokens"] for each in sent] == [1024, 1024, 7]
    assert all(1024 in (each.get("max_tokens"), each.get("max_completion_tokens")) for each in sent)


@pytest.mark.parametrize(
    ("cap", "asked", "thinking", "told"),
    [
        (1024, 16_000, {"type": "disabled"}, ("1024", "thinking")),
        (4096, 16_000, {"type": "enabled", "budget_tokens": 4095}, ("4096", None)),
        (32_000, 16_000, {"type": "enabled", "budget_tokens": 8000}, (None, None)),
    ],
)
@pytest.mark.parametrize("backend", ["anthropic", "vllm"])
async def test_thinking_that_a_routes_limit_lowers_or_leaves_no_room_for_is_told(
    backend: str, cap: int, asked: int, thinking: dict[str, Any], told: tuple[str | None, str | None]
) -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}], "usage": {}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": asked}
    async with Upstream([reply(json.dumps({**message, "stop_reason": "end_turn"}).encode(), "200 OK", JSON)]) as server:
        pools = {"only": pool(server.url, backend=backend)}
        routes = {"chat": {"tiers": ["only"], "limits": {"output_tokens": cap}, "upstream_stream": "off"}}
        async with running(pools, routes) as gateway:
            enabled = {"type": "enabled", "budget_tokens": 8000}
            status, headers, _ = await post(gateway.url, "messages", **body, thinking=enabled)
        [sent] = [json.loads(each.body) for each in server.requests if each.target.startswith("/v1/messages")]
    assert (status, sent["thinking"]) == (200, thinking)
    assert (headers.get(HEADER), headers.get("x-firsttoken-left-out")) == told
