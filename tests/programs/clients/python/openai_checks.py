"""The OpenAI SDK for Python."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
from harness import (
    API_KEY,
    BASE_URL,
    CITIES,
    CITY,
    IMAGE,
    IMAGE_SEEN,
    LONG,
    MODEL,
    REASONING,
    REASONING_TOKENS,
    ROOT_URL,
    TEXT,
    TEXT_TOKENS,
    TURN,
    aborted,
    check,
    expect,
    main,
    raises,
    seen,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, timeout=15)
once = client.with_options(max_retries=0)
ASK: Any = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}


class Weather(BaseModel):
    city: str
    temperature: int
    sunny: bool


def chat(**more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, **more})


def thought(message: Any) -> str:
    """Reasoning has no member in OpenAI's chat; vLLM and DeepSeek differ."""
    return getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None) or ""


# --------------------------------------------------------------------------- chat completions


@check("chat")
def _() -> None:
    answer = chat()
    expect(answer.choices[0].message.content == TEXT, answer)
    expect(answer.choices[0].finish_reason == "stop" and answer._request_id, answer)


@check("chat: usage")
def _() -> None:
    usage = chat().usage
    expect(usage.prompt_tokens > 0 and usage.completion_tokens == TEXT_TOKENS, usage)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)


@check("chat: max_tokens")
def _() -> None:
    answer = chat(max_completion_tokens=3)
    said = answer.choices[0].message.content
    expect(answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3, answer)
    expect(TEXT.startswith(said) and said not in ("", TEXT), answer)


@check("chat: stream")
def _() -> None:
    chunks = list(chat(stream=True))
    expect("".join(c.choices[0].delta.content or "" for c in chunks) == TEXT, chunks)
    expect(chunks[-1].choices[0].finish_reason == "stop", chunks[-1])
    expect(not any(c.usage for c in chunks), "usage that nobody asked for")


@check("chat: stream with usage")
def _() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].usage and chunks[-1].choices == [], chunks[-1])
    expect(chunks[-1].usage.completion_tokens == TEXT_TOKENS, chunks[-1])


@check("chat: async")
async def _() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY) as aclient:
        calls = [aclient.chat.completions.create(model=MODEL, messages=ASK) for _ in range(8)]
        answers = await asyncio.gather(*calls)
    expect([a.choices[0].message.content for a in answers] == [TEXT] * 8, answers)


@check("chat: tools")
def _() -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = chat(messages=messages, tools=[TOOL])
    (call,) = asked.choices[0].message.tool_calls
    expect(asked.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather", asked)
    expect(json.loads(call.function.arguments) == {"city": "Oslo"}, call)
    messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
    expect(chat(messages=messages, tools=[TOOL]).choices[0].message.content == "The tools say: snow", messages)


@check("chat: parallel tools, streamed")
def _() -> None:
    messages: Any = [{"role": "user", "content": CITIES}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:  # type: ignore[list-item]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    expect([json.loads(c.function.arguments)["city"] for c in calls] == ["Paris", "Rome"], calls)
    expect(len({c.id for c in calls}) == 2, calls)


@check("chat: forced tool")
def _() -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = chat(tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    expect(call.function.name == "get_weather", call)


@check("chat: structured output")
def _() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    expect(answer.choices[0].message.parsed == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("chat: reasoning")
def _() -> None:
    message = chat(reasoning_effort="high").choices[0].message
    expect(thought(message) == REASONING, message)
    chunks = list(chat(reasoning_effort="high", stream=True))
    expect("".join(thought(c.choices[0].delta) for c in chunks).strip() == REASONING, chunks)


@check("chat: images")
def _() -> None:
    content = [{"type": "text", "text": "what is this?"}, PICTURE]
    answer = chat(messages=[{"role": "user", "content": content}])
    expect(answer.choices[0].message.content == IMAGE_SEEN, answer)


@check("chat: cached tokens")
def _() -> None:
    messages = [{"role": "user", "content": LONG}]
    chat(messages=messages)
    details = chat(messages=messages).usage.prompt_tokens_details
    expect(details and details.cached_tokens >= 192, details)


@check("chat: abort")
def _() -> None:
    before = seen()["aborts"]
    stream = chat(messages=[{"role": "user", "content": "count to 1000"}], stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    aborted(before)


# --------------------------------------------------------------------------- other operations


@check("completions")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time")
    expect(answer.object == "text_completion" and answer.choices[0].text, answer)


@check("embeddings")
def _() -> None:
    one = client.embeddings.create(model=MODEL, input=["a", "b"])
    expect([item.index for item in one.data] == [0, 1] and len(one.data[0].embedding) == 8, one)
    other = client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    expect(all(abs(a - b) < 1e-6 for a, b in zip(one.data[0].embedding, other.data[0].embedding, strict=True)), other)
    expect(one.usage.prompt_tokens == 2, one.usage)


@check("models: list")
def _() -> None:
    expect(MODEL in [model.id for model in client.models.list()], "the route is not listed")


@check("models: get")
def _() -> None:
    expect(client.models.retrieve(MODEL).id == MODEL, "another model")
    raises(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))


# --------------------------------------------------------------------------- responses


def respond(**more: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "hello", **more})


@check("responses")
def _() -> None:
    answer = respond(instructions="Be brief.")
    expect(answer.output_text == TEXT and answer.status == "completed", answer)
    expect(answer.usage.output_tokens == TEXT_TOKENS and answer.usage.input_tokens > 0, answer.usage)


@check("responses: stream")
def _() -> None:
    events = list(respond(stream=True))
    expect([e.sequence_number for e in events] == list(range(len(events))), [e.sequence_number for e in events])
    names = [e.type for e in events]
    expect(names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed", names)
    expect("".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT, names)
    expect(events[-1].response.output_text == TEXT and events[-1].response.usage, events[-1])


@check("responses: stream helper")
def _() -> None:
    with client.responses.stream(model=MODEL, input="hello") as stream:
        final = stream.get_final_response()
    expect(final.output_text == TEXT, final)


@check("responses: max_output_tokens")
def _() -> None:
    answer = respond(max_output_tokens=16, input="count to 100")
    expect(answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens", answer)


@check("responses: tools")
def _() -> None:
    asked = respond(input="What is the weather in Oslo?", tools=[FLAT_TOOL])
    (call,) = [item for item in asked.output if item.type == "function_call"]
    expect(json.loads(call.arguments) == {"city": "Oslo"} and call.call_id, call)
    given: Any = [{"role": "user", "content": "What is the weather in Oslo?"}, *asked.output]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "snow"})
    expect(respond(input=given, tools=[FLAT_TOOL]).output_text == "The tools say: snow", given)


@check("responses: parallel tools, streamed")
def _() -> None:
    events = list(respond(input=CITIES, tools=[FLAT_TOOL], stream=True))
    done = [json.loads(e.arguments)["city"] for e in events if e.type == "response.function_call_arguments.done"]
    expect(done == ["Paris", "Rome"], [e.type for e in events])


@check("responses: structured output")
def _() -> None:
    answer = client.responses.parse(model=MODEL, input="hello", text_format=Weather)
    expect(answer.output_parsed == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("responses: reasoning")
def _() -> None:
    answer = respond(reasoning={"effort": "high"})
    expect("reasoning" in [item.type for item in answer.output] and answer.output_text == TEXT, answer)
    expect(answer.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS, answer.usage)


@check("responses: images")
def _() -> None:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}", "detail": "auto"}
    content: Any = [{"type": "input_text", "text": "what is this?"}, picture]
    expect(respond(input=[{"role": "user", "content": content}]).output_text == IMAGE_SEEN, "other words")


@check("responses: cached tokens")
def _() -> None:
    respond(input="Responses. " + LONG)
    usage = respond(input="Responses. " + LONG).usage
    expect(usage.input_tokens_details.cached_tokens >= 192, usage)


@check("responses: previous response")
def _() -> None:
    """Five turns, whole and streamed, all at the engine of the first turn (of two engines)."""
    turns = [respond(model="stateful", input=TURN)]
    for number in range(2, 6):
        more: Any = {
            "model": "stateful",
            "input": f"{TURN} It is number {number}.",
            "previous_response_id": turns[-1].id,
        }
        turns.append(list(respond(**more, stream=True))[-1].response if number % 2 else respond(**more))
    name = turns[0].output_text.removeprefix("turn 1 of ")
    expect([t.output_text for t in turns] == [f"turn {n} of {name}" for n in range(1, 6)], turns)


@check("responses: retrieve")
def _() -> None:
    first = respond(model="stateful")
    kept = client.responses.retrieve(first.id)
    expect(kept.id == first.id and kept.output_text in ("kept", first.output_text), kept)


@check("responses: delete")
def _() -> None:
    first = respond(model="stateful")
    client.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@check("responses: a foreign id")
def _() -> None:
    more: Any = {"model": "stateful", "previous_response_id": "resp_a0"}
    raises(openai.NotFoundError, lambda: respond(**more))


# --------------------------------------------------------------------------- Azure


azure = openai.AzureOpenAI(azure_endpoint=ROOT_URL, api_key=API_KEY, api_version="2026-10-01", timeout=15)


@check("azure: chat")
def _() -> None:
    answer = azure.chat.completions.create(model=MODEL, messages=ASK)
    expect(answer.choices[0].message.content == TEXT, answer)
    chunks = list(azure.chat.completions.create(model=MODEL, messages=ASK, stream=True))
    expect("".join(c.choices[0].delta.content or "" for c in chunks) == TEXT, chunks)


@check("azure: embeddings")
def _() -> None:
    expect(len(azure.embeddings.create(model=MODEL, input="a").data[0].embedding) == 8, "another length")


@check("azure: responses")
def _() -> None:
    expect(azure.responses.create(model=MODEL, input="hello").output_text == TEXT, "another text")


# --------------------------------------------------------------------------- errors


@check("error 400")
def _() -> None:
    error = raises(openai.BadRequestError, lambda: once.chat.completions.create(model=MODEL, messages=[]))
    expect(error.type == "invalid_request_error" and error.param == "messages", error.body)


@check("error 401")
def _() -> None:
    wrong = OpenAI(base_url=BASE_URL, api_key="sk-wrong")
    error = raises(openai.AuthenticationError, lambda: wrong.chat.completions.create(model=MODEL, messages=ASK))
    expect(error.code == "invalid_api_key", error.body)


@check("error 404")
def _() -> None:
    error = raises(openai.NotFoundError, lambda: chat(model="no-such-model"))
    expect(error.code == "model_not_found" and error.param == "model", error.body)
    raises(openai.NotFoundError, lambda: respond(model="no-such-model"))


@check("error 429")
def _() -> None:
    error = raises(openai.RateLimitError, lambda: once.chat.completions.create(model="limited", messages=ASK))
    expect(error.response.headers.get("retry-after"), dict(error.response.headers))


@check("error 503")
def _() -> None:
    error = raises(openai.InternalServerError, lambda: once.chat.completions.create(model="down", messages=ASK))
    expect(error.status_code == 503 and error.request_id, error.body)
    error = raises(openai.InternalServerError, lambda: once.responses.create(model="down", input="hello"))
    expect(error.status_code == 503, error.body)


@check("error inside a stream")
def _() -> None:
    raises(openai.APIError, lambda: list(chat(model="breaks", stream=True)))


@check("retry after a 429")
def _() -> None:
    messages: Any = [{"role": "user", "content": f"hello at {time.time()}"}]
    started, before = time.monotonic(), seen()["requests"]
    expect(chat(model="flaky", messages=messages).choices[0].message.content == TEXT, "another answer")
    expect(seen()["requests"] - before == 2 and time.monotonic() - started >= 1, "not after the server's retry-after")


@check("timeout")
def _() -> None:
    impatient = once.with_options(timeout=0.3)
    messages: Any = [{"role": "user", "content": "count to 100"}]
    before = seen()["requests"]
    raises(openai.APITimeoutError, lambda: impatient.chat.completions.create(model=MODEL, messages=messages))
    expect(seen()["requests"] == before + 1, "resent")


main("openai")
