"""The events of a message or a response, put together, are the answer that the server sends whole."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.assembled_messages import MessageAssembler, ResponseAssembler
from backends.stream.assembly import Unassembled

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}
START_USAGE = {"input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 1, "service_tier": "standard"}
texts = st.text(max_size=12)
json_values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | texts, st.lists, max_leaves=4)


def event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **members}).encode() + b"\n\n"


blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts, "signature": texts}),
    st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": texts}),
    st.fixed_dictionaries(
        {
            "type": st.just("tool_use"),
            "id": texts,
            "name": texts,
            "input": st.dictionaries(texts, json_values, max_size=3),
        }
    ),
)


def parts(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
    return [text[a:b] for a, b in pairwise([0, *ends, len(text)])]


def events_of(draw: st.DrawFn, index: int, block: dict[str, Any]) -> bytes:
    """Events of a block, as Anthropic writes them."""
    start, deltas = dict(block), []
    for name, kind in DELTAS.items():
        if name in block:
            start[name] = ""
            deltas += [{"type": kind, name: part} for part in parts(draw, block[name])]
    if "input" in block:
        start["input"] = {}
        written = json.dumps(block["input"]) if block["input"] else ""
        deltas += [{"type": "input_json_delta", "partial_json": part} for part in parts(draw, written)]
    return (
        event("content_block_start", index=index, content_block=start)
        + b"".join(event("content_block_delta", index=index, delta=delta) for delta in deltas)
        + event("content_block_stop", index=index)
    )


def message(content: list[Any], **more: Any) -> dict[str, Any]:
    usage = {**START_USAGE, "output_tokens": 17}
    head = {"model": "m", "id": "msg_1", "type": "message", "role": "assistant", "content": content}
    return {**head, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage, **more}


def stream_of(whole: dict[str, Any], body: bytes) -> bytes:
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": START_USAGE}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    return (
        event("message_start", message=start)
        + event("ping")
        + body
        + event("message_delta", delta=end, usage={"output_tokens": 17})
        + event("message_stop")
    )


def assemble(stream: bytes, cuts: tuple[int, ...] = ()) -> Any:
    assembler = MessageAssembler()
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        assembler.feed(stream[start:end])
    return json.loads(assembler.whole())


@given(st.lists(blocks, max_size=3), st.data())
def test_any_message_is_put_together_again(content: list[dict[str, Any]], data: st.DataObject) -> None:
    whole = message(content)
    body = b"".join(events_of(data.draw, index, block) for index, block in enumerate(content))
    stream = stream_of(whole, body)
    found = assemble(stream, tuple(data.draw(st.lists(st.integers(0, len(stream)), max_size=6))))
    assert found == whole
    assert list(found) == list(whole)


def test_citations_are_joined() -> None:
    cited = [{"type": "page", "cited_text": "a"}, {"type": "page", "cited_text": "b"}]
    body = event("content_block_start", index=0, content_block={"type": "text", "text": "", "citations": []})
    for citation in cited:
        body += event("content_block_delta", index=0, delta={"type": "citations_delta", "citation": citation})
    whole = message([{"type": "text", "text": "", "citations": cited}])
    assert assemble(stream_of(whole, body + event("content_block_stop", index=0))) == whole


def test_members_of_the_end_are_of_the_message() -> None:
    whole = message([], context_management={"applied_edits": []})
    start = {**message([]), "stop_reason": None, "usage": START_USAGE}
    stream = (
        event("message_start", message=start)
        + event(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={"output_tokens": 17},
            context_management={"applied_edits": []},
        )
        + event("message_stop")
    )
    assert assemble(stream) == whole


TEXT = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
CLOSED = event("content_block_stop", index=0)
TOOL = event("content_block_start", index=0, content_block={"type": "tool_use", "id": "a", "name": "f", "input": {}})


@pytest.mark.parametrize(
    "body",
    [
        event("content_block_start", index=1, content_block={"type": "text", "text": ""}),
        TEXT + event("content_block_delta", index=0, delta={"type": "new_delta", "new": "a"}) + CLOSED,
        TEXT + event("content_block_delta", index=0, delta={"type": "text_delta"}) + CLOSED,
        TEXT + event("content_block_delta", index=3, delta={"type": "text_delta", "text": "a"}) + CLOSED,
        TOOL + event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": "{"}) + CLOSED,
        event("error", error={"type": "overloaded_error", "message": "Overloaded"}),
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(body: bytes) -> None:
    with pytest.raises(Unassembled):
        assemble(stream_of(message([]), body))


@pytest.mark.parametrize("reason", ["max_tokens", "model_context_window_exceeded"])
def test_a_call_that_was_cut_has_an_empty_input(reason: str) -> None:
    """As in the API's own whole answers."""
    half = event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"path": "/a'})
    assembler = MessageAssembler()
    assembler.feed(stream_of({**message([]), "stop_reason": reason}, TOOL + half + CLOSED))
    found = json.loads(assembler.whole())
    assert found["content"] == [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    assert (found["stop_reason"], assembler.difference) == (reason, "")


@pytest.mark.parametrize("odd", [event("new_event"), b"data: OK\n\n", b""])
def test_labels_cost_no_message(odd: bytes) -> None:
    """An event that clients are told to ignore, no JSON, a block without its end."""
    text = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
    assembler = MessageAssembler()
    assembler.feed(stream_of(message([]), TEXT + text + odd + (CLOSED if odd else b"")))
    assert json.loads(assembler.whole())["content"] == [{"type": "text", "text": "a"}]
    assert (bool(assembler.difference), assembler.of_calls) == (True, False)


NESTED = b'event: ping\ndata: {"type":"ping","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"


@pytest.mark.parametrize(
    "stream",
    [
        *(event("message_start", message=odd) + event("message_stop") for odd in ([], [["a", 1]], "text", 5)),
        stream_of(message([]), b"").replace(json.dumps(START_USAGE).encode(), b"5"),
        *(
            stream_of(message([]), event("content_block_start", index=0, content_block=odd) + CLOSED)
            for odd in ([], [["type", "text"]], 5)
        ),
        stream_of(
            message([]),
            event("content_block_start", index=0, content_block={"type": "text", "text": 5})
            + event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
            + CLOSED,
        ),
        stream_of(message([]), TEXT + event("content_block_delta", index=0, delta="text") + CLOSED),
        stream_of(message([]), event("message_delta", delta=[["stop_reason", "end_turn"]])),
        stream_of(message([]), NESTED),
        stream_of(message([]), NESTED).removesuffix(b"\n\n"),
    ],
)
def test_a_malformed_event_is_refused_wherever_it_is_found(stream: bytes) -> None:
    """When it is read, or only when the parts are joined."""
    with pytest.raises(Unassembled):
        assemble(stream)


def test_a_message_without_usage_has_a_count_of_the_gateway() -> None:
    whole = message([{"type": "text", "text": ""}])
    stream = stream_of(whole, TEXT + CLOSED).replace(b"_tokens", b"_t")
    assembler = MessageAssembler()
    assembler.feed(stream)
    usage = json.loads(assembler.whole(lambda: (8, 4)))["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (8, 4)
    assert assembler.difference == "no usage in the stream"


@given(st.booleans())
def test_nothing_after_the_end_is_of_the_message(torn: bool) -> None:
    """An SDK has stopped to read."""
    whole = message([{"type": "text", "text": ""}])
    stream = stream_of(whole, TEXT + CLOSED)
    more = event("message_delta", delta={"stop_reason": "refusal"}, usage={"output_tokens": 99}) + event("error")
    assert assemble(stream + more + b"data: {ju", (len(stream),) if torn else ()) == whole


@given(st.data())
def test_a_message_cut_short_is_no_answer(data: st.DataObject) -> None:
    """Wherever it is cut before message_stop."""
    needed = stream_of(message([{"type": "text", "text": ""}]), TEXT + CLOSED).removesuffix(b"\n\n")
    with pytest.raises(Unassembled):
        assemble(needed[: data.draw(st.integers(0, len(needed) - 1))])
    assert assemble(needed)["stop_reason"] == "end_turn"


# ---------------------------------------------------------------- Responses

RESPONSE = '{"id":"resp_1", "status":"%s", "temperature":1.0, "output":[{"type":"message"}]}'


def response_stream(kind: str, status: str) -> bytes:
    created = event("response.created", sequence_number=0, response={"id": "resp_1", "status": "in_progress"})
    delta = event("response.output_text.delta", sequence_number=1, delta="hello")
    end = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":2,"response":{RESPONSE % status}}}\n\n'
    return created + delta + end.encode()


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@given(cut=st.integers(0, 300))
def test_a_response_is_that_of_the_last_event_as_written(status: str, cut: int) -> None:
    stream, assembler = response_stream(f"response.{status}", status), ResponseAssembler()
    assembler.feed(stream[:cut])
    assembler.feed(stream[cut:])
    assert assembler.whole() == (RESPONSE % status).encode()
    assert assembler.held_bytes == len(RESPONSE % status)


@pytest.mark.parametrize(
    "stream",
    [
        response_stream("response.failed", "failed"),
        response_stream("response.completed", "completed")[:-40],
        event("response.completed", sequence_number=1),
        event("error", message="no", code="server_error"),
        b"",
    ],
)
def test_a_response_that_has_not_ended_is_no_answer(stream: bytes) -> None:
    assembler = ResponseAssembler()
    assembler.feed(stream)
    with pytest.raises(Unassembled):
        assembler.whole()
