"""Bars of the commands' tables, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

BAR = 40  # characters of the longest bar


def bars(rows: Sequence[tuple[str, float, str]], longest: int = BAR) -> list[str]:
    """A line per row of a label, a value and its text; the bar of the largest value has `longest` characters."""
    if not rows:
        return []
    width, most = max(len(label) for label, _, _ in rows), max(value for _, value, _ in rows) or 1.0
    return [
        f"{label.ljust(width)}  {'█' * max(round(longest * value / most), 1)} {text}" for label, value, text in rows
    ]
