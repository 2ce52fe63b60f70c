"""Ids of state in native answers: sealed wherever the dialect has them, and no other byte changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.translation.reply_translation import ReplyShapeError
from gateway.parts.responses.state_answer import StateAnswer
from gateway.parts.responses.state_ids import StateIds, seal_key
from tests.support.responses_server import ENCRYPTED, events

ENDPOINT = "small/10.0.0.11:8000"
IDS = StateIds(seal_key(b"secret", "web"))
ANSWER = StateAnswer(IDS, ENDPOINT)
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "previous_response_id": "resp_0",
    "conversation": {"id": "conv_1"},
    "status": "completed",
    "model": "m",
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": ENCRYPTED},
        {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": 'about "response" and resp_1'}]},
    ],
}


def sealed(value: str) -> str:
    return IDS.seal(value, ENDPOINT)


def expected(response: dict[str, Any]) -> dict[str, Any]:
    reasoning, *rest = response["output"]
    output = [{**reasoning, "encrypted_content": IDS.seal_content(ENCRYPTED, ENDPOINT)}, *rest]
    ids = {"id": sealed("resp_1"), "previous_response_id": sealed("resp_0"), "conversation": {"id": sealed("conv_1")}}
    return {**response, **ids, "output": output}


def test_the_ids_of_a_whole_answer_are_sealed() -> None:
    assert json.loads(ANSWER.whole(json.dumps(RESPONSE).encode())) == expected(RESPONSE)


def test_the_encrypted_items_of_a_list_are_sealed() -> None:
    """Ids of items are no state of their own."""
    listed = {"object": "list", "data": RESPONSE["output"], "first_id": "rs_1", "last_id": "msg_1", "has_more": False}
    found = json.loads(ANSWER.whole(json.dumps(listed).encode()))
    assert found == {**listed, "data": expected(RESPONSE)["output"]}


@pytest.mark.parametrize("reply", [b"<html>", b"", b'{"id": "resp_1"'])
def test_a_whole_answer_that_is_no_json_is_no_answer(reply: bytes) -> None:
    with pytest.raises(ReplyShapeError):
        ANSWER.whole(reply)


@pytest.mark.parametrize("reply", [b"[1]", b'{"output": 5, "id": 5, "conversation": [], "data": [5]}', b"null"])
def test_an_answer_of_another_shape_stays_as_it_is(reply: bytes) -> None:
    assert json.loads(ANSWER.whole(reply)) == json.loads(reply)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 16), max_size=8))
def test_a_stream_is_sealed_alike_however_it_is_cut(cuts: list[int]) -> None:
    told = events({**RESPONSE, "usage": None, "output": [RESPONSE["output"][0], message("a b c")]})
    stream = b"".join(told)
    ends = sorted({cut % len(stream) for cut in cuts} | {len(stream)})
    rewriter = ANSWER.stream()
    torn = b"".join(rewriter.feed(stream[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    torn += rewriter.close()
    found = [json.loads(block.split(b"data: ")[1]) for block in torn.split(b"\n\n") if block]
    for before, event in zip(told, found, strict=True):
        given = json.loads(before.split(b"data: ")[1])
        if "response" in given:
            assert event["response"]["id"] == sealed("resp_1")
        elif given.get("item", {}).get("encrypted_content"):
            assert event["item"]["encrypted_content"] == IDS.seal_content(ENCRYPTED, ENDPOINT)
        else:
            assert event == given
    assert b'"resp_1"' not in torn
    assert f'"{ENCRYPTED}"'.encode() not in torn


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def test_an_event_without_state_passes_byte_for_byte() -> None:
    """A text that speaks of such members too: its quotes are escaped."""
    text = b'event: response.output_text.delta\ndata: {"type":"x" , "delta":"\\"response\\":{\\"id\\""}\n\n'
    assert ANSWER.stream().feed(text) == text


def test_an_event_larger_than_any_is_not_kept_in_memory() -> None:
    rewriter = ANSWER.stream()
    assert rewriter.feed(b"x" * (15 << 20)) == b""
    with pytest.raises(ReplyShapeError):
        rewriter.feed(b"x" * (2 << 20))
