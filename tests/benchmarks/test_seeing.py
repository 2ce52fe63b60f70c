"""The self-measurement benchmark uses whole requests."""

from __future__ import annotations

import pytest

from benchmarks.seeing import GROUP, finished, measure, table
from gateway.observe.record import STREAM, RequestOutcome, Stage


async def test_its_records_are_those_of_answered_requests() -> None:
    """With every stage of an ordinary request, which sum; some lost an attempt."""
    records = finished(200)
    ordinary = {stage for stage in Stage if stage not in (Stage.FAILOVER, Stage.RATE_LIMIT)}
    for record in records:
        assert record.end is RequestOutcome.COMPLETED
        assert {*record.stages} - {Stage.FAILOVER} == ordinary
        assert sum(s for stage, s in record.stages.items() if stage is not STREAM) == pytest.approx(record.ttft)
    assert 0 < sum(len(record.attempts) == 2 for record in records) < 100


async def test_it_prints_a_row_for_each_and_for_all() -> None:
    """Warm and cold."""
    printed = list(table(await measure(2 * GROUP)))
    assert [row.split("|")[1].strip() for row in printed[2:]] == ["Record", "metrics", "access log", "all three"]
    assert all(row.count("|") == 4 for row in printed)
