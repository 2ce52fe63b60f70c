"""The opening of a streamed answer, in every dialect, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Tap
from backends.stream.answer_opening import MAX_OPENING, AnswerOpening
from backends.stream.messages_tap import MessagesTap
from backends.stream.responses_tap import ResponsesTap
from backends.stream.taps import StreamTap

DONE = b"data: [DONE]\n\n"


def chat(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


def named(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


def block(**members: Any) -> bytes:
    return named("content_block_start", index=0, content_block=members)


def part(**members: Any) -> bytes:
    return named("content_block_delta", index=0, delta=members)


def words(kind: str, delta: str) -> bytes:
    return named(kind, delta=delta, sequence_number=3)


ROLE = chat(role="assistant", content="")
START = named("message_start", message={"id": "m", "usage": {"input_tokens": 3, "output_tokens": 1}})
BLOCK = block(type="text", text="")
CREATED = named("response.created", response={"id": "r", "status": "in_progress"})
TEXT = "response.output_text.delta"
STREAMS: dict[str, tuple[type[Any], list[bytes]]] = {
    "chat": (StreamTap, [ROLE, chat(content="I'm "), chat(content="sorry"), chat("stop"), DONE]),
    "messages": (
        MessagesTap,
        [
            *(START, BLOCK, part(type="text_delta", text="I'm "), part(type="text_delta", text="sorry")),
            *(named("message_delta", delta={"stop_reason": "stop"}), named("message_stop")),
        ],
    ),
    "responses": (
        ResponsesTap,
        [
            *(CREATED, words(TEXT, "I'm "), words(TEXT, "sorry")),
            named("response.incomplete", response={"incomplete_details": {"reason": "stop"}}),
        ],
    ),
}


def fed(tap: Tap, reads: list[bytes], tokens: int = 40) -> tuple[AnswerOpening, list[bool]]:
    opening = AnswerOpening(tap, tokens)
    complete = []
    for read in reads:
        tap.feed(read)
        complete.append(opening.feed(read))
    return opening, complete


@pytest.mark.parametrize("dialect", STREAMS)
def test_text_and_reason_of_the_end_are_read_at_every_cut(dialect: str) -> None:
    kind, events = STREAMS[dialect]
    data = b"".join(events)
    for at in range(1, len(data)):
        opening, complete = fed(kind(), [data[:at], data[at:]])
        assert (opening.text, opening.ends, opening.is_text, complete[1]) == ("I'm sorry", {"stop"}, True, True)


@pytest.mark.parametrize("dialect", STREAMS)
def test_an_opening_is_complete_with_its_last_token(dialect: str) -> None:
    kind, events = STREAMS[dialect]
    opening, complete = fed(kind(), events, tokens=2)
    before = next(at for at, event in enumerate(events) if b"sorry" in event)
    assert complete[: before + 1] == [False] * before + [True]
    assert opening.text == "I'm sorry"


def test_an_event_with_much_text_has_several_tokens() -> None:
    """Some servers send a sentence at a time."""
    _, complete = fed(StreamTap(), [ROLE, chat(content="word " * 40)], tokens=40)
    assert complete == [False, True]


@pytest.mark.parametrize(
    ("tap", "event"),
    [
        (StreamTap, chat(reasoning_content="hm")),
        (StreamTap, chat(tool_calls=[{"index": 0, "function": {"name": "f"}}])),
        (StreamTap, chat(function_call={"name": "f"})),
        (StreamTap, chat(audio={"data": "AAAA"})),
        (StreamTap, chat(content=[{"type": "text", "text": "hi"}])),
        (MessagesTap, block(type="tool_use", id="t", name="f", input={})),
        (MessagesTap, part(type="thinking_delta", thinking="hm")),
        (MessagesTap, part(type="input_json_delta", partial_json="{")),
        (ResponsesTap, words("response.function_call_arguments.delta", "{")),
        (ResponsesTap, words("response.reasoning_summary_text.delta", "hm")),
    ],
)
def test_output_of_another_kind_ends_an_opening_at_once(tap: type[Any], event: bytes) -> None:
    """Only text is judged; a caller that waits for a tool call waits for nothing else."""
    opening, complete = fed(tap(), [event])
    assert (opening.is_text, complete) == (False, [True])


@pytest.mark.parametrize(
    ("tap", "event"), [(StreamTap, chat(refusal="No")), (ResponsesTap, words("response.refusal.delta", "No"))]
)
def test_a_refusal_of_the_dialects_own_form_is_noted(tap: type[Any], event: bytes) -> None:
    opening, complete = fed(tap(), [event])
    assert (opening.refused, opening.text, complete) == (True, "", [False])


def test_half_a_surrogate_pair_is_text() -> None:
    """As from servers that cut JSON's escapes into tokens: a client joins the halves."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
    opening, complete = fed(StreamTap(), [event % rb"hi \ud83d", event % rb"\ude00"])
    assert (opening.text, opening.is_text, complete) == ("hi \ud83d\ude00", True, [False, False])


def test_an_error_and_a_flood_end_an_opening() -> None:
    _, complete = fed(StreamTap(), [chat(content="hi"), b'data: {"error":{"message":"x"}}\n\n'])
    assert complete == [False, True]
    flood = b": x\n\n" * (MAX_OPENING // 5)
    _, complete = fed(StreamTap(), [flood, chat(content="hi"), flood])
    assert complete == [False, False, True]
