"""The Anthropic SDK for Python."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from harness import (
    API_KEY,
    CITIES,
    CITY,
    IMAGE,
    IMAGE_SEEN,
    LONG,
    MODEL,
    REASONING,
    ROOT_URL,
    TEXT,
    TEXT_TOKENS,
    aborted,
    check,
    expect,
    main,
    raises,
    seen,
)

client = Anthropic(base_url=ROOT_URL, api_key=API_KEY, timeout=15)
once = client.with_options(max_retries=0)
ASK: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "get_weather", "description": "Weather now", "input_schema": CITY}
OSLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


def create(**more: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 500, "messages": ASK, **more})


def stream(**more: Any) -> Any:
    return client.messages.stream(**{"model": MODEL, "max_tokens": 500, "messages": ASK, **more})


@check("messages")
def _() -> None:
    answer = create(system="Be brief.")
    expect(answer.content[0].text == TEXT and answer.stop_reason == "end_turn" and answer.role == "assistant", answer)
    expect(answer._request_id, "no request id")


@check("messages: usage")
def _() -> None:
    usage = create().usage
    expect(usage.input_tokens > 0 and usage.output_tokens == TEXT_TOKENS, usage)


@check("messages: max_tokens")
def _() -> None:
    answer = create(max_tokens=3)
    expect(answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 3, answer)
    expect(TEXT.startswith(answer.content[0].text) and answer.content[0].text not in ("", TEXT), answer)


@check("messages: stream")
def _() -> None:
    with stream() as events:
        expect("".join(events.text_stream) == TEXT, "another text")
        final = events.get_final_message()
    expect(final.stop_reason == "end_turn" and final.usage.output_tokens == TEXT_TOKENS, final)


@check("messages: stream events")
def _() -> None:
    names = [event.type for event in create(stream=True)]
    deltas = ["content_block_delta"] * names.count("content_block_delta")
    order = ["message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop"]
    expect([name for name in names if name != "ping"] == order, names)


@check("messages: async")
async def _() -> None:
    async with AsyncAnthropic(base_url=ROOT_URL, api_key=API_KEY) as aclient:
        calls = [aclient.messages.create(model=MODEL, max_tokens=50, messages=ASK) for _ in range(8)]
        answers = await asyncio.gather(*calls)
    expect([a.content[0].text for a in answers] == [TEXT] * 8, answers)


@check("messages: tools")
def _() -> None:
    asked = create(messages=OSLO, tools=[TOOL])
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    expect(asked.stop_reason == "tool_use" and call.input == {"city": "Oslo"}, asked)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "snow"}
    messages = [*OSLO, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = create(messages=messages, tools=[TOOL])
    expect(answer.content[0].text == "The tools say: snow", answer)


@check("messages: parallel tools, streamed")
def _() -> None:
    with stream(messages=[{"role": "user", "content": CITIES}], tools=[TOOL]) as events:
        final = events.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    expect([call.input["city"] for call in calls] == ["Paris", "Rome"] and len({c.id for c in calls}) == 2, final)


@check("messages: forced tool")
def _() -> None:
    answer = create(tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    expect(answer.content[-1].type == "tool_use" and answer.content[-1].input == {"city": "Paris"}, answer)


@check("messages: structured output")
def _() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        temperature: int
        sunny: bool

    answer = client.messages.parse(model=MODEL, max_tokens=500, messages=ASK, output_format=Weather)
    expect(answer.parsed_output == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("messages: thinking")
def _() -> None:
    answer = create(max_tokens=4000, thinking={"type": "enabled", "budget_tokens": 2000})
    kinds = [block.type for block in answer.content]
    expect(kinds == ["thinking", "text"] and answer.content[0].thinking.strip() == REASONING, answer)


@check("messages: thinking, streamed")
def _() -> None:
    with stream(max_tokens=4000, thinking={"type": "enabled", "budget_tokens": 2000}) as events:
        final = events.get_final_message()
    expect([block.type for block in final.content] == ["thinking", "text"], final)
    expect(final.content[0].thinking.strip() == REASONING and final.content[1].text == TEXT, final)


@check("messages: images")
def _() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    content = [picture, {"type": "text", "text": "what is this?"}]
    answer = create(messages=[{"role": "user", "content": content}])
    expect(answer.content[0].text == IMAGE_SEEN, answer)


@check("messages: cached tokens")
def _() -> None:
    messages = [{"role": "user", "content": "Messages. " + LONG}]
    create(messages=messages)
    usage = create(messages=messages).usage
    expect((usage.cache_read_input_tokens or 0) >= 192, usage)
    expect(usage.input_tokens < 50, "input_tokens counts cached tokens too")


@check("messages: cache_control")
def _() -> None:
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    expect(create(system=[block]).content[0].text == TEXT, "another text")


@check("messages: abort")
def _() -> None:
    before = seen()["aborts"]
    with stream(messages=[{"role": "user", "content": "count to 1000"}]) as events:
        next(iter(events.text_stream))
    aborted(before)


@check("count_tokens")
def _() -> None:
    short = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    long = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": LONG}]).input_tokens
    expect(0 < short < 40 and 150 <= long <= 1000, (short, long))  # by the engine's own words


@check("models: list")
def _() -> None:
    expect(MODEL in [model.id for model in client.models.list()], "the route is not listed")


@check("models: get")
def _() -> None:
    expect(client.models.retrieve(MODEL).id == MODEL, "another model")
    raises(anthropic.NotFoundError, lambda: client.models.retrieve("no-such-model"))


@check("bearer key")
def _() -> None:
    bearer = Anthropic(base_url=ROOT_URL, auth_token=API_KEY)
    answer = bearer.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    expect(answer.content[0].text == TEXT, answer)


@check("error 400")
def _() -> None:
    error = raises(anthropic.BadRequestError, lambda: create(messages=[]))
    expect(error.body["error"]["type"] == "invalid_request_error" and error.body["type"] == "error", error.body)


@check("error 401")
def _() -> None:
    wrong = Anthropic(base_url=ROOT_URL, api_key="sk-wrong")
    error = raises(
        anthropic.AuthenticationError, lambda: wrong.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    )
    expect(error.body["error"]["type"] == "authentication_error", error.body)


@check("error 404")
def _() -> None:
    error = raises(anthropic.NotFoundError, lambda: create(model="no-such-model"))
    expect(error.body["error"]["type"] == "not_found_error" and error.request_id, error.body)


@check("error 429")
def _() -> None:
    limited: Any = {"model": "limited", "max_tokens": 50, "messages": ASK}
    error = raises(anthropic.RateLimitError, lambda: once.messages.create(**limited))
    expect(error.body["error"]["type"] == "rate_limit_error", error.body)
    expect(error.response.headers.get("retry-after"), dict(error.response.headers))


@check("error 503")
def _() -> None:
    down: Any = {"model": "down", "max_tokens": 50, "messages": ASK}
    error = raises(anthropic.InternalServerError, lambda: once.messages.create(**down))
    expect(error.status_code in (503, 529) and error.body["error"]["type"] in ("api_error", "overloaded_error"), error)


@check("error inside a stream")
def _() -> None:
    def read() -> object:
        with stream(model="breaks") as events:
            return events.get_final_message()

    raises(anthropic.APIError, read)


@check("retry after a 429")
def _() -> None:
    messages = [{"role": "user", "content": f"hello at {time.time()}"}]
    started, before = time.monotonic(), seen()["requests"]
    expect(create(model="flaky", messages=messages).content[0].text == TEXT, "another answer")
    expect(seen()["requests"] - before == 2 and time.monotonic() - started >= 1, "not after the server's retry-after")


main("anthropic")
