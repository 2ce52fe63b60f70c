"""State of turns comes back to its maker bit for bit, through the dialect of any caller, and reaches no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Operation
from backends.stream.event_shapes import End, end_of, failure_of_end, is_failed
from backends.translation.omissions import Omissions
from backends.translation.registry import chain
from backends.translation.reply_translation import AnswerTranslation
from backends.translation.translation import AnswerContext, sse
from backends.translation.turn_state.call_ids import PLAIN, CallIds, plain_id
from backends.translation.turn_state.history import TurnHistory
from backends.translation.turn_state.seals import Opener, is_seal, maker_of, sealed

Json = dict[str, Any]
OWN, OTHER = maker_of("key", "m"), maker_of("key", "n")
SHOWN = {"type": "thinking", "thinking": "hm"}
STATES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
OPAQUE = st.text("abcdefghijklmnopqrstuvwxyz0123456789+/=", min_size=4, max_size=40)
IDS = st.sampled_from(["call_0", "functions.f:0", "f", "ü"]) | OPAQUE
FROM_CHAT = [Operation.MESSAGES, Operation.RESPONSES]


@st.composite
def calls(draw: st.DrawFn) -> Json:
    """A call of a chat, with the state that some servers tie to one."""
    function = {"name": "f", "arguments": "{}"}
    signed = st.just({"thought_signature": "c2ln/+=="})
    state = draw(st.none() | st.dictionaries(st.sampled_from(["google", "vertex"]), signed, min_size=1))
    call: Json = {"id": draw(IDS), "type": "function", "function": function}
    return call if state is None else {**call, "extra_content": state}


@st.composite
def turns(draw: st.DrawFn) -> Json:
    """A message of a chat's assistant with calls and details of the reasoning."""
    found = draw(st.lists(calls(), min_size=1, max_size=3, unique_by=lambda call: call["id"]))
    text = draw(st.none() | TEXTS)
    details = [
        {"type": "reasoning.text", "text": draw(TEXTS), "signature": draw(OPAQUE), "format": "x-v1", "index": 0},
        {"type": "reasoning.encrypted", "data": draw(OPAQUE), "format": "y-v1", "index": 1},
    ][: draw(st.integers(0, 2))]
    turn: Json = {"role": "assistant", "content": text, "tool_calls": found}
    return {**turn, "reasoning_details": details} if details else turn


def answered(turn: Json, caller: Operation, *, streams: bool) -> Json:
    """The answer as a caller of another dialect gets it."""
    steps = chain(caller, frozenset({Operation.CHAT}))
    assert steps is not None
    asked: Json = {"model": "m", "messages": [], "input": "hi", "thinking": {"type": "enabled"}}
    translation = AnswerTranslation(steps, [asked], AnswerContext(OWN))
    if streams:
        stream = translation.stream()
        data = b"".join(stream.feed(sse(chunk)) for chunk in chunks(turn))
        return joined(data + stream.close(), caller)
    choice = {"index": 0, "message": turn, "finish_reason": "tool_calls"}
    reply = {"id": "c", "model": "m", "created": 1, "choices": [choice]}
    found: Json = json.loads(translation.whole(json.dumps(reply).encode()))
    return found


def chunks(turn: Json) -> Iterator[Json]:
    """The turn as a chat's stream: reasoning, text, calls, and the end."""
    deltas = [{"reasoning_details": [each]} for each in turn.get("reasoning_details", ())]
    deltas += [{"content": turn["content"]}] if turn["content"] else []
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(turn["tool_calls"])]
    for delta in deltas:
        yield {"id": "c", "model": "m", "created": 1, "choices": [{"index": 0, "delta": delta}]}
    yield {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    yield {"id": "c", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def joined(data: bytes, caller: Operation) -> Json:
    """The answer that the events of a stream make."""
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    if caller is Operation.RESPONSES:
        response: Json = events[-1]["response"]
        return response
    blocks: dict[int, Json] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "arguments": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name, member in (("text", "text"), ("thinking", "thinking"), ("signature", "signature")):
                block[member] = block.get(member, "") + delta.get(name, "") if name in delta else block.get(member, "")
            block["arguments"] += delta.get("partial_json", "")
    return {"content": [_finished(block) for block in blocks.values()]}


def _finished(block: Json) -> Json:
    if block["type"] == "tool_use":
        return {name: block[name] for name in ("type", "id", "name")} | {
            "input": json.loads(block["arguments"] or "{}")
        }
    members = {"text": ("text",), "thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}
    return {"type": block["type"], **{name: block[name] for name in members[block["type"]]}}


def returned(answer: Json, caller: Operation, maker: str, told: Omissions) -> list[Json]:
    """The messages of the next request as a server gets them. `maker`: of its turns."""
    body = next_request(answer, caller)
    steps = chain(caller, frozenset({Operation.CHAT}))
    assert steps is not None
    own = TurnHistory(maker, caller, is_native=False).opened(body, told)
    messages: list[Json] = steps[0].request(own, told)["messages"]
    return messages


def next_request(answer: Json, caller: Operation) -> Json:
    if caller is Operation.MESSAGES:
        content = answer["content"]
        results = [
            {"type": "tool_result", "tool_use_id": each["id"], "content": "r"}
            for each in content
            if each["type"] == "tool_use"
        ]
        turn = {"role": "assistant", "content": content}
        return {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": results}],
        }
    items = answer["output"]
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "r"}
        for each in items
        if each["type"] == "function_call"
    ]
    return {"model": "m", "input": [{"role": "user", "content": "hi"}, *items, *results]}


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_a_seal_opens_to_what_was_sealed(state: Any) -> None:
    """Its letters fit the narrowest member, the id of a call in Messages."""
    text = sealed(OWN, state)
    found = Opener().opened(text)
    assert found is not None
    assert (found.maker, json.dumps(found.state)) == (OWN, json.dumps(state))
    assert is_seal(text)
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", text)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("caller", FROM_CHAT)
@settings(max_examples=150, deadline=None)
@given(turn=turns())
def test_state_returns_to_its_maker_bit_for_bit(caller: Operation, streams: bool, turn: Json) -> None:
    told = Omissions()
    messages = returned(answered(turn, caller, streams=streams), caller, OWN, told)
    [said] = [each for each in messages if each["role"] == "assistant"]
    assert said["tool_calls"] == turn["tool_calls"]
    assert said.get("reasoning_details", []) == turn.get("reasoning_details", [])
    results = [each["tool_call_id"] for each in messages if each["role"] == "tool"]
    assert results == [call["id"] for call in turn["tool_calls"]]
    assert not told.noted


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("caller", FROM_CHAT)
@settings(max_examples=150, deadline=None)
@given(turn=turns())
def test_state_reaches_no_other_account_or_model(caller: Operation, streams: bool, turn: Json) -> None:
    """Calls and results stay pairs, by ids in letters that every server takes; what is left out is told."""
    told = Omissions()
    messages = returned(answered(turn, caller, streams=streams), caller, OTHER, told)
    [said] = [each for each in messages if each["role"] == "assistant"]
    ids = [call["id"] for call in said["tool_calls"]]
    assert [each["tool_call_id"] for each in messages if each["role"] == "tool"] == ids
    assert all(PLAIN.fullmatch(each) for each in ids)
    assert all(call.keys() == {"id", "type", "function"} for call in said["tool_calls"])
    assert "ftst1" not in json.dumps(messages)
    opaque = [detail.get("signature") or detail["data"] for detail in turn.get("reasoning_details", [])]
    assert not any(each in json.dumps(said) for each in opaque if len(each) > 12)
    has_state = any("extra_content" in call for call in turn["tool_calls"]) or bool(opaque)
    assert bool(told.noted) == has_state


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["", "call_0", "call_1"]), min_size=1, max_size=8), st.sampled_from(["call_0", "x"]))
def test_ids_of_an_answer_are_unique_and_new(given_ids: list[str], before: str) -> None:
    """Whatever ids the server gives, or none: no two are the same, and none is in the history."""
    ids = CallIds({"messages": [{"role": "assistant", "tool_calls": [{"id": before}]}]})
    made = [ids.given(each) for each in given_ids]
    assert len({*made, before}) == len(made) + 1
    assert all(PLAIN.fullmatch(each) for each in made)


@given(st.text(max_size=100))
def test_a_plain_id_has_letters_that_every_server_takes(text: str) -> None:
    assert PLAIN.fullmatch(plain_id(text))


def test_long_ids_that_differ_at_their_ends_stay_apart() -> None:
    """As those of Kimi, which begin with the name of the function."""
    ids = [f"functions.mcp__{'x' * 64}:{number}" for number in range(3)]
    assert len({plain_id(each) for each in ids}) == 3
    assert all(PLAIN.fullmatch(plain_id(each)) for each in ids)


@given(st.text(max_size=30))
def test_no_end_is_invented(word: str) -> None:
    """An end is one of the list, a failure, or unknown: unknown is not good."""
    end = end_of(word)
    if end is End.UNKNOWN:
        assert not is_failed(word)
        with pytest.raises(ValueError, match="unknown end"):
            failure_of_end(word)
    else:
        assert (failure_of_end(word) is None) == (end is not End.FAILED)


@pytest.mark.parametrize(
    "word", ["insufficient_quota", "abort_by_user", "error_internal", "malformed_tool_call", "ERROR"]
)
def test_a_word_that_begins_as_a_failure_is_one(word: str) -> None:
    assert is_failed(word)


def test_state_of_a_chat_server_goes_to_no_server_of_another_dialect() -> None:
    """Sealed is what a translated answer held: what is not has passed untouched from a server of chat."""
    signed = {"type": "reasoning.text", "text": "hm", "signature": "zz"}
    plain = {"type": "reasoning.summary", "summary": "hm"}
    body = {"messages": [{"role": "assistant", "content": "a", "reasoning_details": [signed, plain]}]}
    dropped = Omissions()
    opened = TurnHistory("m", Operation.CHAT, is_native=False).opened(body, dropped)
    assert (opened["messages"][0]["reasoning_details"], list(dropped.noted)) == (
        [plain],
        ["messages.reasoning_details"],
    )
    assert TurnHistory("m", Operation.CHAT, is_native=True).opened(body, Omissions()) == body
