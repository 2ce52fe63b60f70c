"""Messages, Responses and the small operations, passed through to a real vLLM that speaks them."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.vllm.fleet import Gateway, Server
from tests.vllm.traffic import client

HELLO: Any = [{"role": "user", "content": "Say hello to the world."}]
GREEDY = {"temperature": 0.0}


def messages_client(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(part.text for part in message.content if part.type == "text")


async def test_messages_equal_the_engines_own(pair: Gateway, engines: list[Server]) -> None:
    """Greedy text through the gateway, whole and streamed, equals the text without it; usage is the engine's."""
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 30, "system": "Be brief.", "extra_body": GREEDY}
    async with messages_client(pair.url) as sdk, messages_client(engines[0].url) as direct:
        expected = await direct.messages.create(model="small", **asked)
        whole = await sdk.messages.create(model="chat", **asked)
        async with sdk.messages.stream(model="chat", **asked) as stream:
            streamed = await stream.get_final_message()
    assert text_of(expected) == text_of(whole) == text_of(streamed)
    assert whole.usage.output_tokens == streamed.usage.output_tokens == expected.usage.output_tokens
    assert whole.stop_reason == streamed.stop_reason == expected.stop_reason


async def test_the_engine_counts_the_tokens_of_messages(pair: Gateway) -> None:
    """The count equals the usage of the same request."""
    async with messages_client(pair.url) as sdk:
        counted = await sdk.messages.count_tokens(model="chat", messages=HELLO)
        answered = await sdk.messages.create(model="chat", messages=HELLO, max_tokens=1)
    assert counted.input_tokens == answered.usage.input_tokens


async def test_an_error_of_the_engine_is_anthropics(pair: Gateway) -> None:
    """A prompt beyond the context window is a 400 of the caller's dialect."""
    async with messages_client(pair.url) as sdk:
        with pytest.raises(anthropic.BadRequestError) as refusal:
            await sdk.messages.create(
                model="chat", messages=[{"role": "user", "content": "word " * 50_000}], max_tokens=5
            )
    assert refusal.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


async def test_responses_equal_the_engines_own(pair: Gateway, engines: list[Server]) -> None:
    """Greedy text through the gateway, whole and streamed, equals the text without it."""
    asked: dict[str, Any] = {"input": "Say hello to the world.", "max_output_tokens": 30, "temperature": 0.0}
    async with client(pair.base_url) as sdk, client(f"{engines[0].url}/v1") as direct:
        expected = await direct.responses.create(model="small", **asked)
        whole = await sdk.responses.create(model="chat", **asked)
        streamed, last = "", None
        async for event in await sdk.responses.create(model="chat", stream=True, **asked):
            last = event
            if event.type == "response.output_text.delta":
                streamed += event.delta
    assert expected.output_text == whole.output_text == streamed
    assert last is not None
    assert last.type in ("response.completed", "response.incomplete")


async def test_embeddings_of_a_chat_model_are_refused_and_harm_nobody(pair: Gateway) -> None:
    """vLLM serves no embeddings of a chat model: a 4xx for that caller, and chat goes on."""
    async with aiohttp.ClientSession(pair.url) as session:
        for _ in range(3):
            async with session.post("/v1/embeddings", json={"model": "chat", "input": "text"}) as reply:
                assert 400 <= reply.status < 500
    async with client(pair.base_url) as sdk:
        answered = await sdk.chat.completions.create(model="chat", messages=HELLO, max_tokens=3)
    assert answered.choices[0].message.content


async def test_tokenize_passes_through(pair: Gateway, engines: list[Server]) -> None:
    async with aiohttp.ClientSession() as session:
        asked = {"prompt": "Say hello to the world."}
        async with session.post(f"{pair.url}/tokenize", json={"model": "chat", **asked}) as reply:
            through = await reply.json()
        async with session.post(f"{engines[0].url}/tokenize", json={"model": "small", **asked}) as reply:
            assert through == await reply.json()
