"""A broken answer and its continuation are one stream to the caller."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.continuation import KEPT, Continuation, Diverged, PartialAnswer, RelayedEvents, read_partial


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str, id: str = "first", **more: Any) -> bytes:
    return event(id=id, model=id, choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}])


ROLE = event(id="first", model="first", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STOP = event(id="second", model="second", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(id="second", choices=[], usage={"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15})


def partial(*events: bytes) -> PartialAnswer:
    relayed = RelayedEvents()
    relayed.feed(b"".join(events))
    return read_partial(relayed)


def texts(stream: bytes) -> str:
    chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line and line != b"data: [DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_only_whole_events_are_passed_on(line_end: bytes, data: st.DataObject) -> None:
    """For any split of the bytes, passed bytes end with an event, and no byte is lost at the end."""
    stream = (ROLE + token("one") + token(" two\n") + STOP).replace(b"\n", line_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    relayed, passed = RelayedEvents(), b""
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        passed += relayed.feed(stream[start:end])
        assert passed == b"" or passed.rstrip(b"\r\n").endswith(b"}")
        assert relayed.complete == passed
    assert passed + relayed.close() == stream


def test_the_text_so_far_is_read_from_whole_events() -> None:
    answer = partial(ROLE, token("one"), token(" two"), b'data: {"choices": [{"delta": {"content": " thr')
    assert (answer.text, answer.tokens, answer.finished, answer.obstacle) == ("one two", 2, False, "")
    assert answer.identity == {"id": "first", "model": "first"}


def test_a_finished_answer_needs_no_continuation() -> None:
    assert partial(ROLE, token("one"), STOP).finished


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"audio": {"data": "AAAA"}},
        {"content": [{"type": "text", "text": "a"}]},
    ],
)
def test_an_answer_that_is_more_than_text_cannot_be_continued(delta: dict[str, Any]) -> None:
    """An engine that receives such a part as text does not resume its grammar."""
    assert partial(ROLE, event(choices=[{"index": 0, "delta": delta}])).obstacle


def test_several_choices_cannot_be_continued() -> None:
    assert partial(token("one"), event(choices=[{"index": 1, "delta": {"content": "b"}}])).obstacle


def test_an_answer_too_long_to_keep_passes_unchanged() -> None:
    relayed, stream = RelayedEvents(), token("x" * 500_000)
    assert b"".join(relayed.feed(stream) for _ in range(10)) == stream * 10
    assert 10 * len(stream) > KEPT
    assert read_partial(relayed).obstacle


def test_the_second_stream_continues_the_first() -> None:
    """One identity, one role, one end."""
    rewriter = Continuation(partial(ROLE, token("one")), "one")
    second = rewriter.feed(ROLE + token(" two", id="second") + STOP + b"data: [DONE]\n\n") + rewriter.close()
    assert texts(second) == " two"
    assert b"second" not in second
    assert b"assistant" not in second
    assert second.count(b'"stop"') == 1
    assert second.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        (["one", " "], [" ", "two"], "one two"),
        (["one", " "], [" two"], "one two"),
        (["one\n", "\n"], ["\n\n", "two"], "one\n\ntwo"),
        (["one\n"], ["\n\ntwo"], "one\n\ntwo"),
        (["one "], ["two"], "one two"),
        (["one"], [" two"], "one two"),
    ],
)
def test_white_space_at_the_joint_appears_once(first: list[str], second: list[str], whole: str) -> None:
    """Chat templates remove trailing white space from a text to continue."""
    answer = partial(*map(token, first))
    rewriter = Continuation(answer, answer.text.rstrip())
    joined = b"".join(rewriter.feed(token(text, id="second")) for text in second)
    assert answer.text + texts(joined) == whole


def test_usage_is_that_of_the_whole_answer() -> None:
    """The second engine counts the text so far as prompt; a known count of the original prompt is exact."""
    answer = partial(token("one"), token(" two"))
    exact = Continuation(answer, answer.text, prompt_tokens=9)
    counted = json.loads(exact.feed(USAGE)[6:])["usage"]
    assert counted == {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    estimated = json.loads(Continuation(answer, answer.text).feed(USAGE)[6:])["usage"]
    assert estimated == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def test_white_space_given_to_the_engine_is_not_repeated() -> None:
    """Completions have no template: the continuation's own white space is new."""
    rewriter = Continuation(partial(token("one ")), "one ")
    assert texts(rewriter.feed(token(" two", id="second"))) == " two"


@given(data=st.data())
def test_a_whole_second_answer_is_joined_where_its_text_begins_with_the_first(data: st.DataObject) -> None:
    """For any split of both into tokens."""
    text = data.draw(st.text("ab \n", min_size=2, max_size=12))
    end = data.draw(st.integers(1, len(text)))
    cuts = sorted({0, len(text), *data.draw(st.sets(st.integers(0, len(text)), max_size=5))})
    parts = [text[a:b] for a, b in pairwise(cuts)]
    joined = Continuation(partial(ROLE, token(text[:end])), None)
    out = b"".join(joined.feed(event) for event in (*(token(part, "second") for part in parts), STOP))
    assert text[:end] + texts(out) == text
    assert joined.tokens == 0
    other = Continuation(partial(ROLE, token(text[:end] + "c")), None)
    with pytest.raises(Diverged):
        other.feed(b"".join(token(part, "second") for part in parts) + STOP)
