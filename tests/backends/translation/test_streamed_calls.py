"""Tool calls of chat streams as servers send them, for callers of Messages and Responses; blocks in turns for chat."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from backends.translation import streamed_calls, translation
from backends.translation.registry import CHAT_TO_MESSAGES, MESSAGES_TO_CHAT, RESPONSES_TO_CHAT
from backends.translation.tool_arguments import JsonEnd
from backends.translation.translation import InexpressibleError
from tests.support.dialect_strategies import Json, named_sse
from tests.support.dialogues import as_stream, events

Call = tuple[str, str, str]  # id, name, arguments
Read = Callable[[list[Json]], list[Call]]


def chunk(*calls: Json, finish: str | None = None, **delta: Any) -> Json:
    tool_calls = {"tool_calls": list(calls)} if calls else {}
    return {"id": "x", "choices": [{"index": 0, "delta": delta | tool_calls, "finish_reason": finish}]}


def call(index: int | None, text: str | None = None, name: str | None = None, identity: str | None = None) -> Json:
    """A delta of a call, with the members that are given."""
    function = {key: value for key, value in (("name", name), ("arguments", text)) if value is not None}
    members = {"index": index, "id": identity, "function": function or None}
    return {key: value for key, value in members.items() if value is not None}


def message_events(chunks: list[Json]) -> list[Json]:
    stream = MESSAGES_TO_CHAT.stream({})
    return events(stream.feed(as_stream(chunks)) + stream.close())


def blocks(found: list[Json]) -> list[Json]:
    """Blocks of a message by their events, each with its `text`: Anthropic's order of events is checked."""
    read: list[Json] = []
    is_open = False
    for event in found:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(read))
            read.append({**event["content_block"], "text": ""})
            is_open = True
        elif event["type"].startswith("content_block"):
            assert (is_open, event["index"]) == (True, len(read) - 1)
            is_open = event["type"] == "content_block_delta"
            read[-1]["text"] += event["delta"].get("partial_json") or event["delta"].get("text", "") if is_open else ""
    assert not is_open
    return read


def of_messages(chunks: list[Json]) -> list[Call]:
    found = blocks(message_events([*chunks, chunk(finish="tool_calls")]))
    return [(block["id"], block["name"], block["text"]) for block in found if block["type"] == "tool_use"]


def of_responses(chunks: list[Json]) -> list[Call]:
    """The calls by their deltas, which are compared with the final response."""
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    found = events(stream.feed(as_stream([*chunks, chunk(finish="tool_calls")])))
    texts: dict[int, str] = {}
    for event in found:
        if event["type"] == "response.output_item.added":
            texts[event["output_index"]] = ""
        elif event["type"] == "response.function_call_arguments.delta":
            texts[event["output_index"]] += event["delta"]
    items = [item for item in found[-1]["response"]["output"] if item["type"] == "function_call"]
    assert [item["arguments"] for item in items] == [texts[place] for place in sorted(texts)][-len(items) :]
    return [(item["call_id"], item["name"], item["arguments"]) for item in items]


BOTH = pytest.mark.parametrize("read", [of_messages, of_responses])
TWO = [("a", "f", '{"x":[1]}'), ("b", "g", "{}")]


@BOTH
@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(call(0, "", "f", "a")), chunk(call(1, "", "g", "b")), chunk(call(0, '{"x":')), chunk(call(1, "{")),
         chunk(call(0, "[1]}")), chunk(call(1, "}"))],
        [chunk(call(0, '{"x":', "f", "a"), call(1, "{}", "g", "b")), chunk(call(0, "[1]}"))],
        [chunk(call(0, '{"x":', "f", "a")), chunk(call(1, "{", "g", "b"), call(0, "[1]}")), chunk(call(1, "}"))],
        [chunk(call(0, '{"x":[1]}', "f", "a")), chunk(call(1, "{", "g", "b")), chunk(call(1, "}"))],
    ],
    ids=["in turns", "one chunk", "mixed chunks", "one after the other"],
)  # fmt: skip
def test_parallel_calls_may_come_in_turns(read: Read, chunks: list[Json]) -> None:
    assert read(chunks) == TWO


@BOTH
@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(call(0, None, "f")), chunk(call(0, '{"x":', None, "a")), chunk(call(0, "[1]}"))],
        [chunk(call(0, '{"x":', "f")), chunk(call(0, "[1]}")), chunk(call(0, None, None, "a"))],
        [chunk(call(0, '{"x":', None, "a")), chunk(call(0, "[1]}", "f"))],
        [chunk(call(0, '{"x":')), chunk(call(0, "[1]}")), chunk(call(0, "", "f", "a"))],
        [chunk(call(0, '{"x":', "f", "a")), chunk(call(0, "[1]}", "f", "a")), chunk(call(0, "", "f"))],
    ],
    ids=["id after name", "id at the end", "name after id", "both at the end", "repeated"],
)
def test_id_and_name_of_a_call_may_come_late(read: Read, chunks: list[Json]) -> None:
    assert read([*chunks, chunk(call(1, "{}", "g", "b"))]) == TWO


@BOTH
def test_calls_without_an_index_are_told_apart(read: Read) -> None:
    """By id, by place in the list, or by the end of the arguments before."""
    one, other = call(None, '{"x":[1]}', "f", "a"), call(None, "{}", "g", "b")
    assert read([chunk(one), chunk(other)]) == TWO
    assert read([chunk(one, other)]) == TWO
    nameless = read([chunk(call(None, '{"x":[1]}', "f")), chunk(call(None, "{", "g")), chunk(call(None, "}"))])
    assert [each[1:] for each in nameless] == [each[1:] for each in TWO]
    assert nameless[0][0] != nameless[1][0]


@BOTH
def test_calls_of_one_index_may_come_in_turns(read: Read) -> None:
    """Told apart by the ids that every delta repeats."""
    told = [("a", '{"x":', "f"), ("b", "{", "g"), ("a", "[1]}", "f"), ("b", "}", "g")]
    assert read([chunk(call(0, text, name, identity)) for identity, text, name in told]) == TWO


@BOTH
def test_calls_of_one_chunk_without_index_and_id_are_told_apart_by_their_place(read: Read) -> None:
    found = read([chunk(call(None, "", "f"), call(None, '{"x":1}', "g"))])
    assert [each[1:] for each in found] == [("f", ""), ("g", '{"x":1}')]


def test_arguments_that_are_no_object_may_go_on_after_a_value() -> None:
    """Where `[1]` ends is not known before the end of the answer."""
    chunks = [chunk(call(0, "[1]", "f", "a")), chunk(call(1, "{}", "g", "b")), chunk(call(0, " x"))]
    assert of_messages(chunks) == [("a", "f", '{"arguments":"[1] x"}'), ("b", "g", "{}")]


def test_a_signature_ends_its_block_of_thinking() -> None:
    signed = [{"type": "reasoning.text", "signature": "s"}]
    found = message_events(
        [chunk(reasoning="a"), chunk(reasoning_details=signed), chunk(reasoning="b"), chunk(finish="stop")]
    )
    assert [block["type"] for block in blocks(found)] == ["thinking", "thinking"]


@BOTH
def test_arguments_of_a_server_without_ids_do_not_wait_for_the_end(read: Read) -> None:
    """1,024 characters without an id: no id is awaited."""
    text = '{"x":"%s"}' % ("y" * streamed_calls.AWAITED_ID)
    [(_, name, arguments)] = read(
        [chunk(call(0, text[:9], "f")), chunk(call(0, text[9:])), chunk(call(0, None, None, "a"))]
    )
    assert (name, arguments) == ("f", text)
    stream = MESSAGES_TO_CHAT.stream({})
    assert b"tool_use" in stream.feed(as_stream([chunk(call(0, text, "f"))]).removesuffix(b"data: [DONE]\n\n"))


def test_a_text_between_parts_of_a_call_follows_the_call() -> None:
    chunks = [
        chunk(content="a"),
        chunk(call(0, "{", "f", "t")),
        chunk(content="b"),
        chunk(call(0, "}")),
        chunk(content="c"),
    ]
    found = blocks(message_events([*chunks, chunk(finish="tool_calls")]))
    assert [(block["type"], block["text"]) for block in found] == [("text", "a"), ("tool_use", "{}"), ("text", "bc")]


def test_a_call_is_written_on_arrival_where_the_call_before_is_complete() -> None:
    stream = MESSAGES_TO_CHAT.stream({})

    def feed(*calls: Json) -> list[str]:
        data = stream.feed(as_stream([chunk(*calls)]).removesuffix(b"data: [DONE]\n\n"))
        return [event["type"].removeprefix("content_block_") for event in events(data)]

    assert feed(call(0, '{"x":"}', "f", "a")) == ["message_start", "start", "delta"]
    assert feed(call(1, "{", "g", "b")) == []
    assert feed(call(0, '"}')) == ["delta", "stop", "start", "delta"]
    assert feed(call(1, "}")) == ["delta"]
    assert feed(call(0, "\n")) == []
    with pytest.raises(InexpressibleError):
        feed(call(0, "{}"))


def test_waiting_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "KEPT_LIMIT", 10_000)
    chunks = [chunk(call(0, "{", "f", "a")), *[chunk(call(1, "y" * 999, "g", "b"))] * 11]
    with pytest.raises(InexpressibleError):
        message_events(chunks)


@pytest.mark.parametrize(("finish", "stop"), [("length", "max_tokens"), ("tool_calls", "tool_use")])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": "b', '{"a": "b'),
        ("", ""),
        ('[1, "\n\\', '{"arguments":"[1, \\"\\n\\\\"}'),
        (' "x"', '{"arguments":" \\"x\\""}'),
        ("null", '{"arguments":"null"}'),
    ],
)
def test_streamed_arguments_are_the_text_of_an_object(finish: str, stop: str, written: str, read: str) -> None:
    """Half JSON stays half; what is no object from its first character on is wrapped, as in a whole answer."""
    for pieces in ([written], list(written)):
        chunks = [chunk(call(0, "", "f", "t")), *(chunk(call(0, piece)) for piece in pieces), chunk(finish=finish)]
        found = message_events(chunks)
        assert found[-2]["delta"]["stop_reason"] == stop
        [block] = blocks(found)
        assert block["text"] == read


def test_a_cut_call_is_an_incomplete_item_of_a_response() -> None:
    chunks = [chunk(call(0, '{"a": "b', "f", "t")), chunk(finish="length")]
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    response = events(stream.feed(as_stream(chunks)))[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a": "b')


# --------------------------------------------------------------------------- blocks of Messages in turns


def block_event(kind: str, index: int, **members: Any) -> Json:
    return {"type": f"content_block_{kind}", "index": index, **members}


def tool(index: int) -> Json:
    return block_event("start", index, content_block={"type": "tool_use", "id": f"t{index}", "name": "f", "input": {}})


def part(index: int, text: str) -> Json:
    return block_event("delta", index, delta={"type": "input_json_delta", "partial_json": text})


def thought(index: int, **delta: str) -> Json:
    kind = "signature_delta" if "signature" in delta else "thinking_delta"
    return block_event("delta", index, delta={"type": kind, **delta})


def of_blocks(*told: Json, stop: str = "tool_use") -> list[Json]:
    """Deltas of the chat for the events of blocks."""
    begin = {"type": "message_start", "message": {"id": "m"}}
    end = [{"type": "message_delta", "delta": {"stop_reason": stop}}, {"type": "message_stop"}]
    stream = CHAT_TO_MESSAGES.stream({})
    found = events(b"".join(map(stream.feed, named_sse(iter([begin, *told, *end])))))
    assert found[-2]["choices"][0]["finish_reason"] == {"tool_use": "tool_calls", "max_tokens": "length"}[stop]
    return [choice["delta"] for each in found for choice in each["choices"]]


def arguments_of(deltas: list[Json]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for each in chain.from_iterable(delta.get("tool_calls", ()) for delta in deltas):
        texts[each["index"]] = texts.get(each["index"], "") + each["function"]["arguments"]
    return texts


def test_blocks_may_come_in_turns() -> None:
    """Each delta belongs to the block of its index."""
    stops = [block_event("stop", index) for index in (1, 0, 2)]
    deltas = of_blocks(
        tool(0), tool(1), part(0, '{"a"'), tool(2), part(1, '{"b"'), part(0, ":1}"), part(1, ":2}"), *stops
    )
    assert arguments_of(deltas) == {0: '{"a":1}', 1: '{"b":2}', 2: "{}"}


def test_a_cut_block_is_a_cut_call() -> None:
    deltas = of_blocks(tool(0), part(0, '{"a": "b'), block_event("stop", 0), stop="max_tokens")
    assert arguments_of(deltas) == {0: '{"a": "b'}


def test_thinking_in_turns_keeps_its_signatures() -> None:
    begun = [
        block_event("start", n, content_block={"type": "thinking", "thinking": "", "signature": ""}) for n in (0, 1)
    ]
    told = [thought(0, thinking="a"), thought(1, thinking="b"), thought(0, signature="s"), thought(1, signature="t")]
    deltas = of_blocks(*begun, *told)
    details = [detail for delta in deltas for detail in delta.get("reasoning_details", ())]
    assert [(detail["text"], detail["signature"]) for detail in details] == [("a", "s"), ("b", "t")]


# --------------------------------------------------------------------------- the end of a value


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [("", False), (" ", False), ("{", False), ("{}", True), ('{"a": "}', False), ('{"a": "\\"}"}', True),
     ("[{}]", True),
     ('"x"', True), ('"\\\\"', True), ('"\\"', False), ("12", False), ('{"a":{}', False), ("{}\n", True)],
)  # fmt: skip
def test_the_end_of_a_value_is_found_in_any_pieces(text: str, is_complete: bool) -> None:
    for pieces in ([text], list(text)):
        end = JsonEnd()
        for piece in pieces:
            end.feed(piece)
        assert end.is_complete == is_complete
