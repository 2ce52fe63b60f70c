"""What passes through unchanged, and what is put into OpenAI's terms, against a real vLLM and with the real SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.vllm.fleet import Gateway, Server, series
from tests.vllm.traffic import Asked, ask, client, text, user

HELLO: Any = [user("Say hello to the world.")]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
# Under this seed the random weights close the call's JSON after 59 tokens; others may wander through blanks for long.
TOOL_CALL: dict[str, Any] = {
    "messages": [user("Light on please.")],
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 400,
    "seed": 5,
}


@pytest.fixture
async def sdk(pair: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with client(pair.base_url) as sdk:
        yield sdk


@pytest.fixture
async def direct(engines: list[Server]) -> AsyncIterator[AsyncOpenAI]:
    """The same SDK, past the gateway."""
    async with client(f"{engines[0].url}/v1") as sdk:
        yield sdk


async def test_text_is_what_the_engine_wrote(sdk: AsyncOpenAI, direct: AsyncOpenAI) -> None:
    """The same seed gives the same tokens on either way, streamed or not."""
    asked = Asked("short", "", HELLO, 40, repeats=False)
    streamed = (await ask(sdk, "chat", asked, seed=7)).text
    whole = await sdk.chat.completions.create(model="chat", messages=HELLO, max_tokens=40, seed=7)
    expected = (await ask(direct, "small", asked, seed=7)).text
    assert [expected, expected] == [streamed, whole.choices[0].message.content]


async def test_a_tool_call_passes_through(sdk: AsyncOpenAI, direct: AsyncOpenAI) -> None:
    """Name and arguments as the engine gave them."""
    expected = await direct.chat.completions.create(model="small", **TOOL_CALL)
    actual = await sdk.chat.completions.create(model="chat", **TOOL_CALL)
    assert [(c.function.name, c.function.arguments) for c in expected.choices[0].message.tool_calls or []] == [
        (c.function.name, c.function.arguments) for c in actual.choices[0].message.tool_calls or []
    ]
    assert actual.choices[0].finish_reason == "tool_calls"


async def test_a_streamed_tool_call_passes_through(sdk: AsyncOpenAI) -> None:
    """Its deltas join to arguments that fit the tool's schema."""
    name, arguments = "", ""
    async for chunk in await sdk.chat.completions.create(model="chat", stream=True, **TOOL_CALL):
        for delta in (choice.delta for choice in chunk.choices):
            for call in delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "set_light"
    assert json.loads(arguments)["on"] in (True, False)


async def test_a_tool_call_is_a_first_token(sdk: AsyncOpenAI, pair: Gateway) -> None:
    """TTFT ends at the first tool call delta, which holds no content: the arguments stream after it."""
    raw = await sdk.chat.completions.with_raw_response.create(model="chat", stream=True, **TOOL_CALL)
    await raw.http_response.aread()
    (record,) = await pair.records_of([raw.headers["x-request-id"]])
    assert record["end"] == "completed"
    assert record["stages_ms"]["stream"] > record["total_ms"] / 4


async def test_usage_is_streamed_only_to_those_who_ask(sdk: AsyncOpenAI) -> None:
    """The gateway asks for itself in any case, and keeps it to itself."""
    create = sdk.chat.completions.create
    silent = await create(model="chat", messages=HELLO, max_tokens=3, stream=True)
    assert [chunk.usage for chunk in [c async for c in silent] if chunk.usage or not chunk.choices] == []
    told = await create(model="chat", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True})
    last = [chunk async for chunk in told][-1]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 3)


async def test_what_the_engine_reports_is_recorded_even_if_nobody_asked(sdk: AsyncOpenAI, pair: Gateway) -> None:
    """Corrections of beliefs live on it."""
    answer = await ask(sdk, "chat", Asked("short", "", HELLO, 3, repeats=False))
    (record,) = await pair.records_of([answer.request_id])
    assert (answer.usage, record["output_tokens"]) == (None, 3)
    assert record["prompt_tokens_reported"] == 20
    inside = record["engine_queue_ms"] + record["engine_prefill_ms"]
    assert 0 < record["engine_prefill_ms"] <= inside == pytest.approx(record["engine_ttft_ms"], abs=0.01)
    assert inside < record["stages_ms"]["upstream"]


async def test_the_older_completions_endpoint_streams(sdk: AsyncOpenAI, direct: AsyncOpenAI) -> None:
    """It has no role chunk and no messages."""

    async def said(by: AsyncOpenAI, model: str) -> str:
        stream = await by.completions.create(model=model, prompt="import os", max_tokens=8, seed=7, stream=True)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    assert await said(direct, "small") == await said(sdk, "chat")


async def test_the_routes_are_the_models(sdk: AsyncOpenAI) -> None:
    """Callers ask for routes; the engines' own names are not theirs to know."""
    assert [model.id async for model in sdk.models.list()] == ["chat"]


async def test_an_unknown_model_is_refused_by_the_gateway(sdk: AsyncOpenAI, engines: list[Server]) -> None:
    """It never reaches an engine."""
    counted = "vllm:request_success_total"
    before = [series(engine.url, counted) for engine in engines]
    with pytest.raises(openai.NotFoundError) as refused:
        await sdk.chat.completions.create(model="small", messages=HELLO)
    assert refused.value.code == "model_not_found"
    assert before == [series(engine.url, counted) for engine in engines]


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "hello"},
        {"messages": HELLO, "temperature": 9},
        {"messages": [user(text(20_000, "too long"))]},
    ],
    ids=["messages of the wrong type", "temperature out of range", "longer than the context"],
)
async def test_a_bad_request_is_a_bad_request(sdk: AsyncOpenAI, wrong: Any) -> None:
    """400 in OpenAI's envelope, whoever found out: `type` in its words, `code` no number."""
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="chat", **wrong)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code is None or isinstance(refused.value.code, str)
    assert refused.value.message


async def test_a_prompt_that_is_too_long_says_so(sdk: AsyncOpenAI) -> None:
    """The code that clients look for when they trim their history."""
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="chat", messages=[user(text(20_000, "too long"))])
    assert refused.value.code == "context_length_exceeded"
