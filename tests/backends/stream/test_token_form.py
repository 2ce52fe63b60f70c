"""Events of a known form are recognised without being parsed, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.event_shapes import TokenForm, read_text, written

BEFORE, AFTER = b'data: {"choices":[{"delta":{"content":"', b'"}}]}\n\n'


@pytest.fixture
def form() -> TokenForm:
    learned = TokenForm()
    learned.learn(BEFORE + b"word" + AFTER, "word")
    return learned


def test_nothing_is_known_before_a_form_is_learned() -> None:
    assert TokenForm().text(BEFORE + b"word" + AFTER) == b""
    assert TokenForm().texts(BEFORE + b"word" + AFTER) == []


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.booleans())
def test_a_recognised_text_is_what_a_parser_reads(words: list[str], escaped: bool) -> None:
    """Surrogates in an escaped spelling are left to the parser."""
    form = TokenForm()
    form.learn(BEFORE + b"word" + AFTER, "word")
    spelled = [json.dumps(word, ensure_ascii=escaped).encode()[1:-1] for word in words]
    data = b"".join(BEFORE + word + AFTER for word in spelled)
    found = form.texts(data)
    assert found in ([], spelled)
    assert found or any(ord(char) > 0xFFFF for word in words for char in word)
    assert form.text(data) == (spelled[0] if found and len(words) == 1 else b"")
    assert "".join(map(read_text, found)) == ("".join(words) if found else "")


@pytest.mark.parametrize(
    "inside",
    [b"", b'a","x":"b', b"a\\", b"\\ud83d", b"\\x41", b"\xff", b"a\nb", b'"', b"\\u12"],
)
def test_what_is_no_text_of_the_form_is_left_to_a_parser(form: TokenForm, inside: bytes) -> None:
    """An empty text, another member, half an escape, half a character, bytes that are no UTF-8."""
    assert form.text(BEFORE + inside + AFTER) == b""
    assert form.texts(BEFORE + b"word" + AFTER + BEFORE + inside + AFTER) == []


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (b'data: {"content":"a","more":{"content":"b"}}\n\n', "a"),
        (b'data: {"content":"a\\n"}\n\n', "a\n"),
        (b'event: x\ndata: {"content":"a"}\n\n', "a"),
        (b'data: {"content":"a"}\r\n\r\n', "a"),
        (b'data: {"content":"a"}\n\n', "b"),
    ],
)
def test_an_ambiguous_event_teaches_no_form(event: bytes, text: str) -> None:
    form = TokenForm()
    form.learn(event, text)
    assert form.text(event) == b""


def test_a_text_of_a_completion_has_a_form_too() -> None:
    form, event = TokenForm(), b'data: {"choices": [{"text": "a", "index": 0}]}\n\n'
    form.learn(event, "a")
    assert form.text(event.replace(b'"a"', b'"other"')) == b"other"


@given(st.text())
def test_a_text_is_written_and_read(text: str) -> None:
    assert read_text(written(text)) == text


@pytest.mark.parametrize(
    "rest", [b"", BEFORE + b"ha", BEFORE[:9], b"data: [DONE]\n\n", b"data: {}\n\n" + b"data: [DONE]\n\n"]
)
def test_events_of_the_form_are_told_from_what_follows(form: TokenForm, rest: bytes) -> None:
    known = BEFORE + b"one" + AFTER + BEFORE + rb"t\"wo" + AFTER
    assert form.leading(known + rest) == ([b"one", rb"t\"wo"], len(known))
    assert form.texts(known + rest) == ([] if rest else [b"one", rb"t\"wo"])


def test_an_event_of_another_form_between_leaves_all_to_a_parser(form: TokenForm) -> None:
    token = BEFORE + b"one" + AFTER
    assert form.leading(token + token + b"data: {}\n\n" + token + token) == ([], 0)
