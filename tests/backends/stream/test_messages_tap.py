"""Taps of Anthropic's Messages: tokens, usage, ends and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import FailureKind, Usage
from backends.stream.native_taps import MessagesBodyTap, MessagesTap
from backends.stream.signatures import MOST_SIGNED
from tests.support.dialect_strategies import answers, message_events, named_sse


def event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


def delta(**members: Any) -> bytes:
    return event("content_block_delta", index=0, delta=members)


def block(**members: Any) -> bytes:
    return event("content_block_start", index=0, content_block=members)


def end(reason: str | None = "end_turn", **usage: Any) -> bytes:
    return event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=usage)


def error(kind: str, message: str = "x") -> bytes:
    return event("error", error={"type": kind, "message": message})


START = event("message_start", message={"id": "m", "content": [], "usage": {"input_tokens": 4, "output_tokens": 1}})
STOP = event("message_stop")
TEXT = delta(type="text_delta", text="hi")


def read(*parts: bytes) -> MessagesTap:
    tap = MessagesTap()
    for part in parts:
        tap.feed(part)
    tap.close()
    return tap


@pytest.mark.parametrize(
    "written",
    [
        lambda text: delta(type="signature_delta", signature=text),
        lambda text: block(type="redacted_thinking", data=text),
    ],
    ids=["signature", "cipher"],
)
def test_endless_signatures_fill_no_memory(written: Callable[[str], bytes]) -> None:
    """They are remembered after the end: a stream of them is no longer in memory than an honest answer's."""
    honest, long = "s" * 2_000, "x" * (MOST_SIGNED // 4 + 1)
    tap = read(START, written(honest), *[written(long)] * 9, STOP)
    assert tap.facts.signatures == [honest, long, long, long]
    whole = MessagesBodyTap()
    parts = [{"type": "redacted_thinking", "data": long}] * 9
    whole.feed(json.dumps({"id": "m", "type": "message", "content": parts, "stop_reason": "end_turn"}).encode())
    whole.close()
    assert whole.facts.signatures == [long] * 3


@pytest.mark.parametrize(
    "part",
    [
        TEXT,
        delta(type="input_json_delta", partial_json='{"a'),
        delta(type="citations_delta", citation={"type": "char_location", "cited_text": "x"}),
        block(type="text", text="hi"),
        block(type="tool_use", id="t", name="f", input={}),
        block(type="server_tool_use", id="t", name="web_search", input={}),
        block(type="web_search_tool_result", tool_use_id="t", content=[{"type": "web_search_result"}]),
    ],
)
def test_output_of_the_answer(part: bytes) -> None:
    tap = MessagesTap()
    assert not tap.feed(START)
    assert tap.feed(part)
    assert (tap.tokens, tap.answer_begun, tap.reasoning_begun) == (1, True, False)


@pytest.mark.parametrize("part", [delta(type="thinking_delta", thinking="hm"), block(type="thinking", thinking="hm")])
def test_output_of_reasoning(part: bytes) -> None:
    tap = MessagesTap()
    assert tap.feed(part)
    assert (tap.tokens, tap.answer_begun, tap.reasoning_begun) == (1, False, True)


@pytest.mark.parametrize(
    "part",
    [
        START,
        event("ping"),
        b": comment\n\n",
        block(type="text", text=""),
        block(type="thinking", thinking="", signature=""),
        block(type="redacted_thinking", data="cipher"),
        delta(type="text_delta", text=""),
        delta(type="thinking_delta", thinking=""),
        delta(type="input_json_delta", partial_json=""),
        delta(type="signature_delta", signature="s"),
        delta(type="delta_of_the_future", novelty=1),
        event("event_of_the_future", delta=[1], content_block=7, message="x", usage=[]),
        event("content_block_stop", index=0),
    ],
)
def test_no_output(part: bytes) -> None:
    tap = MessagesTap()
    assert not tap.feed(part)
    assert (tap.tokens, tap.spoiled, tap.ended) == (0, False, False)


def test_usage_counts_the_whole_prompt() -> None:
    """Input tokens are those without a cache; the counts of the end are totals, and may leave some out."""
    counts = {"input_tokens": 4, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    start = event("message_start", message={"usage": {**counts, "output_tokens": 1}})
    assert read(start).usage == Usage(124, 1, 100, 20)
    assert read(start, TEXT, end(output_tokens=9), STOP).usage == Usage(124, 9, 100, 20)
    assert read(start, end(input_tokens=5, cache_read_input_tokens=None, output_tokens=9)).usage == Usage(
        125, 9, 100, 20
    )
    assert read(START, end(output_tokens=9)).usage == Usage(4, 9, None)


def test_strange_counts_are_none() -> None:
    strange = {"input_tokens": "4", "cache_read_input_tokens": -1, "output_tokens": 1.5}
    assert read(event("message_start", message={"usage": strange})).usage == Usage()


@pytest.mark.parametrize(
    "reason",
    ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "model_context_window_exceeded"],
)
def test_a_stop_reason_ends_the_answer(reason: str) -> None:
    """What follows repeats the end; a connection lost then costs nothing."""
    assert not read(START, TEXT).ended
    assert not read(START, TEXT, end(None)).ended
    assert read(START, TEXT, end(reason)).ended
    assert read(START, TEXT, STOP).ended


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("overloaded_error", FailureKind.OVERLOADED),
        ("rate_limit_error", FailureKind.RATE_LIMITED),
        ("api_error", FailureKind.SERVER),
        ("timeout_error", FailureKind.TIMEOUT),
        ("authentication_error", FailureKind.AUTH),
        ("permission_error", FailureKind.AUTH),
        ("billing_error", FailureKind.QUOTA),
        ("request_too_large", FailureKind.CLIENT),
        ("invalid_request_error", FailureKind.CLIENT),
        ("internal_error", FailureKind.SERVER),
    ],
)
def test_error_events_by_type(kind: str, failure: FailureKind) -> None:
    """An event has no status; `internal_error` is vLLM's."""
    tap = MessagesTap()
    tap.feed(START + TEXT + error(kind))
    assert tap.failure is not None
    assert (tap.failure.kind, tap.spoiled, tap.ended) == (failure, True, False)
    assert (tap.sound, tap.error_event) == (START + TEXT, error(kind))


def test_an_error_without_an_event_name_is_one() -> None:
    tap = read(b'data: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n')
    assert tap.failure is not None
    assert tap.failure.kind is FailureKind.OVERLOADED


def test_nothing_after_the_end_is_a_failure() -> None:
    tap = read(START, TEXT, end(), error("api_error"))
    assert (tap.ended, tap.failure, tap.spoiled) == (True, None, True)
    assert not read(START, error("api_error"), end(), STOP).ended


@pytest.mark.parametrize("junk", [b"data: nonsense\n\n", b"event: ping\ndata: [1]\n\n", b"data: 7\n\n"])
def test_junk_spoils_a_stream(junk: bytes) -> None:
    tap = MessagesTap()
    tap.feed(START + TEXT + junk)
    assert tap.spoiled
    assert tap.failure is not None
    assert tap.sound == START + TEXT


def test_the_key_is_removed_from_errors() -> None:
    tap = MessagesTap("an-odd-key-of-ours")
    tap.feed(error("invalid_request_error", "an-odd-key-of-ours is bad"))
    assert tap.failure is not None
    assert tap.failure.message == "[key] is bad"


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(1, 9), st.integers(1, 60))
def test_reads_of_any_size_tell_the_same(answer: Any, size: int, step: int) -> None:
    """Streamed and whole."""
    parts = named_sse(message_events(answer, size))
    stream = b"".join(parts)
    tap, other = read(*parts), read(*[stream[at : at + step] for at in range(0, len(stream), step)])
    assert (tap.tokens, tap.usage, tap.ended, tap.failure) == (other.tokens, other.usage, True, other.failure)
    whole = MessagesBodyTap()
    assert whole.feed(json.dumps(answer).encode())
    whole.close()
    assert (whole.usage, whole.ended) == (tap.usage, True)


def test_an_error_with_status_200_is_a_failure() -> None:
    tap = MessagesBodyTap()
    tap.feed(b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"req_1"}')
    tap.close()
    assert tap.failure is not None
    assert (tap.failure.kind, tap.ended) == (FailureKind.OVERLOADED, False)


def test_the_count_of_a_prompt_is_a_whole_reply() -> None:
    tap = MessagesBodyTap()
    tap.feed(b'{"input_tokens": 14}')
    tap.close()
    assert (tap.ended, tap.failure, tap.usage) == (True, None, Usage())


COMPACTED = {
    "input_tokens": 23_000,
    "output_tokens": 1_000,
    "iterations": [
        {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500},
        {"type": "message", "input_tokens": 23_000, "output_tokens": 1_000},
    ],
}


@pytest.mark.parametrize(
    ("usage", "billed"),
    [
        (COMPACTED, (203_000, 4_500, None, None, None)),
        ({**COMPACTED, "iterations": COMPACTED["iterations"][:1]}, (203_000, 4_500, None, None, None)),
        ({**COMPACTED, "input_tokens": 0, "output_tokens": 0}, (203_000, 4_500, None, None, None)),
        (
            {**COMPACTED, "iterations": [{"type": "advisor_message", "input_tokens": 9}, 5]},
            (23_000, 1_000, None, None, None),
        ),
        ({**COMPACTED, "iterations": "odd"}, (23_000, 1_000, None, None, None)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 1,
                "cache_read_input_tokens": 5,
                "cache_creation_input_tokens": 300,
                "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
                "iterations": [
                    {
                        "type": "compaction",
                        "input_tokens": 1,
                        "output_tokens": 2,
                        "cache_read_input_tokens": 50,
                        "cache_creation_input_tokens": 40,
                        "cache_creation": {"ephemeral_1h_input_tokens": 40},
                    }
                ],
            },
            (10 + 5 + 300 + 1 + 50 + 40, 3, 55, 340, 240),
        ),
        ({"input_tokens": 1, "cache_creation": 5, "iterations": None}, (1, None, None, None, None)),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_all_that_is_billed_is_counted(usage: Any, billed: tuple[int | None, ...], streamed: bool) -> None:
    """What a compaction has read and written, which the counts of the message leave out; what is kept for an hour.
    The end of a stream need not repeat the counts of its start."""
    if streamed:
        first = {name: count for name, count in usage.items() if name not in ("output_tokens", "iterations")}
        last = {name: count for name, count in usage.items() if name in ("output_tokens", "iterations")}
        parts: list[tuple[str, Any]] = [
            ("message_start", {"message": {"usage": first}}),
            ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": last}),
        ]
        stream = b"".join(
            b"event: %b\ndata: %b\n\n" % (k.encode(), json.dumps({"type": k, **v}).encode()) for k, v in parts
        )
        found = read(stream).usage
    else:
        tap = MessagesBodyTap()
        tap.feed(json.dumps({"type": "message", "usage": usage}).encode())
        tap.close()
        found = tap.usage
    assert (found.prompt, found.completion, found.cached, found.cache_write, found.cache_write_1h) == billed
