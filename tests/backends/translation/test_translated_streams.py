"""Streams of one dialect in the other: whatever the reads, the same bytes; streamed or whole, the same answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Failure, FailureKind
from backends.translation.chat_to_messages import answer as chat_answer
from backends.translation.registry import CHAT_TO_MESSAGES, MESSAGES_TO_CHAT
from backends.translation.translation import EventTranslator
from tests.support.dialect_strategies import Json, answers, message_events, named_sse, usages

THOUGHT = {"type": "thinking", "thinking": "Let me see.", "signature": "EqQBCg=="}
CALLS = [
    {"type": "tool_use", "id": f"toolu_{n}", "name": "f", "input": {"city": "Zürich"} if n else {}} for n in (0, 1)
]
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [THOUGHT, {"type": "text", "text": "Grüße 👋, two calls."}, *CALLS],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 21, "cache_read_input_tokens": 5},
}


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks hold the time of their stream."""
    monkeypatch.setattr(chat_answer.time, "time", lambda: 1_790_000_000.0)


def to_chat() -> EventTranslator:
    return CHAT_TO_MESSAGES.stream({})


def to_messages() -> EventTranslator:
    return MESSAGES_TO_CHAT.stream({})


def run(translator: EventTranslator, *reads: bytes) -> bytes:
    return b"".join([*map(translator.feed, reads), translator.close()])


def events(stream: bytes) -> Iterator[tuple[str, Any]]:
    """Name and data of every event, by the shortest parser there is."""
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.rpartition("data: ")
        yield name.removeprefix("event: ").strip(), data if data == "[DONE]" else json.loads(data)


def sent(answer: Json, size: int = 3) -> bytes:
    return b"".join(named_sse(message_events(answer, size)))


def whole_message(stream: bytes) -> Json:
    """The message that the events of a stream add up to, with Anthropic's order of events checked."""
    named = list(events(stream))
    assert all(name == data["type"] for name, data in named)
    assert [named[0][0], named[-2][0], named[-1][0]] == ["message_start", "message_delta", "message_stop"]
    message: Json = named[0][1]["message"]
    open_block = None
    for kind, event in named[1:-2]:
        if kind == "content_block_start":
            assert (open_block, event["index"]) == (None, len(message["content"]))
            open_block = event["content_block"]
            parts: list[str] = []
            message["content"].append(open_block)
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            read_delta(open_block, event["delta"], parts)
        else:
            assert (kind, event["index"]) == ("content_block_stop", len(message["content"]) - 1)
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads("".join(parts) or "{}")
            open_block = None
    assert open_block is None
    end = named[-2][1]
    return message | end["delta"] | {"usage": message["usage"] | end["usage"]}


def read_delta(block: Json, delta: Json, parts: list[str]) -> None:
    kind = delta.pop("type")
    [(member, value)] = delta.items()
    if kind == "input_json_delta":
        parts.append(value)
    elif kind == "signature_delta":
        block["signature"] = value
    else:
        block[member] += value


def whole_completion(stream: bytes) -> Json:
    """The completion that the chunks of a stream add up to."""
    *chunks, (_, last) = events(stream)
    assert last == "[DONE]"
    heads = [{name: chunk[name] for name in ("id", "object", "created", "model")} for _, chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert chunks[-1][1]["choices"] == []
    message: Json = {"role": "assistant", "content": "", "refusal": None}
    finish: Json = {}
    for _, chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        add_delta(message, choice["delta"])
        if choice["finish_reason"]:
            finish = {name: value for name, value in choice.items() if name not in ("delta", "index")}
    message["content"] = message["content"] or None
    choice = {"index": 0, "message": message, "logprobs": None, **finish}
    return heads[0] | {"object": "chat.completion", "choices": [choice], "usage": chunks[-1][1]["usage"]}


def add_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    if "reasoning_details" in delta:
        message.setdefault("reasoning_details", []).extend(delta["reasoning_details"])
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call.pop("index") == len(calls):
            calls.append(call)
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(1, 20), st.lists(st.integers(0, 4000), max_size=6))
def test_a_stream_adds_up_to_the_whole_answer(answer: Json, size: int, cuts: list[int]) -> None:
    """There and back, cut at random; the deltas may be of any size."""
    stream = sent(answer, size)
    places = sorted(min(cut, len(stream)) for cut in cuts)
    reads = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    chunks = run(to_chat(), *reads)
    assert whole_completion(chunks) == CHAT_TO_MESSAGES.reply(answer, {})
    back = whole_message(run(to_messages(), *[chunks[at : at + 50] for at in range(0, len(chunks), 50)]))
    assert back == answer


@pytest.mark.parametrize("translator", [to_chat, to_messages])
def test_every_split_gives_identical_bytes(translator: Callable[[], EventTranslator]) -> None:
    stream = sent(ANSWER) if translator is to_chat else run(to_chat(), sent(ANSWER))
    expected = run(translator(), stream)
    for cut in range(len(stream) + 1):
        assert run(translator(), stream[:cut], stream[cut:]) == expected
    assert run(translator(), *[bytes([byte]) for byte in stream]) == expected
    assert run(translator(), stream.replace(b"\n", b"\r\n")) == expected


def test_an_event_is_translated_on_arrival() -> None:
    """No event waits for a later one: each delta of the backend is a delta for the caller."""
    translator = to_chat()
    for event in message_events(ANSWER):
        written = translator.feed(named_sse(iter([event]))[0])
        if event["type"] == "content_block_delta":
            assert (written == b"") == (event["delta"].get("partial_json") == "")


# --------------------------------------------------------------------------- chat streams as servers write them


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
COUNTS = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


def kinds(stream: bytes) -> list[str]:
    return [name for name, _ in events(stream)]


@pytest.mark.parametrize(
    "ending",
    [
        (chunk({}, "stop"), chunk(None, usage=COUNTS), DONE),
        (chunk({}, "stop", usage=COUNTS), DONE),
        (chunk({}, "stop", usage=COUNTS), chunk(None, usage=COUNTS), DONE),
        (chunk({}, "stop", usage=COUNTS),),
    ],
    ids=["usage after the end", "usage with the end", "usage in every chunk", "without [DONE]"],
)
def test_a_chat_stream_ends_once_with_its_usage(ending: tuple[bytes, ...]) -> None:
    stream = run(to_messages(), chunk({"role": "assistant", "content": ""}), chunk({"content": "hi"}), *ending)
    assert kinds(stream) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert whole_message(stream)["usage"] == {"input_tokens": 9, "output_tokens": 2}


@pytest.mark.parametrize("ending", [(chunk({}, "length"), DONE), (chunk({}, "length"),)])
def test_a_chat_stream_without_usage_ends_without_counts(ending: tuple[bytes, ...]) -> None:
    message = whole_message(run(to_messages(), chunk({"content": "hi"}), *ending))
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 0)


def test_an_empty_answer_is_a_message_without_content() -> None:
    assert whole_message(run(to_messages(), DONE))["content"] == []
    assert whole_message(run(to_messages(), chunk({"role": "assistant"}), chunk({}, "stop"), DONE))["content"] == []


def test_a_broken_stream_has_no_end() -> None:
    """The relay writes the error."""
    assert kinds(run(to_messages(), chunk({"content": "hi"})))[-1] == "content_block_delta"
    assert b"[DONE]" not in run(to_chat(), b"".join(named_sse(list(message_events(ANSWER))[:4])))  # type: ignore[arg-type]


def test_a_forced_call_ends_by_tool_use() -> None:
    """vLLM ends it by `stop`, and names the sequence that has ended an answer."""
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    forced = run(to_messages(), chunk({"tool_calls": [call]}), chunk({}, "stop"), DONE)
    assert whole_message(forced)["stop_reason"] == "tool_use"
    ended = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}
    stopped = run(to_messages(), chunk({"content": "x"}), chunk(choices=[ended]), DONE)
    message = whole_message(stopped)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_mistrals_reasoning_streams_as_thinking() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    stream = run(to_messages(), chunk({"content": [thought]}), chunk({"content": "x"}), chunk({}, "stop"), DONE)
    assert [block["type"] for block in whole_message(stream)["content"]] == ["thinking", "text"]


def test_calls_of_servers_with_one_index_are_told_apart_by_id() -> None:
    """Gemini numbers all calls 0; some servers repeat id and name in every chunk, or leave ids out."""

    def call(identity: str | None, arguments: str, name: str = "f") -> bytes:
        return chunk({"tool_calls": [{"id": identity, "function": {"name": name, "arguments": arguments}}]})

    stream = run(to_messages(), call("a", '{"x":'), call("a", "1}"), call("b", "{}"), chunk({}, "tool_calls"), DONE)
    blocks = whole_message(stream)["content"]
    assert [(block["id"], block["input"]) for block in blocks] == [("a", {"x": 1}), ("b", {})]
    unnamed = run(to_messages(), call(None, "{"), call(None, "}", ""), chunk({}, "tool_calls"), DONE)
    [made] = whole_message(unnamed)["content"]
    assert re.fullmatch(r"call_[0-9a-f]{16}", made["id"])
    assert made == {"type": "tool_use", "id": made["id"], "name": "f", "input": {}}


# --------------------------------------------------------------------------- errors

FAILURES = [
    (400, "invalid_request_error"),
    (401, "authentication_error"),
    (402, "billing_error"),
    (403, "permission_error"),
    (404, "not_found_error"),
    (413, "request_too_large"),
    (429, "rate_limit_error"),
    (500, "api_error"),
    (502, "api_error"),
    (503, "overloaded_error"),
    (504, "timeout_error"),
    (529, "overloaded_error"),
]


@pytest.mark.parametrize(("status", "kind"), FAILURES)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    """The types of platform.claude.com/docs, errors (November 2026)."""
    translator = to_messages()
    translator.feed(chunk({"content": "hi"}))
    event = translator.error(Failure(FailureKind.SERVER, "It broke.", status))
    assert list(events(event)) == [("error", {"type": "error", "error": {"type": kind, "message": "It broke."}})]
    assert (translator.feed(chunk({"content": "more"})), translator.close()) == (b"", b"")


def test_errors_of_a_chat_have_openais_shape() -> None:
    translator = to_chat()
    failure = Failure(FailureKind.RATE_LIMITED, "Slow down.", 429, "rate_limit_exceeded", "rate_limit_exceeded")
    [(name, event)] = events(translator.error(failure))
    assert name == ""
    assert event == {
        "error": {"message": "Slow down.", "type": "rate_limit_exceeded", "param": None, "code": "rate_limit_exceeded"}
    }
    assert translator.feed(sent(ANSWER)) + translator.close() == b""


def test_an_error_event_becomes_the_callers() -> None:
    overloaded = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
    [(_, event)] = events(run(to_chat(), overloaded))
    assert event["error"]["type"] == "server_error"
    failed = b'data: {"error":{"message":"CUDA error at 10.0.0.3, key sk-proj-0123456789abcdef0123","code":500}}\n\n'
    [(name, event)] = events(run(to_messages(), failed))
    assert (name, event["error"]["type"]) == ("error", "api_error")
    assert "CUDA error" in event["error"]["message"]
    assert not any(secret in event["error"]["message"] for secret in ("10.0.0.3", "sk-proj"))


@pytest.mark.parametrize(
    "junk",
    [b"data: nonsense\n\n", b"data: [1]\n\n", b'event: future\ndata: {"type":"future"}\n\n', b": comment\n\n", b"\n\n"],
)
@pytest.mark.parametrize("translator", [to_chat, to_messages])
def test_other_events_are_nothing_to_a_caller(translator: Callable[[], EventTranslator], junk: bytes) -> None:
    """New types of events may come at any time; the tap judges junk."""
    assert translator is to_messages or run(translator(), junk) == b""
    assert b"error" not in run(translator(), junk)


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    """Some engines cut an emoji in two escapes; UTF-8 has no such characters."""
    stream = run(to_messages(), b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n')
    assert list(events(stream))[-1][1]["delta"]["text"] == "?"


def test_a_held_event_can_be_forgotten() -> None:
    translator = to_chat()
    translator.feed(b'data: {"type":"message_start"')
    translator.drop()
    assert translator.close() == b""


@settings(max_examples=100, deadline=None)
@given(usages)
def test_usage_is_the_same_streamed_and_whole(usage: Json) -> None:
    answer = {**ANSWER, "usage": usage}
    assert whole_completion(run(to_chat(), sent(answer)))["usage"] == CHAT_TO_MESSAGES.reply(answer, {})["usage"]


def test_a_stream_names_the_speed_that_was_served() -> None:
    """Of a message at its end, as the first chunk of a chat may not know it."""
    message = run(to_messages(), chunk({"content": "x"}, service_tier=None), chunk({}, "stop", service_tier="fast"))
    (end,) = [event for name, event in events(message) if name == "message_delta"]
    assert end["usage"]["speed"] == "fast"
    start = {"type": "message_start", "message": {"id": "m", "usage": {"speed": "fast"}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
    chat = run(to_chat(), *named_sse([start, end, {"type": "message_stop"}]))
    assert b'"service_tier":"priority"' in chat
