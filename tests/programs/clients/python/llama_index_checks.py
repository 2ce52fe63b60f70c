"""LlamaIndex: class OpenAI accepts only names of OpenAI's models (here also routes); OpenAILike accepts any name."""

from __future__ import annotations

import gc
from typing import Any

import openai
from harness import (
    API_KEY,
    BASE_URL,
    CITIES,
    IMAGE,
    IMAGE_SEEN,
    MODEL,
    REASONING,
    TEXT,
    TEXT_TOKENS,
    aborted,
    check,
    expect,
    main,
    raises,
    seen,
)
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai import OpenAI, OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

KNOWN = "gpt-4.1-mini"  # a route with the name of a known model
ASK = [ChatMessage(role="user", content="hello")]
llm = OpenAI(api_base=BASE_URL, api_key=API_KEY, model=KNOWN, timeout=15)
responses = OpenAIResponses(api_base=BASE_URL, api_key=API_KEY, model=KNOWN, timeout=15)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: int
    sunny: bool


def get_weather(city: str) -> str:
    """Weather now."""
    return f"{city}: snow"


TOOL = FunctionTool.from_defaults(get_weather)


def faulty(model: str) -> OpenAILike:
    return OpenAILike(api_base=BASE_URL, api_key=API_KEY, model=model, is_chat_model=True, max_retries=0)


def use_tools(model: Any) -> None:
    answer = model.chat_with_tools([TOOL], user_msg=CITIES, allow_parallel_tool_calls=True)
    calls = model.get_tool_calls_from_response(answer)
    expect([call.tool_kwargs["city"] for call in calls] == ["Paris", "Rome"], answer)
    results = [
        ChatMessage(
            role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
        )
        for call in calls
    ]
    user = ChatMessage(role="user", content=CITIES)
    final = model.chat_with_tools([TOOL], chat_history=[user, answer.message, *results])
    expect(final.message.content == "The tools say: Paris: snow; Rome: snow", final)


@check("chat")
def _() -> None:
    expect(llm.chat(ASK).message.content == TEXT, "another text")
    expect(llm.complete("hello").text == TEXT, "another text")


@check("chat: any model name")
def _() -> None:
    other = OpenAILike(api_base=BASE_URL, api_key=API_KEY, model=MODEL, is_chat_model=True)
    expect(other.chat(ASK).message.content == TEXT, "another text")


@check("chat: usage")
def _() -> None:
    usage = llm.chat(ASK).raw.usage
    expect(usage.completion_tokens == TEXT_TOKENS, usage)


@check("chat: stream")
def _() -> None:
    expect("".join(chunk.delta or "" for chunk in llm.stream_chat(ASK)) == TEXT, "another text")


@check("chat: async stream")
async def _() -> None:
    stream = await llm.astream_chat(ASK)
    expect("".join([chunk.delta or "" async for chunk in stream]) == TEXT, "another text")


@check("chat: tools")
def _() -> None:
    use_tools(llm)


@check("chat: structured output")
def _() -> None:
    answer = llm.as_structured_llm(Weather).complete("hello").raw
    expect(answer == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("chat: images")
def _() -> None:
    import base64

    picture = ImageBlock(image=base64.b64decode(IMAGE), image_mimetype="image/png")
    message = ChatMessage(role="user", blocks=[TextBlock(text="what is this?"), picture])
    answer = llm.chat([message]).message.content
    expect(answer == IMAGE_SEEN, answer)


@check("chat: abort")
def _() -> None:
    before = seen()["aborts"]
    stream = llm.stream_chat([ChatMessage(role="user", content="count to 1000")])
    for chunk in stream:
        if chunk.delta:
            break
    stream.close()
    del stream, chunk
    gc.collect()  # LlamaIndex leaves the connection to the collector
    aborted(before)


@check("responses")
def _() -> None:
    answer = responses.chat(ASK)
    expect(answer.message.content == TEXT, answer)


@check("responses: stream")
def _() -> None:
    expect("".join(chunk.delta or "" for chunk in responses.stream_chat(ASK)) == TEXT, "another text")


@check("responses: tools")
def _() -> None:
    use_tools(responses)


@check("responses: reasoning")
def _() -> None:
    thinking = OpenAIResponses(
        api_base=BASE_URL, api_key=API_KEY, model="o4-mini", reasoning_options={"effort": "high", "summary": "auto"}
    )
    answer = thinking.chat(ASK)
    expect(answer.message.content == TEXT and REASONING in str(answer.message.blocks), answer.message.blocks)


@check("embeddings")
def _() -> None:
    embedding = OpenAIEmbedding(api_base=BASE_URL, api_key=API_KEY, model="text-embedding-3-small")
    vectors = embedding.get_text_embedding_batch(["a", "b"])
    expect([len(vector) for vector in vectors] == [8, 8], vectors)


@check("error 401")
def _() -> None:
    wrong = OpenAI(api_base=BASE_URL, api_key="sk-wrong", model=KNOWN)
    raises(openai.AuthenticationError, lambda: wrong.chat(ASK))


@check("error 404")
def _() -> None:
    raises(openai.NotFoundError, lambda: faulty("no-such-model").chat(ASK))


@check("error 429")
def _() -> None:
    raises(openai.RateLimitError, lambda: faulty("limited").chat(ASK))


@check("error 503")
def _() -> None:
    raises(openai.InternalServerError, lambda: faulty("down").chat(ASK))


main("llama-index-llms-openai", "llama-index-core", "openai")
