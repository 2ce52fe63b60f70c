"""The judgement of answers, in each dialect; hostile schemas cost nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Operation
from backends.stream.answer_opening import AnswerOpening
from backends.stream.taps import StreamTap
from gateway.api.answer_quality import held_tokens, shortcoming, shortcoming_of_opening
from tests.support.builders import request, route

ALL = ("refusal", "refusal_text", "language", "length", "invalid_json")
REFUSAL = "I'm sorry, but I can't help with that."
RUSSIAN, ENGLISH = "Почему небо голубое, объясни мне.", "The sky is blue because of the scattering of light."
PARTS = [{"role": "user", "content": [{"type": "text", "text": RUSSIAN}]}, {"role": "assistant", "content": "x"}]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
DOUBLING = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
WANTED = {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}


def responses(text: str, **more: Any) -> dict[str, Any]:
    return {"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}], **more}


def messages(text: str, reason: str = "end_turn") -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "stop_reason": reason}


@pytest.mark.parametrize(
    ("operation", "body", "reply", "found"),
    [
        (Operation.MESSAGES, {}, messages("fine"), ""),
        (Operation.MESSAGES, {}, messages("", "refusal"), "refusal"),
        (Operation.MESSAGES, {}, messages("and", "max_tokens"), "length"),
        (Operation.MESSAGES, {"output_config": {"format": WANTED}}, messages("{}"), "invalid_json"),
        (Operation.MESSAGES, {"output_config": {"format": WANTED}}, messages('{"a": 1}'), ""),
        (Operation.RESPONSES, {}, responses("fine"), ""),
        (Operation.RESPONSES, {}, {"output": [{"type": "message", "content": [{"type": "refusal"}]}]}, "refusal"),
        (Operation.RESPONSES, {}, responses("a", incomplete_details={"reason": "max_output_tokens"}), "length"),
        (Operation.RESPONSES, {"text": {"format": WANTED}}, responses("no"), "invalid_json"),
        (Operation.RESPONSES, {"text": {"format": {"type": "json_object"}}}, responses("{}"), ""),
        (Operation.MESSAGES, {"messages": PARTS}, messages(REFUSAL), "refusal_text"),
        (Operation.RESPONSES, {"input": RUSSIAN}, responses(REFUSAL), "refusal_text"),
        (Operation.RESPONSES, {"text": {"format": WANTED}}, responses(REFUSAL), "refusal_text"),
        (Operation.MESSAGES, {"messages": PARTS}, messages(ENGLISH), "language"),
        (Operation.MESSAGES, {"messages": PARTS, "system": "Answer in English."}, messages(ENGLISH), ""),
        (Operation.RESPONSES, {"input": RUSSIAN}, responses(ENGLISH), "language"),
        (Operation.RESPONSES, {"input": PARTS}, responses(ENGLISH), "language"),
        (Operation.RESPONSES, {"input": RUSSIAN, "instructions": "Speak English."}, responses(ENGLISH), ""),
        (Operation.EMBEDDINGS, {}, {"data": []}, ""),
        (Operation.CHAT, {}, {"choices": 5}, ""),
        (Operation.CHAT, {}, [], ""),
    ],
)
def test_a_shortcoming_is_what_a_reader_of_the_dialect_sees(
    operation: Operation, body: dict[str, Any], reply: Any, found: str
) -> None:
    assert shortcoming(operation, body, json.dumps(reply).encode(), ALL) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "#"},
        {"type": "no such type"},
        {"type": "object", "properties": {str(number): {"type": "string"} for number in range(4000)}},
        {"$ref": "#/$defs/0", "$defs": {**DOUBLING, "40": {"type": "number"}}},
        {"$ref": "#/$defs/0", "$defs": {n: {**each, "$schema": DRAFT} for n, each in DOUBLING.items()} | {"40": False}},
    ],
)
def test_a_hostile_schema_neither_fails_nor_blocks(schema: dict[str, Any]) -> None:
    """A regular expression of exponential time, a reference to another server, an endless one, nonsense, 100 KB, and
    references that double the work 40 times."""
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    reply = {"choices": [{"message": {"content": json.dumps("a" * 60 + "!")}, "finish_reason": "stop"}]}
    assert shortcoming(Operation.CHAT, body, json.dumps(reply).encode(), ALL) in ("", "invalid_json")


# --------------------------------------------------------------------------- openings


def judged(text: str, *, is_complete: bool = False, is_text: bool = True, **body: Any) -> str:
    """By a chat's body as it is read: messages are not decoded."""
    opening = AnswerOpening(StreamTap(), 40)
    opening.text, opening.is_text = text, is_text
    asked = request(stream=True, **body)
    return shortcoming_of_opening(asked.operation, asked.body, opening, ALL, is_complete=is_complete)


JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("text", "body", "found"),
    [
        ("Fine", {}, ""),
        ("", {}, ""),
        (REFUSAL, {}, "refusal_text"),
        (ENGLISH, {"messages": PARTS}, "language"),
        (ENGLISH, {"messages": [{"role": "system", "content": "Answer in English."}, *PARTS]}, ""),
        ('{"a": [1, "b', JSON, ""),
        ("Sure, here", JSON, "invalid_json"),
        ("Sure, here" * 7000, JSON, ""),
        (ENGLISH, {"messages": PARTS, **JSON}, "invalid_json"),
    ],
)
def test_the_opening_of_a_stream_is_judged_as_the_beginning_of_an_answer(
    text: str, body: dict[str, Any], found: str
) -> None:
    assert judged(text, **body) == found


def test_a_whole_answer_within_the_opening_is_judged_by_its_schema() -> None:
    assert judged('{"a": [1', is_complete=True, **JSON) == "invalid_json"


def test_an_opening_that_goes_on_with_another_output_has_no_shortcoming_of_its_text() -> None:
    """A model that calls a tool has not refused."""
    assert judged(REFUSAL, is_text=False) == ""


@pytest.mark.parametrize(
    ("escalate", "asked", "tokens"),
    [
        ({"when": ["refusal"], "hold": 40}, {"stream": True}, 40),
        ({"when": ["refusal"], "hold": 40}, {}, 0),
        ({"when": ["refusal"], "hold": 40}, {"stream": True, "n": 2}, 0),
        (["refusal"], {"stream": True}, 0),
    ],
)
def test_tokens_are_held_of_single_streams_alone(escalate: Any, asked: dict[str, Any], tokens: int) -> None:
    assert held_tokens(route(tiers=["small", "large"], escalate=escalate), request(**asked)) == tokens
    assert held_tokens(route(tiers=["small"], escalate=escalate), request(**asked)) == 0
