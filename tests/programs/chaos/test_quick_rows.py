"""The quick rows of the catalogue with small numbers. Rows with a time as the goal run in `make chaos` only."""

from __future__ import annotations

import pytest

from tests.programs.chaos.catalogue import ROWS
from tests.programs.chaos.rows import Outcome, Result, Row, run

# Rows with no time as the goal, or a time that a busy machine meets.
UNTIMED = {7, 9, 10, 11, 30, 32, 33, 35, 40, 41, 43}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.number}-{row.measure.__name__}")
        for row in ROWS
        if row.quick and row.number in UNTIMED
    ],
)
async def test_a_quick_row_meets_its_goal(row: Row) -> None:
    outcome = await run(row, quick=True)
    assert outcome.passed, f"{outcome.result.figures}: {outcome.verdict}"


def test_a_violated_invariant_falls_short() -> None:
    """A met goal does not hide a leak."""
    outcome = Outcome(ROWS[0], Result("20 of 20", True), 1.0, ["firsttoken_queue_depth is 1"])
    assert not outcome.passed
    assert outcome.verdict == "**falls short**: invariants: firsttoken_queue_depth is 1"
