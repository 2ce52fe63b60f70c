"""The judgement of answers, in each dialect; hostile schemas cost nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backends.interface import Operation
from gateway.core.hooks import NO_HOOKS, RoutePlan
from gateway.parts.escalation.answer_quality import Escalations, shortcoming
from tests.support.builders import request, route

ALL = ("refusal", "empty", "length", "invalid_json")
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
        (Operation.MESSAGES, {}, messages("and", "max_tokens"), "length"),
        (Operation.MESSAGES, {"output_config": {"format": WANTED}}, messages("{}"), "invalid_json"),
        (Operation.MESSAGES, {"output_config": {"format": WANTED}}, messages('{"a": 1}'), ""),
        (Operation.RESPONSES, {}, responses("fine"), ""),
        (Operation.RESPONSES, {}, {"output": [{"type": "message", "content": [{"type": "refusal"}]}]}, "refusal"),
        (Operation.RESPONSES, {}, responses("a", incomplete_details={"reason": "max_output_tokens"}), "length"),
        (Operation.RESPONSES, {"text": {"format": WANTED}}, responses("no"), "invalid_json"),
        (Operation.RESPONSES, {"text": {"format": {"type": "json_object"}}}, responses("{}"), ""),
        (Operation.CHAT, {}, {"choices": [{"message": {"content": "fine"}}, {"message": {"content": " \n"}}]}, ""),
        (Operation.CHAT, {}, {"choices": [{"message": {"content": None, "reasoning": "so"}}]}, "empty"),
        (Operation.CHAT, {}, {"choices": [{"message": {"content": "", "tool_calls": [{"id": "1"}]}}]}, ""),
        (Operation.MESSAGES, {}, messages(" "), "empty"),
        (Operation.MESSAGES, {}, messages("", "refusal"), "refusal"),
        (Operation.RESPONSES, {}, {"output": [{"type": "reasoning"}]}, "empty"),
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


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"message": {"content": [{"type": "text"}]}, "finish_reason": []}]},
        {"choices": [{"message": "text"}]},
        {"choices": [{"message": {"content": {"text": 5}}}]},
    ],
)
def test_an_answer_of_a_shape_unknown_is_kept(reply: Any) -> None:
    assert shortcoming(Operation.CHAT, {}, json.dumps(reply).encode(), ALL) == ""


def test_a_fault_of_the_judge_keeps_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is logged."""

    def fails(*_: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr("gateway.parts.escalation.answer_quality._is_valid", fails)
    body = {"response_format": {"type": "json_object"}}
    reply = {"choices": [{"message": {"content": "no"}}]}
    assert shortcoming(Operation.CHAT, body, json.dumps(reply).encode(), ALL) == ""
    assert "the answer is kept" in caplog.text


def test_answers_are_judged_on_routes_that_want_it_alone() -> None:
    """A judged answer is asked for whole."""
    judges, ask = Escalations(cast("Any", SimpleNamespace(routes=SimpleNamespace(all=())))), request()
    (plain, judged) = (
        RoutePlan(cast("Any", None), route(**on), Operation.CHAT) for on in ({}, {"escalate": ["empty"]})
    )
    assert judges.on(plain) is NO_HOOKS
    assert (judge := judges.on(judged).judge) is not None
    empty = {"choices": [{"message": {"content": " "}, "finish_reason": "stop"}]}
    assert (judge.objection(ask, json.dumps(empty).encode()), judge.objection(ask, b"junk")) == ("empty", "")
