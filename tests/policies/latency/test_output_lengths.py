"""Expected output tokens."""

from __future__ import annotations

import pytest

from policies.latency.answer_lengths import MAX_LENGTH, PRIOR_LENGTH, AnswerLengths, OutputLengths
from policies.latency.learned_state import LearnedLengths


def learned(*tokens: int) -> OutputLengths:
    lengths = OutputLengths()
    for count in tokens:
        lengths.observe(count)
    return lengths


def test_before_any_answer_a_prior_is_expected() -> None:
    """Bounded by max_tokens."""
    assert (learned().expected(), learned().expected(100)) == (PRIOR_LENGTH, 100)


def test_the_mean_is_learned_within_tens_of_answers() -> None:
    """The prior weighs as much as eight answers."""
    assert learned(*[40] * 100).expected() < 60


def test_the_mean_follows_a_change() -> None:
    """Half-way after some 44 answers."""
    lengths = learned(*[100] * 500)
    for _ in range(44):
        lengths.observe(300)
    assert 190 <= lengths.expected() <= 210


def test_an_absurd_length_is_outlived_within_hundreds_of_answers() -> None:
    """A length of 10**12 in a report, or in a saved state, is no longer than the longest answer."""
    lengths = learned(*[200] * 100, 10**12, *[200] * 300)
    assert lengths.expected() < 220
    lengths.restore(LearnedLengths(1e18, 100), age=0.0)
    assert lengths.expected() == MAX_LENGTH


def test_the_length_of_answers_is_learned_by_route() -> None:
    """Bounded by max_tokens."""
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.observe_output("chat", 40)
    assert lengths.expected_output("chat") == pytest.approx(40, abs=1)
    assert (lengths.expected_output("chat", 20), lengths.expected_output("code")) == (20, 256)
