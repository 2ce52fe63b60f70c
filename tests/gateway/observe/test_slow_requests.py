"""Diagnosis at the end of a slow request: bounded in memory, and no burden for a request that met its budgets."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gateway.observe import slow_requests as module
from gateway.observe.part_notes import cause_of
from gateway.observe.record import AttemptRecord, Record, RequestOutcome
from gateway.observe.slow_requests import LOOKED_INTO, SAMPLES, SlowRequests, missed_objective
from policies.diagnosis.causes import Cause
from policies.diagnosis.diagnosis_report import MAX_CANDIDATES, Diagnosis
from policies.types import AttemptKind, AttemptOutcome, Decision, Placement
from tests.support.builders import candidate, record


def slow_requests(recent: list[Record]) -> SlowRequests:
    return SlowRequests(recent, list)


def diagnosis(slow: SlowRequests, made: Record) -> Diagnosis | None:
    """As the Recorder does at the end of a request."""
    if (objective := missed_objective(made)) is not None:
        return slow.diagnosed(made, objective)
    slow.note([made])
    return None


def spent(upstream: float) -> list[float | None]:
    return [0.001, 0.0, 0.001, 0.0, 0.0, None, 0.0, None, 0.001, 0.0, upstream, None, 1.0]


def size(value: object, seen: set[int]) -> int:
    """Bytes of a value and of what it alone holds."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    fields: Iterator[object] = (getattr(value, name) for name in getattr(type(value), "__slots__", ()))
    parts = value if isinstance(value, tuple) else ()
    return sys.getsizeof(value) + sum(size(each, seen) for each in (*fields, *parts))


def test_a_request_that_met_its_budgets_has_no_diagnosis_and_one_that_missed_has_one() -> None:
    slow = slow_requests([])
    for _ in range(20):
        assert diagnosis(slow, record(spent=spent(0.1))) is None
    found = diagnosis(slow, record(ttft=2.0, spent=spent(1.9)))
    assert found is not None
    assert found.usual.requests == 20
    assert found.verdict.part == "upstream"


def test_requests_that_missed_do_not_become_the_usual() -> None:
    """Ten minutes into an incident the usual is still of before."""
    slow = slow_requests([])
    for _ in range(20):
        diagnosis(slow, record(spent=spent(0.1)))
    for _ in range(500):
        found = diagnosis(slow, record(ttft=2.0, spent=spent(1.9)))
    assert found is not None
    assert found.usual.stages["upstream"].p50 == 0.1


def test_the_samples_of_a_route_are_bounded() -> None:
    slow = slow_requests([])
    for _ in range(3 * SAMPLES):
        diagnosis(slow, record(spent=spent(0.1)))
    found = diagnosis(slow, record(end=RequestOutcome.FAILED, ttft=None, spent=spent(0.1)))
    assert found is not None
    assert found.usual.requests == SAMPLES


def test_a_diagnosis_takes_two_kilobytes_at_most_and_keeps_the_best_candidates() -> None:
    """With the usual values, which the route's requests share, left out; of a fleet of 64 with long names."""
    ranked = [candidate(f"engines/{'host' * 10}-{number}:8000") for number in range(64)]
    ended = record(ttft=2.0, spent=spent(1.9), endpoint=ranked[0].endpoint.id)
    ended.decision = Decision(Placement.PLACE, 0.0, 1.0, ranked)
    found = diagnosis(slow_requests([]), ended)
    assert isinstance(found, Diagnosis)
    assert len(found.as_json()["candidates"]) == MAX_CANDIDATES
    assert size(found, {id(found.usual), *map(id, found.alternatives.endpoints)}) < 2048


def test_a_crowd_of_slow_requests_is_looked_into_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storm of refusals costs the loop a bounded share of its time; each still has a cause, and tells how sure."""
    monkeypatch.setattr(module, "monotonic", lambda: 7.0)
    slow, decided = slow_requests([]), 0
    for number in range(3 * LOOKED_INTO):
        found = diagnosis(slow, record(end=RequestOutcome.SHED, ttft=None, total=0.1 * number, spent=spent(0.1)))
        assert found is not None
        decided += not found.verdict.evidence.startswith("one of more than")
        assert found.verdict.over == 0.1 * number
    assert decided == LOOKED_INTO
    monkeypatch.setattr(module, "monotonic", lambda: 8.0)
    found = diagnosis(slow, record(end=RequestOutcome.SHED, ttft=None, spent=spent(0.1)))
    assert found is not None
    assert not found.verdict.evidence.startswith("one of more than")


def test_a_callers_own_fault_has_no_cause() -> None:
    refused = record(end=RequestOutcome.REFUSED, ttft=None, status=400, spent=spent(0.1))
    assert diagnosis(slow_requests([]), refused) is None
    assert cause_of(refused) == ""


def test_an_attempt_that_a_hedge_has_overtaken_is_the_cause_of_the_time_before_the_hedge() -> None:
    """The Record has it as cancelled: by the winner, not by the caller."""
    outraced = AttemptRecord(
        1, AttemptKind.PRIMARY, "small/a", "small", opened=0.0, ended=2.0, ending=AttemptOutcome.CANCELLED
    )
    won = AttemptRecord(
        2, AttemptKind.HEDGE, "small/b", "small", opened=1.9, ended=3.0, ending=AttemptOutcome.COMPLETED
    )
    hedged = record(ttft=2.0, spent=[*spent(0.1)[:7], 1.9, *spent(0.1)[8:]], attempts=[outraced, won])
    found = diagnosis(slow_requests([]), hedged)
    assert found is not None
    assert (found.verdict.part, found.verdict.cause) == ("failover", Cause.ENDPOINT_FAILED)
    assert "the attempt at small/a gave no token" in found.verdict.evidence


def test_an_attempt_that_the_caller_has_left_is_no_failure_of_the_endpoint() -> None:
    left = AttemptRecord(
        1, AttemptKind.PRIMARY, "small/a", "small", opened=0.0, ended=2.0, ending=AttemptOutcome.CANCELLED
    )
    gone = record(end=RequestOutcome.FAILED, ttft=None, spent=spent(0.1), attempts=[left])
    found = diagnosis(slow_requests([]), gone)
    assert found is not None
    assert found.verdict.cause is not Cause.ENDPOINT_FAILED
