"""Text of the commands: tables, bars for a terminal, lines of a bounded width."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap


def aligned(rows: Sequence[tuple[str, ...]], left: Collection[int] | None = None) -> list[str]:
    """Rows of a text table. `left`: columns that stand left, None: all; the other columns stand right."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if left is None or at in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def within(rows: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    """Rows of a text table of a bounded width: the first column stays, the longest of the others wrap within theirs.
    None: a line for each row."""
    if width is None:
        return aligned(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(width - widths[0] - 2 * (len(widths) - 1), 12 * (len(widths) - 1))
    while sum(widths[1:]) > room:
        longest = max(range(1, len(widths)), key=widths.__getitem__)
        others = sum(widths[1:]) - widths[longest]
        second = max((each for at, each in enumerate(widths) if at not in (0, longest)), default=0)
        widths[longest] = max(room - others, min(second, widths[longest]) - 1)
    return [line for row in rows for line in _folded(row, widths)]


def _folded(row: tuple[str, ...], widths: Sequence[int]) -> list[str]:
    cells = [wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)]
    lines = zip_longest(*cells, fillvalue="")
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def terminal_width() -> int | None:
    """Columns of the terminal that the output goes to; None: it goes to a file or a pipe."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of a paragraph; all but the first stand two columns further in."""
    return wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def shortened(name: str, width: int) -> str:
    """Shortens in the middle: both ends distinguish endpoints."""
    front, back = (width - 1) // 2, width // 2
    return name if len(name) <= width else f"{name[:front]}…{name[len(name) - back :]}"


def printable(text: str) -> str:
    """Without commands to a terminal, which the text of a caller or of a server may hold."""
    return "".join(each if each.isprintable() else "?" for each in text)


BAR = 40  # characters of the longest bar


def bars(rows: Sequence[tuple[str, float, str]], longest: int = BAR) -> list[str]:
    """A line per row of a label, a value and its text; the bar of the largest value has `longest` characters."""
    if not rows:
        return []
    width, most = max(len(label) for label, _, _ in rows), max(value for _, value, _ in rows) or 1.0
    return [
        f"{label.ljust(width)}  {'█' * max(round(longest * value / most), 1)} {text}" for label, value, text in rows
    ]
