"""A broken answer and its continuation are one stream to the caller."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.continuation import MOST_HELD, Continuation, Diverged
from backends.stream.partial_answer import PartialAnswer, TextBudget


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str, id: str = "first", **more: Any) -> bytes:
    return event(id=id, model=id, choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}])


ROLE = event(id="first", model="first", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STOP = event(id="second", model="second", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(id="second", choices=[], usage={"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15})


def partial(*events: bytes) -> PartialAnswer:
    answer = PartialAnswer(TextBudget())
    answer.feed(b"".join(events))
    return answer


def texts(stream: bytes) -> str:
    chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line and line != b"data: [DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


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


# ---------------------------------------------------------------- a peer that begins anew unasked

WORDS = "The quick brown fox jumps over the lazy dog and then rests for a while".split(" ")
ANSWER = [WORDS[0], *(" " + word for word in WORDS[1:])]


def stream_of(words: list[str], finish: str = "stop") -> list[bytes]:
    """Events of a peer, as vLLM writes them: the finish reason is in the last event with text."""
    tokens = [token(word, "second") for word in words[:-1]]
    return [ROLE, *tokens, token(words[-1], "second", finish_reason=finish), b"data: [DONE]\n\n"]


def joined(first: list[str], second: list[bytes], given: str | None = None) -> tuple[str, Continuation]:
    """The text that a caller reads. Raises Diverged."""
    answer = partial(*map(token, first))
    continuation = Continuation(answer, answer.text if given is None else given)
    return answer.text + texts(b"".join(map(continuation.feed, second)) + continuation.close()), continuation


@given(st.integers(2, len(ANSWER) - 1))
def test_an_answer_begun_anew_unasked_is_not_doubled(cut: int) -> None:
    """The caller reads the answer once, whole, wherever the first stream broke."""
    text, continuation = joined(ANSWER[:cut], stream_of(ANSWER))
    assert text == "".join(ANSWER)
    assert continuation.restarted_unasked
    assert continuation.tokens == 0


@given(st.integers(1, len(ANSWER) - 1))
def test_a_continuation_is_not_taken_for_an_answer_begun_anew(cut: int) -> None:
    text, continuation = joined(ANSWER[:cut], stream_of(ANSWER[cut:]))
    assert text == "".join(ANSWER)
    assert not continuation.restarted_unasked


def test_a_peer_is_judged_within_its_first_eight_tokens() -> None:
    """Nothing is held back longer; without likeness nothing is held back at all."""
    answer = partial(*map(token, ANSWER[:12]))
    continuation = Continuation(answer, answer.text)
    for word in ANSWER[:7]:
        assert continuation.feed(token(word, "second")) == b""
        assert not continuation.restarted_unasked
    assert continuation.feed(token(ANSWER[7], "second")) == b""
    assert continuation.restarted_unasked
    other = Continuation(answer, answer.text)
    assert texts(other.feed(token(ANSWER[12], "second"))) == ANSWER[12]


@pytest.mark.parametrize("events", [1, 2, 5])
def test_events_of_several_tokens_are_recognised_too(events: int) -> None:
    size = -(-len(ANSWER) // events)
    groups = ["".join(ANSWER[at : at + size]) for at in range(0, len(ANSWER), size)]
    text, continuation = joined(ANSWER[:10], stream_of(groups))
    assert text == "".join(ANSWER)
    assert continuation.restarted_unasked


@pytest.mark.parametrize("equal", range(3, 12))
def test_an_answer_begun_anew_with_other_words_ends_in_an_error(equal: int) -> None:
    """Joined, its beginning would stand in the text twice."""
    with pytest.raises(Diverged):
        joined(ANSWER[:12], stream_of([*ANSWER[:equal], " cat", " sleeps"]))


def test_other_words_are_recognised_in_events_of_several_tokens_too() -> None:
    with pytest.raises(Diverged):
        joined(ANSWER[:12], stream_of(["".join(ANSWER[:6]) + " cat", " sleeps"]))


@pytest.mark.parametrize("equal", [1, 2])
def test_a_word_or_two_may_be_equal_by_chance(equal: int) -> None:
    """As "```python" begins a second block of code."""
    text, continuation = joined(ANSWER[:12], stream_of([*ANSWER[:equal], " cat", " sleeps"]))
    assert text == "".join([*ANSWER[:12], *ANSWER[:equal], " cat", " sleeps"])
    assert not continuation.restarted_unasked


def test_a_text_that_repeats_its_beginning_goes_on_or_ends_in_an_error() -> None:
    """Both readings of "a a a a" fit; other words decide."""
    first = ["a", " a", " a", " a", " a"]
    with pytest.raises(Diverged):
        joined(first, stream_of(["a", " a", " a", " a", " a", " b"]))
    rows = ["| one", " | two", " |\n"] * 3
    text, _ = joined(rows, stream_of(["| one", " | two", " | three"]), given="".join(rows))
    assert text == "".join([*rows, "| one", " | two", " | three"])


def test_a_peer_that_writes_no_text_is_not_held_for_ever() -> None:
    """Events without a text decide nothing, and would fill the memory."""
    with pytest.raises(Diverged):
        joined(ANSWER[:4], [ROLE] * (MOST_HELD + 1))


def test_a_single_token_repeated_is_unclear() -> None:
    with pytest.raises(Diverged):
        joined(["Hi"], stream_of(["Hi", " there"]))


@pytest.mark.parametrize(
    ("words", "finish", "whole"),
    [
        (["```"], "stop", "```\nx = 1\n```"),
        (["```"], "length", None),
        (["```", "\nx", " ="], "stop", None),
    ],
)
def test_an_end_while_the_text_is_held_is_judged(words: list[str], finish: str, whole: str | None) -> None:
    """A closing fence is like the opening one. An end by the limit in the midst of known words is no end."""
    first = ["```", "\nx", " =", " 1\n"]
    if whole is None:
        with pytest.raises(Diverged):
            joined(first, stream_of(words, finish))
    else:
        text, continuation = joined(first, stream_of(words, finish))
        assert text == whole
        assert not continuation.restarted_unasked


def test_a_stream_that_ends_without_a_reason_is_judged_too() -> None:
    """Some servers send [DONE] alone."""
    first = ["```", "\nx", " =", " 1\n"]
    text, _ = joined(first, [token("```", "second"), b"data: [DONE]\n\n"])
    assert text == "```\nx = 1\n```"


def test_held_events_survive_a_torn_one() -> None:
    """`drop` forgets half an event, never a whole one."""
    answer = partial(*map(token, ANSWER[:12]))
    continuation = Continuation(answer, answer.text)
    assert continuation.feed(token(ANSWER[0], "second") + b'data: {"choi') == b""
    assert continuation.drop() == b""
    assert texts(continuation.feed(token(" cat", "second"))) == ANSWER[0] + " cat"


def test_usage_of_an_answer_begun_anew_is_that_of_the_peer() -> None:
    """The peer was given nothing and has written all of the answer."""
    answer = partial(*map(token, ANSWER[:12]))
    continuation = Continuation(answer, answer.text, text_tokens=12)
    assert continuation.tokens == 12
    out = continuation.feed(b"".join(token(word, "second") for word in ANSWER) + USAGE)
    usage = json.loads(out.split(b"\n\n")[-2][6:])["usage"]
    assert usage == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


def test_a_counted_text_makes_usage_exact_without_a_count_of_the_prompt() -> None:
    """Events may hold several tokens."""
    answer = partial(token("one two three"), token(" four"))
    usage = json.loads(Continuation(answer, answer.text, text_tokens=4).feed(USAGE)[6:])["usage"]
    assert usage == {"prompt_tokens": 8, "completion_tokens": 7, "total_tokens": 15}
