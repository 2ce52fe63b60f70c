"""Text tables of the commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[tuple[str, ...]], left: Collection[int] | None = None) -> list[str]:
    """Rows of a text table. `left`: columns that stand left, None: all; the other columns stand right."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if left is None or at in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
