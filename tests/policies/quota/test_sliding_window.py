"""A sliding window of 60 s: no minute exceeds the limit, and the announced wait is exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.quota.sliding_window import WINDOW_S, WINDOW_WORDS, SlidingWindow, available_at, used

STEPS = st.lists(st.tuples(st.floats(0, 2) | st.floats(0, 30), st.integers(0, 2), st.integers(1, 40)), max_size=60)


def window() -> SlidingWindow:
    return SlidingWindow([0] * WINDOW_WORDS)


@given(steps=STEPS, limit=st.integers(1, 100))
def test_no_minute_exceeds_the_limit(steps: list[tuple[float, int, int]], limit: int) -> None:
    """Two writers, each with a window, read both windows and keep a common limit."""
    windows, now = [window(), window()], 100.0
    let_in: list[tuple[float, int]] = []
    for pause, which, tokens in steps:
        now += pause
        if used(windows, int(now))[1] + tokens <= limit:
            windows[which % 2].add(int(now), 1, tokens)
            let_in.append((now, tokens))
        assert sum(n for at, n in let_in if at > now - WINDOW_S) <= limit


@given(steps=STEPS)
def test_entries_older_than_61_s_do_not_count(steps: list[tuple[float, int, int]]) -> None:
    """A steady caller loses a second of the minute, and no more."""
    one, now = window(), 100.0
    added: list[tuple[float, int]] = []
    for pause, requests, tokens in steps:
        now += pause
        one.add(int(now), requests, tokens)
        added.append((now, tokens))
        assert one.used(int(now))[1] <= sum(n for at, n in added if at > now - WINDOW_S - 1)


@given(steps=STEPS, back=st.sets(st.integers(0, 59), max_size=10))
def test_a_refund_counts_as_never_added(steps: list[tuple[float, int, int]], back: set[int]) -> None:
    """Once, and also after the second of the entry has left the window."""
    one, same, now = window(), window(), 100.0
    added: list[tuple[int, int]] = []
    for pause, _, tokens in steps:
        now += pause
        one.add(int(now), 1, tokens)
        added.append((int(now), tokens))
    given_back = {which for which in back if which < len(added)}
    for which, (second, tokens) in enumerate(added):
        gone = which in given_back
        same.add(second, 0 if gone else 1, 0 if gone else tokens)
    for which in given_back:
        one.refund(added[which][0], int(now), added[which][1], 1)
    for later in range(WINDOW_S + 2):
        assert one.used(int(now) + later) == same.used(int(now) + later)


@given(steps=STEPS, amount=st.integers(1, 200))
def test_available_at_is_exact_to_the_second(steps: list[tuple[float, int, int]], amount: int) -> None:
    windows, now = [window(), window()], 100.0
    for pause, which, tokens in steps:
        now += pause
        windows[which % 2].add(int(now), 1, tokens)
    counted = used(windows, int(now))[1]
    if amount <= counted:
        at = available_at(windows, int(now), 1, amount)
        assert used(windows, at)[1] <= counted - amount
        if at > int(now) + 1:
            assert used(windows, at - 1)[1] > counted - amount
