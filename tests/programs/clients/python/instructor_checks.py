"""Modes of Instructor: tools, JSON, JSON schema, Responses, Anthropic's tools; streamed partials and lists."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from harness import API_KEY, BASE_URL, MODEL, ROOT_URL, check, expect, main
from instructor.core import InstructorRetryException
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: int
    sunny: bool


EXPECTED = {"city": "Paris", "temperature": 21, "sunny": True}


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=mode)


def extract(mode: instructor.Mode) -> None:
    answer, completion = client(mode).chat.completions.create_with_completion(
        model=MODEL, messages=ASK, response_model=Weather, max_retries=0
    )
    expect(answer.model_dump() == EXPECTED and completion.usage, answer)


check("chat: tools")(lambda: extract(instructor.Mode.TOOLS))
check("chat: strict tools")(lambda: extract(instructor.Mode.TOOLS_STRICT))
check("chat: JSON")(lambda: extract(instructor.Mode.JSON))
check("chat: JSON schema")(lambda: extract(instructor.Mode.JSON_SCHEMA))


@check("chat: partial objects, streamed")
def _() -> None:
    stream = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=ASK, response_model=Weather
    )
    partials = list(stream)
    expect(len(partials) > 2 and partials[-1].model_dump() == EXPECTED, partials[-3:])


@check("chat: lists, streamed")
def _() -> None:
    found = list(
        client(instructor.Mode.TOOLS).chat.completions.create_iterable(
            model=MODEL, messages=ASK, response_model=Weather
        )
    )
    expect([item.model_dump() for item in found] == [EXPECTED], found)


@check("chat: async")
async def _() -> None:
    aclient = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
    answer = await aclient.chat.completions.create(model=MODEL, messages=ASK, response_model=Weather)
    expect(answer.model_dump() == EXPECTED, answer)


@check("responses: tools")
def _() -> None:
    answer = client(instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, input="hello", response_model=Weather
    )
    expect(answer.model_dump() == EXPECTED, answer)


@check("messages: tools")
def _() -> None:
    wrapped = instructor.from_anthropic(anthropic.Anthropic(base_url=ROOT_URL, api_key=API_KEY))
    answer = wrapped.messages.create(model=MODEL, max_tokens=500, messages=ASK, response_model=Weather)
    expect(answer.model_dump() == EXPECTED, answer)


@check("error 404")
def _() -> None:
    try:
        client(instructor.Mode.TOOLS).chat.completions.create(
            model="no-such-model", messages=ASK, response_model=Weather, max_retries=0
        )
    except (openai.NotFoundError, InstructorRetryException) as error:
        expect("no-such-model" in str(error) or "404" in str(error), error)
        return
    raise AssertionError("no error")


main("instructor", "openai", "anthropic")
