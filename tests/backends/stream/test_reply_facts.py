"""Members of a reply that traces name: id, tier and reasons of its end, tokens of reasoning, in all dialects."""

from __future__ import annotations

import json

import pytest

from backends.interface import Tap
from backends.stream.native_taps import MessagesBodyTap, MessagesTap, ResponsesBodyTap, ResponsesTap
from backends.stream.taps import BodyTap, StreamTap

Json = dict[str, object]


def events(*listed: Json) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(e.get("type", "x")).encode(), json.dumps(e).encode()) for e in listed
    )


def choice(number: int, reason: str | None) -> Json:
    return {"index": number, "delta": {"content": "x"}, "message": {"content": "x"}, "finish_reason": reason}


CHAT: Json = {"id": "c", "service_tier": "flex"}
CHAT_USAGE: Json = {"usage": {"completion_tokens_details": {"reasoning_tokens": 8}}}
MESSAGE: Json = {"id": "m", "content": [{"type": "text", "text": "x"}]}
MESSAGE_USAGE: Json = {"usage": {"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 8}}}
RESPONSE: Json = {
    "id": "r",
    "service_tier": "flex",
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "output": [{}],
    "usage": {"output_tokens_details": {"reasoning_tokens": 8}},
}

REPLIES: dict[str, tuple[Tap, bytes, tuple[object, ...]]] = {
    "chat, streamed": (
        StreamTap(choices=2),
        events(
            {**CHAT, "choices": [choice(0, None), choice(1, "stop")]},
            {**CHAT, "choices": [choice(0, "length")]},
            {"choices": [], **CHAT_USAGE},
        ),
        ("c", "flex", {0: "length", 1: "stop"}),
    ),
    "chat, whole": (
        BodyTap(),
        json.dumps({**CHAT, **CHAT_USAGE, "choices": [choice(0, "length"), choice(1, None)]}).encode(),
        ("c", "flex", {0: "length"}),
    ),
    "messages, streamed": (
        MessagesTap(),
        events(
            {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 1}}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **MESSAGE_USAGE},
        ),
        ("m", None, {0: "end_turn"}),
    ),
    "messages, whole": (
        MessagesBodyTap(),
        json.dumps({**MESSAGE, **MESSAGE_USAGE, "stop_reason": "end_turn"}).encode(),
        ("m", None, {0: "end_turn"}),
    ),
    "responses, streamed": (
        ResponsesTap(),
        events({"type": "response.incomplete", "response": RESPONSE}),
        ("r", "flex", {0: "max_output_tokens"}),
    ),
    "responses, whole": (ResponsesBodyTap(), json.dumps(RESPONSE).encode(), ("r", "flex", {0: "max_output_tokens"})),
}


@pytest.mark.parametrize(("tap", "reply", "facts"), REPLIES.values(), ids=REPLIES)
def test_a_reply_is_named_with_its_ends_and_its_reasoning(tap: Tap, reply: bytes, facts: tuple[object, ...]) -> None:
    tap.feed(reply)
    tap.close()
    assert (tap.facts.id, tap.facts.service_tier, tap.facts.finish_reasons) == facts
    assert tap.usage.reasoning == 8


@pytest.mark.parametrize("id", [None, 7, ["c"]])
def test_members_of_other_types_break_no_answer(id: object) -> None:
    tap = StreamTap()
    tap.feed(
        events(
            {"id": id, "service_tier": {}, "choices": [choice(0, "stop")], "usage": {"completion_tokens_details": 1}}
        )
    )
    assert (tap.ended, tap.failure, tap.usage.reasoning) == (True, None, None)


def served(tap: Tap, body: bytes) -> str:
    tap.feed(body)
    return tap.facts.speed


def test_the_speed_of_a_chat_is_the_last_that_is_named() -> None:
    """The first chunks of a stream may not know it, and the last may not repeat it."""
    chunks = [
        {"service_tier": None, "choices": [choice(0, None)]},
        {"service_tier": "flex", "choices": [choice(0, "stop")]},
    ]
    assert served(StreamTap(), events(*chunks, {"choices": [], **CHAT_USAGE})) == "flex"
    assert (
        served(StreamTap(), events({"choices": [choice(0, "stop")]}, {"choices": [], "service_tier": "fast"})) == "fast"
    )
    assert served(StreamTap(), events({"service_tier": "flex", "choices": [choice(0, None)]})) == "flex"  # broken off
    assert served(StreamTap(), events({"service_tier": 7, "choices": [choice(0, "stop")]})) == ""


def test_the_speed_of_a_message_is_told_at_its_start() -> None:
    start = {"type": "message_start", "message": {"id": "m", "usage": {"speed": "fast", "service_tier": "standard"}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **MESSAGE_USAGE}
    assert served(MessagesTap(), events(start, end)) == "fast"
    assert served(MessagesTap(), events({"type": "message_start", "message": {"usage": {}}}, end)) == ""
    whole = {**MESSAGE, "usage": {"speed": "fast", "output_tokens": 1}, "stop_reason": "end_turn"}
    tap = MessagesBodyTap()
    tap.feed(json.dumps(whole).encode())
    tap.close()
    assert tap.facts.speed == "fast"
