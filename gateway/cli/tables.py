"""Text of the commands: tables, lines of a bounded width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from textwrap import wrap


def aligned(rows: Sequence[tuple[str, ...]], left: Collection[int] | None = None) -> list[str]:
    """Rows of a text table. `left`: columns that stand left, None: all; the other columns stand right."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if left is None or at in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


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
