"""Taps of native Responses: output, usage, ends and errors, read in passing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import FailureKind, Usage
from backends.stream.native_taps import ResponsesBodyTap, ResponsesTap
from backends.stream.taps import counts_of
from backends.translation.registry import RESPONSES_TO_CHAT
from tests.support.dialogues import Json, answers, as_stream

USAGE = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 7}


def event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': 1, **members})}\n\n".encode()


def read(*parts: bytes) -> ResponsesTap:
    tap = ResponsesTap()
    for part in parts:
        tap.feed(part)
    tap.close()
    return tap


ANSWERS = [
    event("response.output_text.delta", delta="a"),
    event("response.refusal.delta", delta="a"),
    event("response.function_call_arguments.delta", delta="{"),
    event("response.custom_tool_call_input.delta", delta="*** Begin"),
    event("response.mcp_call_arguments.delta", delta="{"),
    event("response.code_interpreter_call_code.delta", delta="1"),
    event("response.audio.delta", delta="UklGRg=="),
    event("response.audio.transcript.delta", delta="a"),
    event("response.image_generation_call.partial_image", partial_image_b64="iVBORw0KGgo="),
    event("response.output_text.annotation.added", annotation={"type": "url_citation", "url": "u"}),
    event("response.function_call_arguments.done", arguments="{}"),
    b'data: {"type":"response.output_text.delta","delta":"\\u00e9"}\n\n',
]
REASONING = [
    event("response.reasoning_text.delta", delta="a"),
    event("response.reasoning_summary_text.delta", delta="a"),
]
PREAMBLE = [
    event("response.created", response={"id": "resp_1", "output": [], "usage": None, "error": None}),
    event("response.in_progress", response={"id": "resp_1"}),
    event("response.queued", response={"id": "resp_1"}),
    event("response.output_item.added", item={"type": "message", "content": []}),
    event("response.output_item.added", item={"type": "function_call", "name": "f", "arguments": ""}),
    event("response.content_part.added", part={"type": "output_text", "text": ""}),
    event("response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""}),
    event("response.output_text.delta", delta=""),
    event("response.web_search_call.searching"),
    event("response.something.new", value=1),
    event("keepalive"),
    b": ping\n\n",
]


@pytest.mark.parametrize("data", ANSWERS, ids=str)
def test_output_of_every_kind_counts(data: bytes) -> None:
    tap = ResponsesTap()
    assert tap.feed(data)
    assert (tap.tokens, tap.answer_begun, tap.reasoning_begun) == (1, True, False)


@pytest.mark.parametrize("data", REASONING, ids=str)
def test_reasoning_counts_as_output_apart(data: bytes) -> None:
    tap = ResponsesTap()
    assert tap.feed(data)
    assert (tap.tokens, tap.answer_begun, tap.reasoning_begun) == (1, False, True)


@pytest.mark.parametrize("data", PREAMBLE, ids=str)
def test_announcements_are_no_output(data: bytes) -> None:
    tap = ResponsesTap()
    assert not tap.feed(data)
    assert (tap.tokens, tap.ended, tap.failure) == (0, False, None)


def test_the_end_of_a_text_with_deltas_is_no_further_output() -> None:
    assert read(ANSWERS[0], event("response.output_text.done", text="a")).tokens == 1


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_an_end_with_usage(kind: str) -> None:
    tap = read(*PREAMBLE, ANSWERS[0], event(kind, response={"status": "completed", "usage": USAGE}))
    assert tap.ended
    assert tap.failure is None
    assert tap.usage == Usage(prompt=9, completion=7, cached=8)


def test_a_stream_without_an_end_has_not_ended() -> None:
    assert not read(*PREAMBLE, ANSWERS[0], event("response.output_item.done", item={})).ended


ERROR = {"code": "rate_limit_exceeded", "message": "slow down"}
FAILURES = [
    event("response.failed", response={"status": "failed", "error": ERROR}),
    event("error", **ERROR, param=None),
    event("error", error=ERROR),
    f"data: {json.dumps({'type': 'error', **ERROR})}\n\n".encode(),
    f"data: {json.dumps({'error': ERROR})}\n\n".encode(),
]


@pytest.mark.parametrize("data", FAILURES, ids=str)
def test_an_error_event_is_a_failure(data: bytes) -> None:
    tap = read(ANSWERS[0], data)
    assert tap.failure is not None
    assert tap.failure.kind is FailureKind.RATE_LIMITED
    assert tap.spoiled
    assert not tap.ended


def test_a_failed_response_is_passed_on_as_it_is() -> None:
    """The caller's SDK knows it; the events before are complete."""
    tap = read(ANSWERS[0], PREAMBLE[0] + FAILURES[0])
    assert (tap.sound, tap.error_event) == (PREAMBLE[0], FAILURES[0])


def test_a_failure_without_a_reason_is_the_server_s() -> None:
    tap = read(event("response.failed", response={"status": "failed", "error": None}))
    assert tap.failure is not None
    assert tap.failure.kind is FailureKind.SERVER


def test_an_event_that_is_no_json_spoils_the_stream() -> None:
    tap = read(ANSWERS[0], b"event: response.output_text.delta\ndata: <html>\n\n")
    assert tap.spoiled
    assert tap.failure is not None


@settings(max_examples=100, deadline=None)
@given(answers(), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_any_stream_is_read_alike_however_it_is_cut(answer: tuple[Json, list[Json]], cuts: list[int]) -> None:
    whole, chunks = answer
    stream = RESPONSES_TO_CHAT.stream({"model": "m"}).feed(as_stream(chunks))
    ends = sorted({cut % len(stream) for cut in cuts} | {len(stream)})
    torn = read(*(stream[start:end] for start, end in zip([0, *ends], ends, strict=False)))
    once = read(stream)
    assert (torn.tokens, torn.usage, torn.ended, torn.failure) == (once.tokens, once.usage, True, None)
    usage = whole["usage"]
    told = counts_of({"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]})
    assert (once.usage.prompt, once.usage.cached) == (told.get("prompt"), told.get("cached"))


def body(**members: Any) -> ResponsesBodyTap:
    tap = ResponsesBodyTap()
    tap.feed(json.dumps({"id": "resp_1", "object": "response", **members}).encode())
    tap.close()
    return tap


def test_a_whole_response_is_read_for_its_usage() -> None:
    tap = body(status="completed", output=[{}], error=None, usage=USAGE)
    assert (tap.ended, tap.failure, tap.usage) == (True, None, Usage(prompt=9, completion=7, cached=8))


@pytest.mark.parametrize(
    "members", [{"status": "failed", "error": ERROR, "output": [{}]}, {"error": ERROR}, {"status": "failed"}], ids=str
)
def test_a_whole_response_may_be_a_failure(members: Json) -> None:
    tap = body(**members)
    assert tap.failure is not None
    assert not tap.ended


@pytest.mark.parametrize("data", [b"<html>", b"[1]", b"", b'"a"'])
def test_a_whole_reply_that_is_no_object_is_a_failure(data: bytes) -> None:
    tap = ResponsesBodyTap()
    tap.feed(data)
    tap.close()
    assert tap.failure is not None
