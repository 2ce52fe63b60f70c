"""Replies that cannot be translated: malformed ones are the fault of the backend, others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Operation
from backends.translation import translation
from backends.translation.registry import chain
from backends.translation.reply_translation import AnswerTranslation, ReplyShapeError
from tests.support.dialect_strategies import Json, named_sse

CALLED = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}
OTHER = {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}


def answer(caller: Operation, backend: Operation) -> AnswerTranslation:
    steps = chain(caller, frozenset({backend}))
    assert steps
    return AnswerTranslation(steps, [{"model": "m"}] * len(steps))


def of_chat(**message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()


def of_messages(*content: Any) -> bytes:
    return json.dumps({"content": content}).encode()


def chunk(*calls: Json) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": calls}}]}).encode()


MALFORMED = [
    (Operation.MESSAGES, Operation.CHAT, b'{"choices": [{"mess'),
    (Operation.MESSAGES, Operation.CHAT, b"<html>"),
    (Operation.MESSAGES, Operation.CHAT, b"[1]"),
    (Operation.MESSAGES, Operation.CHAT, b'{"choices": []}'),
    (Operation.MESSAGES, Operation.CHAT, b'{"detail": "Not Found"}'),
    (Operation.MESSAGES, Operation.CHAT, of_chat(tool_calls=[{"id": "a", "function": {"arguments": "{}"}}])),
    (Operation.RESPONSES, Operation.CHAT, b"nonsense"),
    (Operation.CHAT, Operation.RESPONSES, b"nonsense"),
    (Operation.CHAT, Operation.MESSAGES, b'{"content": null}'),
    (Operation.CHAT, Operation.MESSAGES, of_messages({"text": "x"})),
    (Operation.RESPONSES, Operation.MESSAGES, of_messages("x")),
]


@pytest.mark.parametrize(("caller", "backend", "reply"), MALFORMED, ids=[repr(row[2][:30]) for row in MALFORMED])
def test_a_reply_of_another_shape_is_the_fault_of_the_backend(
    caller: Operation, backend: Operation, reply: bytes
) -> None:
    with pytest.raises(ReplyShapeError) as raised:
        answer(caller, backend).whole(reply)
    assert raised.value.malformed


@pytest.mark.parametrize(
    ("caller", "backend", "event"),
    [
        (Operation.MESSAGES, Operation.CHAT, b'data: {"choices": [5]}\n\n'),
        (Operation.CHAT, Operation.MESSAGES, next(iter(named_sse(iter([{"type": "content_block_delta"}]))))),
    ],
)
def test_an_event_of_another_shape_is_the_fault_of_the_backend(
    caller: Operation, backend: Operation, event: bytes
) -> None:
    with pytest.raises(ReplyShapeError) as raised:
        answer(caller, backend).stream().feed(event)
    assert raised.value.malformed


def test_a_call_without_a_name_is_the_fault_of_the_backend() -> None:
    stream = answer(Operation.MESSAGES, Operation.CHAT).stream()
    stream.feed(chunk({"index": 0, "function": {"arguments": "{}"}}))
    with pytest.raises(ReplyShapeError) as raised:
        stream.feed(b"data: [DONE]\n\n")
    assert raised.value.malformed


def test_a_call_that_goes_on_after_its_end_is_no_fault_of_the_backend() -> None:
    """Arguments may be any text in a chat; a block of Messages has ended where the next one begins."""
    stream = answer(Operation.MESSAGES, Operation.CHAT).stream()
    stream.feed(chunk({**CALLED, "function": {"name": "f", "arguments": "{}"}}) + chunk(OTHER))
    with pytest.raises(ReplyShapeError) as raised:
        stream.feed(chunk({"index": 0, "function": {"arguments": "{}"}}))
    assert not raised.value.malformed


@pytest.mark.parametrize("caller", [Operation.MESSAGES, Operation.RESPONSES])
def test_an_answer_too_long_to_be_kept_is_no_fault_of_the_backend(
    caller: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "KEPT_LIMIT", 1000)
    stream = answer(caller, Operation.CHAT).stream()
    stream.feed(chunk(CALLED))
    with pytest.raises(ReplyShapeError) as raised:
        stream.feed(chunk({**OTHER, "function": {"name": "g", "arguments": "x" * 2000}}))
    assert not raised.value.malformed


@pytest.mark.parametrize("caller", [Operation.MESSAGES, Operation.RESPONSES])
def test_additions_of_python_servers_are_read_in_a_whole_reply_as_in_a_stream(caller: Operation) -> None:
    r"""NaN and halves of surrogate pairs."""
    reply = b'{"choices": [{"logprobs": NaN, "message": {"content": "a\\ud83d"}, "finish_reason": "stop"}]}'
    assert b"a?" in answer(caller, Operation.CHAT).whole(reply)
