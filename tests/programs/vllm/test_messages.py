"""Anthropic's SDK before a real vLLM: by vLLM's own `/v1/messages`, and over chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.programs.vllm.conftest import of_model
from tests.programs.vllm.fleet import Gateway, Server

ASKED: Any = [{"role": "user", "content": "Say hello to the world."}]
# The same prompt, as blocks, with an earlier turn and the result of a tool.
TURNS: Any = [
    {"role": "user", "content": [{"type": "text", "text": "Light on please."}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "set_light", "input": {"on": True}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}]},
]
TOOLS: Any = [
    {
        "name": "set_light",
        "description": "Switch a light.",
        "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    }
]


@pytest.fixture
def engine() -> Server:
    return of_model("small", 1)[0]


@pytest.fixture
async def sdk(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


@pytest.fixture
async def direct(engine: Server) -> AsyncIterator[AsyncAnthropic]:
    """The same SDK, without the gateway."""
    async with AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_of(message: Any) -> int:
    """Tokens of the whole prompt: fresh, written to the cache, read from it."""
    usage = message.usage
    cached: int = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    return cached + int(usage.input_tokens)


async def streamed(sdk: AsyncAnthropic, model: str, turns: Any, **more: Any) -> Any:
    async with sdk.messages.stream(model=model, max_tokens=16, messages=turns, extra_body=COLD, **more) as stream:
        return await stream.get_final_message()


COLD = {"temperature": 0}  # the same words every time


@pytest.mark.parametrize("turns", [ASKED, TURNS], ids=["text", "tools"])
@pytest.mark.parametrize("route", ["native", "chat"])
async def test_a_message_equals_the_engines(
    sdk: AsyncAnthropic, direct: AsyncAnthropic, route: str, turns: Any
) -> None:
    """vLLM turns a message into a chat by itself: our translation gives the same prompt, and so the same words."""
    more: Any = {"system": "Be short.", **({"tools": TOOLS} if turns is TURNS else {})}
    expected = await streamed(direct, "small", turns, **more)
    whole = await sdk.messages.create(model=route, max_tokens=16, messages=turns, extra_body=COLD, **more)
    found = await streamed(sdk, route, turns, **more)
    assert text_of(expected) == text_of(found) == text_of(whole) != ""
    assert [message.stop_reason for message in (expected, found, whole)] == ["max_tokens"] * 3
    assert prompt_of(found) == prompt_of(whole) == prompt_of(expected)
    assert [message.usage.output_tokens for message in (expected, found, whole)] == [16] * 3


async def test_the_record_has_the_engines_counts(gateway: Gateway, sdk: AsyncAnthropic) -> None:
    """Of a native stream: the prompt with its cached part, and the tokens of the answer."""
    message = await streamed(sdk, "native", ASKED, system="Count. " * 64)
    again = await streamed(sdk, "native", ASKED, system="Count. " * 64)
    record = gateway.records(1)[-1]
    assert (again.usage.cache_read_input_tokens or 0) >= 32
    assert record["cached_tokens_reported"] == again.usage.cache_read_input_tokens
    assert record["prompt_tokens_reported"] == prompt_of(message) == prompt_of(again)
    assert record["output_tokens"] == 16


async def test_vllm_counts_the_tokens_of_a_prompt(sdk: AsyncAnthropic, direct: AsyncAnthropic) -> None:
    """The count is the engine's own, and equals the usage of the same request."""
    expected = await direct.messages.count_tokens(model="small", messages=TURNS, tools=TOOLS)
    counted = await sdk.messages.count_tokens(model="native", messages=TURNS, tools=TOOLS)
    answered = await sdk.messages.create(model="native", max_tokens=1, messages=TURNS, tools=TOOLS)
    assert counted.input_tokens == expected.input_tokens == prompt_of(answered)


@pytest.mark.parametrize(
    "wrong",
    [{"extra_body": {"temperature": -1}}, {"messages": [{"role": "user", "content": "word " * 50_000}]}],
    ids=["temperature out of range", "longer than the context"],
)
async def test_an_error_of_vllm_is_anthropics(sdk: AsyncAnthropic, wrong: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await sdk.messages.create(**{"model": "native", "max_tokens": 16, "messages": ASKED, **wrong})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


async def test_a_streamed_message_that_vllm_refuses_is_a_bad_request(sdk: AsyncAnthropic) -> None:
    """vLLM 0.32 answers 200 and wraps the refusal of its chat, which has no budget for thinking, into an event of
    type `internal_error`. The engine serves on."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    for _ in range(8):
        with pytest.raises(anthropic.BadRequestError):
            async with sdk.messages.stream(
                model="native", max_tokens=2000, messages=ASKED, thinking=thinking
            ) as stream:
                await stream.get_final_message()
    assert text_of(await streamed(sdk, "native", ASKED))
