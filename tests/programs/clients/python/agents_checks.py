"""OpenAI Agents SDK: agents, tools, handoffs, over Responses (the default) and over chat completions."""

from __future__ import annotations

import os
from typing import Any

from harness import (
    API_KEY,
    BASE_URL,
    CITIES,
    MODEL,
    REASONING,
    STATEFUL_TURNS,
    TEXT,
    TEXT_TOKENS,
    TURN,
    check,
    expect,
    main,
)

os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": API_KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"}

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai.types.shared import Reasoning
from pydantic import BaseModel

completions = OpenAIChatCompletionsModel(model=MODEL, openai_client=openai.AsyncOpenAI())


class Weather(BaseModel):
    city: str
    temperature: int
    sunny: bool


@function_tool
def get_weather(city: str) -> str:
    """Weather now."""
    return f"{city}: snow"


async def run(model: Any, ask: str = "hello", **more: Any) -> Any:
    return await Runner.run(Agent(name="agent", instructions="Be brief.", model=model, **more), ask)


async def plain(model: Any) -> None:
    result = await run(model)
    expect(result.final_output == TEXT, result)
    usage = result.context_wrapper.usage
    expect(usage.requests == 1 and usage.output_tokens == TEXT_TOKENS, usage)


async def streamed(model: Any) -> None:
    result = Runner.run_streamed(Agent(name="agent", model=model), "hello")
    events = [event async for event in result.stream_events()]
    deltas = [event.data.delta for event in events if getattr(event, "data", None) and "text.delta" in event.data.type]
    expect("".join(deltas) == TEXT and result.final_output == TEXT, deltas)


async def with_tools(model: Any) -> None:
    result = await run(model, CITIES, tools=[get_weather])
    expect(result.final_output == "The tools say: Paris: snow; Rome: snow", result.final_output)


async def tools_streamed(model: Any) -> None:
    result = Runner.run_streamed(Agent(name="agent", model=model, tools=[get_weather]), CITIES)
    async for _ in result.stream_events():
        pass
    expect(result.final_output == "The tools say: Paris: snow; Rome: snow", result.final_output)


async def structured(model: Any) -> None:
    result = await run(model, output_type=Weather)
    expect(result.final_output == Weather(city="Paris", temperature=21, sunny=True), result.final_output)


async def reasoning(model: Any) -> None:
    result = await run(model, model_settings=ModelSettings(reasoning=Reasoning(effort="high", summary="auto")))
    kinds = [item.type for item in result.new_items]
    expect(result.final_output == TEXT and kinds[0] == "reasoning_item", kinds)
    expect(REASONING in str(result.new_items[0].raw_item), result.new_items[0].raw_item)


async def turns(model: Any) -> None:
    """The items of a turn are part of the next one's input."""
    first = await run(model, CITIES, tools=[get_weather])
    given = [*first.to_input_list(), {"role": "user", "content": "hello"}]
    result = await Runner.run(Agent(name="agent", model=model, tools=[get_weather]), given)
    expect(result.final_output == TEXT, result.final_output)


def register(name: str, model: Any) -> None:
    check(name)(lambda: plain(model))
    check(f"{name}: stream")(lambda: streamed(model))
    check(f"{name}: tools")(lambda: with_tools(model))
    check(f"{name}: tools, streamed")(lambda: tools_streamed(model))
    check(f"{name}: structured output")(lambda: structured(model))
    check(f"{name}: reasoning")(lambda: reasoning(model))
    check(f"{name}: turns")(lambda: turns(model))


register("responses", MODEL)
register("chat", completions)


@check("responses: previous response")
async def _() -> None:
    agent = Agent(name="agent", model="stateful")
    first = await Runner.run(agent, TURN)
    second = await Runner.run(agent, TURN, previous_response_id=first.last_response_id)
    turns = (first.final_output, second.final_output)
    expect(turns in STATEFUL_TURNS, turns)


async def raises(kind: type[Exception], model: str) -> None:
    try:
        await run(model)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


@check("error 404")
async def _() -> None:
    await raises(openai.NotFoundError, "no-such-model")


@check("error 429")
async def _() -> None:
    await raises(openai.RateLimitError, "limited")


@check("error 503")
async def _() -> None:
    await raises(openai.InternalServerError, "down")


main("openai-agents", "openai")
