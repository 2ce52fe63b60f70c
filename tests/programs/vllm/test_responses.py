"""OpenAI's SDK before a real vLLM: by vLLM's own `/v1/responses`, and over chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.programs.vllm.fleet import Gateway, Server

COLD: dict[str, Any] = {"temperature": 0, "max_output_tokens": 16}
TURNS: Any = [
    {"role": "user", "content": "Say hello to the world."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "input_text", "text": "Again."}]},
]


@pytest.fixture
async def sdk(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0, timeout=120) as sdk:
        yield sdk


@pytest.fixture
async def direct(engines: list[Server]) -> AsyncIterator[AsyncOpenAI]:
    """The same SDK, without the gateway."""
    async with AsyncOpenAI(base_url=f"{engines[0].url}/v1", api_key="none", max_retries=0, timeout=120) as sdk:
        yield sdk


@pytest.mark.parametrize("asked", ["Say hello to the world.", TURNS], ids=["text", "turns"])
async def test_native_and_translated_answers_equal_the_engines(
    sdk: AsyncOpenAI, direct: AsyncOpenAI, asked: Any
) -> None:
    """The same words, prompts and counts, streamed and whole."""
    own = await direct.responses.create(model="small", input=asked, instructions="be brief", **COLD)
    assert own.output_text
    assert own.usage is not None
    expected = (own.output_text, own.usage.input_tokens, own.usage.output_tokens)
    for route in ("native", "chat"):
        whole = await sdk.responses.create(model=route, input=asked, instructions="be brief", **COLD)
        events = [
            event
            async for event in await sdk.responses.create(
                model=route, input=asked, instructions="be brief", stream=True, **COLD
            )
        ]
        deltas: list[str] = [event.delta for event in events if event.type == "response.output_text.delta"]
        final: Any = events[-1]
        assert final.type in ("response.completed", "response.incomplete")
        assert "".join(deltas) == final.response.output_text == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert whole.usage is not None
        assert (whole.output_text, whole.usage.input_tokens, whole.usage.output_tokens) == expected


async def test_the_names_of_the_events_are_vllm_s(sdk: AsyncOpenAI) -> None:
    """In the same order, for a text."""
    names = []
    for route in ("native", "chat"):
        stream = await sdk.responses.create(model=route, input="Say hello to the world.", stream=True, **COLD)
        seen = [event.type async for event in stream]
        names.append(list(dict.fromkeys(seen[:-1])))
    assert names[0] == names[1]


async def test_an_unknown_response_is_not_found_and_harms_no_engine(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.create(model="native", input="hi", previous_response_id="resp_" + "0" * 64, **COLD)
    given = await sdk.responses.create(model="native", input="hi", **COLD)
    with pytest.raises(openai.APIStatusError) as kept:  # vLLM keeps responses where its operator says so
        await sdk.responses.create(model="native", input="hi", previous_response_id=given.id + "0", **COLD)
    assert kept.value.status_code == 404
    assert (await sdk.responses.create(model="native", input="hi", **COLD)).output_text
