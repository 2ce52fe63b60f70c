"""The text of an answer is kept while the events pass, for all answers within one budget."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.partial_answer import GRANT, PartialAnswer, TextBudget


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def token(text: str, **more: Any) -> bytes:
    return event(
        id="first", model="m", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]
    )


ROLE = event(id="first", model="m", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STOP = event(id="first", model="m", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


def partial(*events: bytes) -> PartialAnswer:
    answer = PartialAnswer(TextBudget())
    for each in events:
        answer.feed(each)
    return answer


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_only_whole_events_are_passed_on(line_end: bytes, data: st.DataObject) -> None:
    """For any split of the bytes, passed bytes end with an event, no byte is lost, and the text is that of the events
    passed."""
    stream = (ROLE + token("one") + token(" two\n") + token(" three") + STOP).replace(b"\n", line_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    answer, passed = PartialAnswer(TextBudget()), b""
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        passed += answer.feed(stream[start:end])
        assert passed == b"" or passed.rstrip(b"\r\n").endswith(b"}")
        assert answer.tokens == sum(passed.count(word) for word in (b"one", b" two", b" three"))
    assert passed + answer.close() == stream
    assert answer.text == "one two\n three"[: [0, 3, 8, 14][answer.tokens]]


@given(st.lists(st.text(min_size=1), max_size=20), st.booleans(), st.booleans())
def test_the_text_is_kept_whatever_it_holds(words: list[str], escaped: bool, grouped: bool) -> None:
    """In any spelling, and however events are grouped in reads."""
    events = [
        b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}, ensure_ascii=escaped).encode() + b"\n\n"
        for word in words
    ]
    answer = partial(b"".join(events)) if grouped else partial(*events)
    assert (answer.text, answer.tokens, answer.obstacle) == ("".join(words), len(words), "")


def test_a_read_of_several_events_teaches_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that writes many events at a time never sends one alone."""
    answer = partial(ROLE + token("one") + token(" two"))
    monkeypatch.setattr(answer, "_parse", pytest.fail)
    answer.feed(token(" three") + token(" four"))
    assert (answer.text, answer.tokens) == ("one two three four", 4)


def test_half_an_event_is_no_text_yet() -> None:
    answer = partial(ROLE, token("one"), token(" two"), b'data: {"choices": [{"delta": {"content": " thr')
    assert (answer.text, answer.tokens, answer.obstacle) == ("one two", 2, "")
    assert answer.identity == {"id": "first", "model": "m"}


def test_a_completion_is_text_too() -> None:
    events = [event(choices=[{"index": 0, "text": word, "finish_reason": None}]) for word in ("one", " two", " three")]
    assert partial(*events).text == "one two three"


def test_the_last_word_of_an_answer_is_text_too() -> None:
    """The events before it are of a known form, and it is none of them; an end without a word adds nothing."""
    words = ROLE, token("one"), token("two")
    assert partial(*words, token("three", finish_reason="length")).text == "onetwothree"
    assert partial(*words, STOP).text == "onetwo"


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
    assert partial(ROLE, token("a"), token("b"), event(choices=[{"index": 0, "delta": delta}])).obstacle


@pytest.mark.parametrize(
    "odd",
    [
        event(choices=[{"index": 0, "delta": "text"}]),
        event(choices=[{"index": 0, "delta": ["text"]}, {"index": 0, "delta": {"content": "more"}}]),
        b'data: {"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n",
    ],
)
def test_an_answer_with_a_malformed_event_passes_and_cannot_be_continued(odd: bytes) -> None:
    answer = partial(ROLE, token("a"))
    assert answer.feed(odd) == odd
    assert answer.feed(token("b")) == token("b")
    assert (answer.obstacle, answer.text) == ("an event of unknown form", "")


def test_several_choices_cannot_be_continued() -> None:
    assert partial(token("one"), event(choices=[{"index": 1, "delta": {"content": "b"}}])).obstacle


def test_half_a_character_in_an_event_cannot_be_continued() -> None:
    """A reader accepts the lone surrogate; UTF-8 cannot carry it to a peer."""
    assert partial(token("one"), b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n').obstacle


def test_junk_is_no_part_of_the_text() -> None:
    answer = partial(token("one"), b"data: {junk\n\n", token(" two"))
    assert (answer.text, answer.obstacle) == ("one two", "")


def test_an_event_of_the_known_form_within_a_comment_is_no_text() -> None:
    """It is the rest of a line that was held back."""
    answer = partial(token("one"), token("two"))
    assert answer.feed(b": half a comment ") == b""
    assert answer.feed(token("x")) == b": half a comment " + token("x")
    assert answer.text == "onetwo"


def test_an_event_too_large_to_be_held_passes_and_is_no_text() -> None:
    answer, large = PartialAnswer(TextBudget()), token("x" * (2 << 20))
    assert answer.feed(large[: 3 << 19]) + answer.feed(large[3 << 19 :]) == large
    assert answer.obstacle


def test_all_answers_share_a_budget() -> None:
    """An answer without room passes on unchanged, and gives back the room that it had."""
    budget = TextBudget(limit=3 * GRANT)
    first, second = PartialAnswer(budget), PartialAnswer(budget)
    first.feed(token("x" * (2 * GRANT)))
    second.feed(token("y"))
    assert budget.used == budget.limit
    assert first.feed(token("x")) == token("x")
    assert first.obstacle == "the memory for rescues is used up"
    assert (first.text, second.text, second.obstacle) == ("", "y", "")
    assert budget.used == GRANT
    assert first.feed(token("x")) == token("x")
    assert (first.text, budget.used) == ("", GRANT)
    second.release()
    assert budget.used == 0


def test_what_has_been_released_takes_no_memory_again() -> None:
    budget = TextBudget()
    answer = PartialAnswer(budget)
    answer.feed(token("one"))
    answer.release()
    answer.release()
    assert answer.feed(token("two") + STOP) == token("two") + STOP
    assert (budget.used, answer.text) == (0, "")


def test_the_tokens_of_a_text_are_never_too_few() -> None:
    """Events may hold several tokens, and a token is at least a byte."""
    answer = partial(token("naïve words"), token(" here"))
    assert answer.tokens == 2
    assert answer.token_bound(6) == 6
    assert answer.token_bound(1) == 2
    assert answer.token_bound(None) == len("naïve words here".encode())
