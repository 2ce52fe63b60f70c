"""A translated response has every member that Open Responses (2026-04-24) requires, with a value of its type."""

from __future__ import annotations

from typing import Any

import pytest

from backends.translation.registry import RESPONSES_TO_CHAT
from tests.support.dialogues import Json, as_stream, events
from tests.support.open_responses import faults

CHUNKS: list[Json] = [
    {"id": "c", "created": 7, "model": "m", "choices": [{"index": 0, "delta": {"content": "hi"}}]},
    {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
TOOL: Json = {"type": "function", "name": "look"}


def responses(body: Json, *last: Json) -> list[Json]:
    """The responses of a stream: as created, in progress, and at the end."""
    stream = RESPONSES_TO_CHAT.stream(body)
    told = events(stream.feed(as_stream([*CHUNKS, *last])) + stream.close())
    return [event["response"] for event in told if "response" in event]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"reasoning": {"effort": "low"}},
        {"reasoning": {"summary": "auto"}},
        {"text": {"verbosity": "low"}},
        {"tools": [TOOL]},
        {"tools": [{**TOOL, "description": "d", "parameters": {"type": "object"}, "strict": True}]},
        {"temperature": None, "top_p": None, "service_tier": None, "instructions": "be brief"},
    ],
)
def test_every_required_member_is_there_from_the_first_event_to_the_last(asked: Json) -> None:
    found = responses({"model": "m", **asked})
    assert [response["status"] for response in found] == ["in_progress", "in_progress", "completed"]
    assert [faults(response) for response in found] == [[], [], []]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.2),
        ("top_p", 0.5),
        ("presence_penalty", 1.5),
        ("frequency_penalty", -1.0),
        ("metadata", {"a": "b"}),
    ],
)
def test_a_member_that_the_caller_set_has_the_callers_value(name: str, value: Any) -> None:
    assert [response[name] for response in responses({"model": "m", name: value})] == [value] * 3


def test_what_the_caller_set_within_an_object_stays_beside_the_defaults() -> None:
    tool = {**TOOL, "strict": True}
    asked = {"model": "m", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "tools": [tool]}
    last = responses(asked)[-1]
    assert last["reasoning"] == {"effort": "low", "summary": None}
    assert last["text"] == {"verbosity": "low", "format": {"type": "text"}}
    assert last["tools"] == [{**tool, "description": None, "parameters": None}]


@pytest.mark.parametrize(("named", "told"), [("flex", "flex"), (None, "auto")])
def test_the_service_tier_is_the_backends_and_else_the_one_asked_for(named: str | None, told: str) -> None:
    tier = {"choices": [], "service_tier": named}
    assert responses({"model": "m", "service_tier": "auto"}, tier)[-1]["service_tier"] == told
