"""The recent pace of answers in progress, by counts of their tokens."""

from __future__ import annotations

import pytest

from policies.latency.answer_pace import WINDOW, YOUNG, AnswerPace, TokenWindows, pace_of

COUNTS = 0.2  # s between two counts


def written(*paces: tuple[float, float]) -> tuple[TokenWindows, float]:
    """An answer that was written at each of these paces (s per token) for a time (s), counted five times a second."""
    windows, now, tokens = TokenWindows(0.0), 0.0, 1.0
    for pace, seconds in paces:
        for _ in range(round(seconds / COUNTS)):
            now += COUNTS
            tokens += COUNTS / pace
            windows.count(int(tokens + 1e-6), now)
    return windows, now


def test_a_pace_is_that_of_the_last_seconds() -> None:
    """Whatever it was before: what was written longer ago than two windows and two counts is forgotten."""
    windows, now = written((0.02, 4.0), (0.2, 2 * (WINDOW + COUNTS)))
    assert windows.tpot(now) == pytest.approx(0.2, rel=0.1)
    windows, now = written((0.02, 4.0))
    assert windows.tpot(now) == pytest.approx(0.02, rel=0.05)


def test_a_young_answer_shows_no_pace() -> None:
    windows, _ = written((0.02, 0.4))
    assert windows.tpot(YOUNG - 0.01) is None


def test_an_endpoint_is_as_fast_as_its_fastest_answer_and_silent_while_all_are() -> None:
    """One whose caller does not read says nothing of the others."""
    (slow, now), (quick, _), stopped = written((0.2, 4.0)), written((0.02, 4.0)), TokenWindows(0.0)
    found = pace_of([slow, quick, stopped], 1.0, now + 0.3)
    assert found.tpot == pytest.approx(0.02, rel=0.4)
    assert found.silent == pytest.approx(0.3)
    assert pace_of([stopped], 1.0, 3.0) == AnswerPace(None, 3.0)


def test_an_event_may_hold_several_tokens() -> None:
    windows, now = written((0.08, 4.0))
    assert pace_of([windows], 4.0, now).tpot == pytest.approx(0.02, rel=0.1)


def test_without_answers_nothing_is_known() -> None:
    assert pace_of([], 1.0, 5.0) == AnswerPace()
