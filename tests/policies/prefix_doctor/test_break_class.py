"""Classes of text that changed at the place of a break."""

from __future__ import annotations

import pytest

from policies.prefix_doctor.break_class import BreakClass, changed_class, mark


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("run 7f3a9c21-b of the day", "run 99d0e1f2-c of the day", BreakClass.RANDOM_ID),
        ("run-7f3a9c21 of the day", "run-99d0e1f2 of the day", BreakClass.RANDOM_ID),
        ("step 7 of the day", "step 12 of the day", BreakClass.COUNTER),
        ("seven_days of the day", "eight_days of the day", BreakClass.TEXT),
    ],
)
def test_the_class_is_that_of_the_only_text_that_differs(before: str, after: str, told: BreakClass) -> None:
    assert changed_class(mark(before), mark(after)) is told


@pytest.mark.parametrize("text", ["a", "-", "1", "a_", "cch=", "1:11 ", "Mon, ", "2024-01-01 ,"])
def test_a_window_is_read_in_time_proportional_to_its_length(text: str) -> None:
    """The event loop reads it. This one is a thousand times as long as windows are: by its square it would take an
    hour."""
    assert mark(text * (400_000 // len(text))).plain
