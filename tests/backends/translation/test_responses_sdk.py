"""The OpenAI SDK reads translated Responses: whole, streamed, accumulated and parsed into models.

The transport hands the bytes over in small reads; sockets are in tests/e2e/test_responses.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import BaseModel

from backends.interface import Failure, FailureKind
from backends.translation.registry import CHAT_TO_RESPONSES, RESPONSES_TO_CHAT
from tests.backends.translation.test_responses_to_chat import chunk
from tests.support.dialogues import Json, answers, as_stream

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


class Torn(httpx2.SyncByteStream):
    """A body in reads of 7 bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        return (self._data[at : at + 7] for at in range(0, len(self._data), 7))


def client(body: bytes, kind: str) -> OpenAI:
    def handle(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": kind}, stream=Torn(body))

    http = httpx2.Client(transport=httpx2.MockTransport(handle))
    return OpenAI(base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=http)


def whole(reply: Json, body: Json | None = None) -> OpenAI:
    return client(json.dumps(RESPONSES_TO_CHAT.reply(reply, body or {"model": "m"})).encode(), "application/json")


def streamed(chunks: list[Json], body: Json | None = None) -> OpenAI:
    stream = RESPONSES_TO_CHAT.stream(body or {"model": "m"})
    return client(stream.feed(as_stream(chunks)) + stream.close(), "text/event-stream")


def text_of(message: Json) -> str:
    return message["content"] or ""


@settings(max_examples=60, deadline=None)
@given(answers(), st.sampled_from([None, "auto", "concise", "detailed"]))
def test_whole_and_streamed_answers_are_the_same_to_the_sdk(answer: tuple[Json, list[Json]], wish: str | None) -> None:
    """Also where the caller asks for a summary of the reasoning."""
    reply, chunks = answer
    message = reply["choices"][0]["message"]
    body = {"model": "m", "reasoning": {"summary": wish}}
    got = whole(reply, body).responses.create(model="m", input="hi")
    events = list(streamed(chunks, body).responses.create(model="m", input="hi", stream=True))
    assert got.output_text == text_of(message)
    assert events[-1].response.to_dict() == got.to_dict()
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == got.output_text
    assert got.usage is not None
    assert got.usage.input_tokens_details.cached_tokens == reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@settings(max_examples=60, deadline=None)
@given(answers())
def test_the_sdk_accumulates_a_stream(answer: tuple[Json, list[Json]]) -> None:
    reply, chunks = answer
    message, reason = reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]
    with streamed(chunks).responses.stream(model="m", input="hi") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        if reason in ("stop", "tool_calls"):
            assert stream.get_final_response().output_text == text_of(message)
    assert (snapshots or [""])[-1] == text_of(message)


@settings(max_examples=60, deadline=None)
@given(answers())
def test_the_sdk_reads_chat_completions_made_of_responses(answer: tuple[Json, list[Json]]) -> None:
    reply, chunks = answer
    native = RESPONSES_TO_CHAT.stream({"model": "m"})
    stream = CHAT_TO_RESPONSES.stream({"model": "m"})
    body = stream.feed(native.feed(as_stream(chunks))) + stream.close()
    got = list(
        client(body, "text/event-stream").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
    )
    text = "".join(each.choices[0].delta.content or "" for each in got)
    assert text == text_of(reply["choices"][0]["message"])
    assert got[-1].choices[0].finish_reason == reply["choices"][0]["finish_reason"]


THOUGHT = {"role": "assistant", "reasoning": "so it is", "content": "Oslo"}


def test_reasoning_is_its_own_summary_for_a_caller_that_asks_for_one() -> None:
    """LlamaIndex, Pydantic AI, Vercel's AI SDK and Codex show summaries alone."""
    body = {"model": "m", "reasoning": {"summary": "auto"}}
    reply = {"id": "x", "created": 1, "model": "m", "choices": [{"message": THOUGHT, "finish_reason": "stop"}]}
    item: Any = whole(reply, body).responses.create(model="m", input="hi").output[0]
    assert ([part.text for part in item.summary], item.content) == (["so it is"], [])
    chunks = [chunk({"reasoning": "so "}), chunk({"reasoning": "it is"}), chunk({"content": "Oslo"}, "stop")]
    events: list[Any] = list(streamed(chunks, body).responses.create(model="m", input="hi", stream=True))
    names = [event.type.removeprefix("response.reasoning_summary_") for event in events if "summary" in event.type]
    assert names == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
    assert {event.summary_index for event in events if "summary" in event.type} == {0}
    assert [event.delta for event in events if event.type.endswith("summary_text.delta")] == ["so ", "it is"]


def test_reasoning_is_given_as_it_is_where_no_summary_is_asked_for() -> None:
    reply = {"id": "x", "created": 1, "model": "m", "choices": [{"message": THOUGHT, "finish_reason": "stop"}]}
    item: Any = whole(reply).responses.create(model="m", input="hi").output[0]
    assert ([part.text for part in item.content], item.summary) == (["so it is"], [])


class City(BaseModel):
    name: str


def test_the_sdk_parses_structured_output_and_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"at": "here"}'}}
    message = {"role": "assistant", "content": '{"name": "Oslo"}', "tool_calls": [call]}
    reply = {"id": "x", "created": 1, "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    parsed: Any = whole(reply).responses.parse(model="m", input="hi", text_format=City, tools=[WEATHER])  # type: ignore[list-item]
    assert parsed.output_parsed == City(name="Oslo")
    assert parsed.output[1].parsed_arguments == {"at": "here"}


def test_a_broken_stream_tells_the_sdk_the_error() -> None:
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    data = stream.feed(as_stream([chunk({"content": "a"})]).removesuffix(b"data: [DONE]\n\n"))
    data += stream.error(Failure(FailureKind.RESET, "The backend broke."))
    *_, last = client(data, "text/event-stream").responses.create(model="m", input="hi", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The backend broke."


def test_a_broken_chat_stream_raises_in_the_sdk() -> None:
    stream = CHAT_TO_RESPONSES.stream({"model": "m"})
    data = stream.error(Failure(FailureKind.RESET, "The backend broke."))
    sdk = client(data, "text/event-stream")
    with pytest.raises(openai.APIError, match="The backend broke"):
        list(sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True))
