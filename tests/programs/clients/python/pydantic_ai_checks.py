"""Pydantic AI through the classes for chat, Responses and Anthropic models."""

from __future__ import annotations

import base64
from typing import Any

from harness import (
    API_KEY,
    BASE_URL,
    CITIES,
    IMAGE,
    IMAGE_SEEN,
    LONG,
    MODEL,
    REASONING,
    ROOT_URL,
    TEXT,
    TEXT_TOKENS,
    check,
    expect,
    main,
)
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key=API_KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT_URL, api_key=API_KEY))
PICTURE = BinaryContent(base64.b64decode(IMAGE), media_type="image/png")


class Weather(BaseModel):
    city: str
    temperature: int
    sunny: bool


EXPECTED = Weather(city="Paris", temperature=21, sunny=True)


def get_weather(city: str) -> str:
    """Weather now."""
    return f"{city}: snow"


async def plain(model: Any) -> None:
    result = await Agent(model, instructions="Be brief.").run("hello")
    expect(result.output == TEXT, result.output)
    usage = result.usage
    expect(usage.output_tokens == TEXT_TOKENS and usage.input_tokens > 0, usage)


async def streamed(model: Any) -> None:
    async with Agent(model).run_stream("hello") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    expect("".join(pieces) == TEXT and len(pieces) > 3, pieces)


async def with_tools(model: Any) -> None:
    result = await Agent(model, tools=[get_weather]).run(CITIES)
    expect(result.output == "The tools say: Paris: snow; Rome: snow", result.output)


async def tools_streamed(model: Any) -> None:
    async with Agent(model, tools=[get_weather]).run_stream(CITIES) as result:
        output = await result.get_output()
    expect(output == "The tools say: Paris: snow; Rome: snow", output)


async def by_tool(model: Any) -> None:
    result = await Agent(model, output_type=Weather).run("hello")
    expect(result.output == EXPECTED, result.output)


async def native(model: Any) -> None:
    result = await Agent(model, output_type=NativeOutput(Weather)).run("hello")
    expect(result.output == EXPECTED, result.output)


async def pictures(model: Any) -> None:
    result = await Agent(model).run(["what is this?", PICTURE])
    expect(result.output == IMAGE_SEEN, result.output)


async def cached(model: Any, name: str) -> None:
    await Agent(model).run(f"{name}. {LONG}")
    result = await Agent(model).run(f"{name}. {LONG}")
    expect(result.usage.cache_read_tokens >= 192, result.usage)


async def thinking(model: Any, settings: Any) -> None:
    result = await Agent(model, model_settings=settings).run("hello")
    thoughts = [part for m in result.all_messages() for part in m.parts if isinstance(part, ThinkingPart)]
    expect(result.output == TEXT and thoughts, result)
    raw = (thoughts[0].provider_details or {}).get("raw_content", ())  # reasoning that is no summary
    expect((thoughts[0].content or "".join(raw)).strip() == REASONING, thoughts)


async def refused(kind: Any, name: str, status: int, **more: Any) -> None:
    try:
        await Agent(kind(name, **more)).run("hello")
    except ModelHTTPError as error:
        expect(error.status_code == status, error)
        return
    raise AssertionError("no ModelHTTPError")


KINDS: dict[str, tuple[Any, Any]] = {
    "chat": (chat, {"openai_reasoning_effort": "high"}),
    "responses": (responses, {"openai_reasoning_effort": "high", "openai_reasoning_summary": "detailed"}),
    "messages": (messages, {"anthropic_thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000}),
}


def register(name: str, model: Any, settings: Any) -> None:
    check(name)(lambda: plain(model))
    check(f"{name}: stream")(lambda: streamed(model))
    check(f"{name}: tools")(lambda: with_tools(model))
    check(f"{name}: tools, streamed")(lambda: tools_streamed(model))
    check(f"{name}: structured output by a tool")(lambda: by_tool(model))
    if model is not messages:  # of Anthropic's models, Pydantic AI asks only known names for JSON of a schema
        check(f"{name}: structured output")(lambda: native(model))
    check(f"{name}: images")(lambda: pictures(model))
    check(f"{name}: cached tokens")(lambda: cached(model, name))
    check(f"{name}: reasoning")(lambda: thinking(model, settings))


for _name, (_model, _settings) in KINDS.items():
    register(_name, _model, _settings)


@check("embeddings")
async def _() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    result = await embedder.embed_documents(["a", "b"])
    expect([len(vector) for vector in result.embeddings] == [8, 8], result)


@check("error 401")
async def _() -> None:
    await refused(OpenAIChatModel, MODEL, 401, provider=OpenAIProvider(base_url=BASE_URL, api_key="sk-wrong"))


@check("error 404")
async def _() -> None:
    await refused(OpenAIChatModel, "no-such-model", 404, provider=provider)
    await refused(AnthropicModel, "no-such-model", 404, provider=AnthropicProvider(base_url=ROOT_URL, api_key=API_KEY))


@check("error 429")
async def _() -> None:
    await refused(OpenAIChatModel, "limited", 429, provider=provider)


@check("error 503")
async def _() -> None:
    await refused(OpenAIChatModel, "down", 503, provider=provider)


main("pydantic-ai-slim", "openai", "anthropic")
