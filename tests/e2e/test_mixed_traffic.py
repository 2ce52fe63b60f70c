"""Concurrent requests of every kind, over real sockets: Records match the observed answers.

`python -m benchmarks.mixed` is the same with 10,000 requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.mixed import CheckResults, access_log_errors, measure, record_errors, stage_sum_errors
from gateway.observe.record import RequestOutcome, Stage
from policies.types import AttemptKind

COUNT = 500


async def test_every_request_has_exactly_one_correct_record() -> None:
    """Served, failed, shed, refused and disconnected requests, and backends that break off; no state remains."""
    truth = await measure(COUNT)
    assert truth.wrong == []
    assert len(truth.asked) == len(truth.records) == COUNT
    ends = Counter(record.end for record in truth.records)
    assert {
        RequestOutcome.COMPLETED,
        RequestOutcome.REFUSED,
        RequestOutcome.SHED,
        RequestOutcome.CLIENT_GONE,
        RequestOutcome.UPSTREAM_BROKE,
        RequestOutcome.FAILED,
    } <= set(ends)
    gone = [record.ttft is None for record in truth.records if record.end is RequestOutcome.CLIENT_GONE]
    assert set(gone) == {True, False}  # before and after the first token
    kinds = {attempt.kind for record in truth.records for attempt in record.attempts}
    assert kinds == {AttemptKind.PRIMARY, AttemptKind.FALLBACK, AttemptKind.HEDGE}
    assert_errors_are_detected(truth)


def assert_errors_are_detected(truth: CheckResults) -> None:
    """Checks that each kind of wrong Record is detected."""
    requests, records = truth.asked, list(truth.records)
    assert record_errors(requests, records[1:])
    assert record_errors(requests, [*records, records[0]])
    assert record_errors(requests[1:], records)
    completed = next(i for i, record in enumerate(records) if record.end is RequestOutcome.COMPLETED)
    assert record_errors(
        requests,
        [*records[:completed], replace(records[completed], end=RequestOutcome.CLIENT_GONE), *records[completed + 1 :]],
    )
    assert access_log_errors(requests, [{"request_id": one.id} for one in requests[1:]])
    late = [seconds if seconds is None else seconds + 0.002 for seconds in records[completed].spent]
    assert late[Stage.READ] is not None
    assert stage_sum_errors(replace(truth, records=[replace(records[completed], spent=late)]))
    assert not stage_sum_errors(replace(truth, records=[records[completed]]))
