"""Segments: where a long text is cut before it is tokenised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokenize.segments import LONGEST, TARGET, segments

WORDS = st.sampled_from(["word", " ", "\n", "  ", "\n\n", "/", "}", "  \n", "x" * 700, "好" * 900, "\t", ".\n/", "é"])
TEXTS = st.lists(WORDS, max_size=60).map("".join)


@given(TEXTS)
def test_joined_segments_are_the_text(text: str) -> None:
    """Nothing is lost, doubled or moved."""
    assert "".join(segments(text)) == text


@given(TEXTS)
def test_no_segment_is_longer_than_the_longest(text: str) -> None:
    """Whatever the text, what is tokenised at a time is bounded."""
    assert max(map(len, segments(text))) <= LONGEST


@given(TEXTS, TEXTS)
def test_a_text_that_grows_keeps_its_segments_but_for_the_last(text: str, more: str) -> None:
    """Cuts depend only on what stands before them."""
    before = segments(text)
    assert segments(text + more)[: len(before) - 1] == before[:-1]


def test_a_cut_stands_before_a_space() -> None:
    """The space belongs to the word after it, as in the tokens."""
    assert segments("a" * 3000 + " b c") == ["a" * 3000, " b c"]


def test_a_cut_stands_after_a_line_end_where_there_are_no_spaces() -> None:
    """Chinese prose has no spaces, but it has paragraphs."""
    assert segments("好" * TARGET + "。\n" + "好" * 10) == ["好" * TARGET + "。\n", "好" * 10]


@pytest.mark.parametrize("text", ["", "short", "x" * TARGET])
def test_a_short_text_is_one_segment(text: str) -> None:
    """Most messages are not cut at all."""
    assert segments(text) == [text]
