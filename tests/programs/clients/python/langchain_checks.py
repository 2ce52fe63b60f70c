"""LangChain's chat model and embeddings for OpenAI."""

from __future__ import annotations

import openai
from harness import (
    API_KEY,
    BASE_URL,
    CITIES,
    IMAGE,
    IMAGE_SEEN,
    LONG,
    MODEL,
    REASONING_TOKENS,
    STATEFUL_TURNS,
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
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

llm = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model=MODEL, timeout=15)
responses = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model=MODEL, timeout=15, use_responses_api=True)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: int
    sunny: bool


@tool
def get_weather(city: str) -> str:
    """Weather now."""
    return f"{city}: snow"


def faulty(model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model=model, max_retries=0)


def use_tools(model: ChatOpenAI) -> None:
    """Two calls at once, and both results."""
    bound = model.bind_tools([get_weather])
    asked = bound.invoke(CITIES)
    expect([call["args"]["city"] for call in asked.tool_calls] == ["Paris", "Rome"], asked)
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls]
    answer = bound.invoke([HumanMessage(CITIES), asked, *results])
    expect(answer.text == "The tools say: Paris: snow; Rome: snow", answer)


@check("chat")
def _() -> None:
    answer = llm.invoke("hello")
    expect(answer.text == TEXT and answer.response_metadata["finish_reason"] == "stop", answer)


@check("chat: usage")
def _() -> None:
    usage = llm.invoke("hello").usage_metadata
    expect(usage and usage["output_tokens"] == TEXT_TOKENS and usage["input_tokens"] > 0, usage)


@check("chat: stream with usage")
def _() -> None:
    chunks = list(llm.stream("hello", stream_usage=True))
    expect("".join(chunk.text for chunk in chunks) == TEXT, chunks)
    expect(any(chunk.usage_metadata for chunk in chunks), "no usage")


@check("chat: async batch")
async def _() -> None:
    answers = await llm.abatch(["hello"] * 8)
    expect([answer.text for answer in answers] == [TEXT] * 8, answers)


@check("chat: tools")
def _() -> None:
    use_tools(llm)


@check("chat: tools, streamed")
def _() -> None:
    chunks = list(llm.bind_tools([get_weather]).stream(CITIES))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect([call["args"]["city"] for call in whole.tool_calls] == ["Paris", "Rome"], whole)


@check("chat: structured output")
def _() -> None:
    answer = llm.with_structured_output(Weather).invoke("hello")
    expect(answer == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("chat: structured output by a tool")
def _() -> None:
    answer = llm.with_structured_output(Weather, method="function_calling").invoke("hello")
    expect(answer == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("chat: images")
def _() -> None:
    picture = {"type": "image", "base64": IMAGE, "mime_type": "image/png"}
    answer = llm.invoke([HumanMessage([{"type": "text", "text": "what is this?"}, picture])])
    expect(answer.text == IMAGE_SEEN, answer)


@check("chat: cached tokens")
def _() -> None:
    llm.invoke("LangChain. " + LONG)
    usage = llm.invoke("LangChain. " + LONG).usage_metadata
    expect(usage and usage["input_token_details"]["cache_read"] >= 192, usage)


@check("chat: abort")
def _() -> None:
    before = seen()["aborts"]
    stream = llm.stream("count to 1000")
    for chunk in stream:
        if chunk.text:
            break
    stream.close()
    aborted(before)


@check("responses")
def _() -> None:
    answer = responses.invoke("hello")
    expect(answer.text == TEXT and answer.usage_metadata, answer)


@check("responses: stream")
def _() -> None:
    chunks = list(responses.stream("hello"))
    expect("".join(chunk.text for chunk in chunks) == TEXT, chunks)


@check("responses: tools")
def _() -> None:
    use_tools(responses)


@check("responses: structured output")
def _() -> None:
    answer = responses.with_structured_output(Weather).invoke("hello")
    expect(answer == Weather(city="Paris", temperature=21, sunny=True), answer)


@check("responses: reasoning")
def _() -> None:
    thinking = ChatOpenAI(
        base_url=BASE_URL, api_key=API_KEY, model=MODEL, reasoning={"effort": "high", "summary": "auto"}
    )
    answer = thinking.invoke("hello")
    expect(answer.text == TEXT, answer)
    usage = answer.usage_metadata
    expect(usage and usage["output_token_details"]["reasoning"] == REASONING_TOKENS, usage)


@check("responses: previous response")
def _() -> None:
    chained = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model="stateful", use_previous_response_id=True)
    first = chained.invoke(TURN)
    second = chained.invoke([HumanMessage(TURN), first, HumanMessage(TURN)])
    expect((first.text, second.text) in STATEFUL_TURNS, (first.text, second.text))


@check("embeddings")
def _() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=BASE_URL, api_key=API_KEY, model=MODEL, check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    expect([len(vector) for vector in embeddings] == [8, 8] and embeddings[0] != embeddings[1], embeddings)


@check("error 401")
def _() -> None:
    wrong = ChatOpenAI(base_url=BASE_URL, api_key="sk-wrong", model=MODEL)
    raises(openai.AuthenticationError, lambda: wrong.invoke("hello"))


@check("error 404")
def _() -> None:
    raises(openai.NotFoundError, lambda: faulty("no-such-model").invoke("hello"))


@check("error 429")
def _() -> None:
    raises(openai.RateLimitError, lambda: faulty("limited").invoke("hello"))


@check("error 503")
def _() -> None:
    raises(openai.InternalServerError, lambda: faulty("down").invoke("hello"))


main("langchain-openai", "openai")
