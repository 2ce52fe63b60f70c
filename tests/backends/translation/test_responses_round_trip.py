"""Round trips between chat completions and Responses: nothing is lost, nothing invented, at every chunk split."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from backends.translation.omissions import Omissions
from backends.translation.registry import CHAT_TO_RESPONSES, RESPONSES_TO_CHAT
from tests.support.dialogues import CHAT_REQUESTS, Json, answers, as_stream, assembled, events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {"model": "m", "stream_options": {"include_usage": True}}
TIER = {"service_tier": "default"}  # Open Responses asks for one, where the backend has named none


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def translated(translation: Any, body: Json, parts: list[bytes]) -> bytes:
    stream = translation.stream(body)
    return b"".join(map(stream.feed, parts)) + bytes(stream.close())


@settings(max_examples=100, deadline=None)
@given(CHAT_REQUESTS)
def test_a_chat_request_comes_back_from_responses_as_it_was(request: Json) -> None:
    native = CHAT_TO_RESPONSES.request(request, Omissions())
    assert RESPONSES_TO_CHAT.request(native, Omissions()) == request


@settings(max_examples=100, deadline=None)
@given(CHAT_REQUESTS)
def test_a_responses_request_comes_back_from_chat_as_it_was(request: Json) -> None:
    native = CHAT_TO_RESPONSES.request(request, Omissions())
    again = CHAT_TO_RESPONSES.request(RESPONSES_TO_CHAT.request(native, Omissions()), Omissions())
    assert again == native


@settings(max_examples=100, deadline=None)
@given(answers())
def test_a_whole_answer_comes_back_from_responses_as_it_was(answer: tuple[Json, list[Json]]) -> None:
    whole, _ = answer
    native = RESPONSES_TO_CHAT.reply(whole, {"model": "m"})
    Response.model_validate(native)
    again = CHAT_TO_RESPONSES.reply(json.loads(json.dumps(native)), {"model": "m"})
    assert again == TIER | whole
    ChatCompletion.model_validate({**again, "choices": []})


@settings(max_examples=100, deadline=None)
@given(answers(), st.lists(st.integers(0, 1 << 16), max_size=6), st.lists(st.integers(0, 1 << 16), max_size=6))
def test_a_stream_comes_back_from_responses_as_it_was(
    answer: tuple[Json, list[Json]], cuts: list[int], other_cuts: list[int]
) -> None:
    """And its bytes do not depend on the reads that brought the chunks."""
    whole, chunks = answer
    stream = as_stream(chunks)
    native = translated(RESPONSES_TO_CHAT, {"model": "m"}, [stream])
    assert translated(RESPONSES_TO_CHAT, {"model": "m"}, cut(stream, cuts)) == native
    back = translated(CHAT_TO_RESPONSES, USAGE, [native])
    assert translated(CHAT_TO_RESPONSES, USAGE, cut(native, other_cuts)) == back
    assert assembled(events(back)) == TIER | whole
    for chunk in events(back):
        ChatCompletionChunk.model_validate({**chunk, "choices": []})


@settings(max_examples=100, deadline=None)
@given(answers())
def test_events_are_valid_and_say_what_the_whole_reply_says(answer: tuple[Json, list[Json]]) -> None:
    whole, chunks = answer
    found = events(translated(RESPONSES_TO_CHAT, {"model": "m"}, [as_stream(chunks)]))
    for event in found:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    final = found[-1]["response"]
    assert found[-1]["type"] == f"response.{final['status']}"
    assert final == RESPONSES_TO_CHAT.reply(whole, {"model": "m"})
    assert told(found) == final["output"]


def told(found: list[Json]) -> list[Json]:
    """Output items by their events alone: deltas joined, checked against the `done` events."""
    items: dict[int, Json] = {}
    texts: dict[tuple[int, int], str] = {}
    for event in found:
        place = event.get("output_index", -1), event.get("content_index", 0)
        kind = event["type"]
        if kind == "response.output_item.done":
            items[event["output_index"]] = event["item"]
        elif kind == "response.output_item.added":
            assert event["output_index"] == len({index for index, _ in texts} | set(items))
            texts[place] = ""
        elif kind == "response.content_part.added":
            texts[place] = ""
        elif kind.endswith(".delta"):
            texts[place] += event["delta"]
        elif kind.endswith(".done") and kind != "response.content_part.done":
            text = next(event[name] for name in ("text", "refusal", "arguments", "input") if name in event)
            assert text == texts[place]
    return [items[index] for index in sorted(items)]
