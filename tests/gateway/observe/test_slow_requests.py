"""Diagnosis at the end of a slow request: bounded in memory, and no burden for a request that met its budgets."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gateway.observe import slow_requests as module
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.slow_requests import LOOKED_INTO, SAMPLES, SlowRequests
from policies.diagnosis.diagnosis_report import MOST, Diagnosis
from policies.types import Decision, Placement
from tests.support.builders import candidate, record


def slow_requests(recent: list[Record]) -> SlowRequests:
    return SlowRequests(recent, list)


def spent(upstream: float) -> list[float | None]:
    return [0.001, 0.0, 0.001, 0.0, 0.0, None, 0.0, None, 0.001, 0.0, upstream, 0.001, 1.0]


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
        assert slow.on_ended(record(spent=spent(0.1))) is None
    found = slow.on_ended(record(ttft=2.0, spent=spent(1.9)))
    assert found is not None
    assert found.usual.requests == 20
    assert found.verdict.part == "upstream"


def test_requests_that_missed_do_not_become_the_usual() -> None:
    """Ten minutes into an incident the usual is still of before."""
    slow = slow_requests([])
    for _ in range(20):
        slow.on_ended(record(spent=spent(0.1)))
    for _ in range(500):
        found = slow.on_ended(record(ttft=2.0, spent=spent(1.9)))
    assert found is not None
    assert found.usual.stages["upstream"].p50 == 0.1


def test_the_samples_of_a_route_are_bounded() -> None:
    slow = slow_requests([])
    for _ in range(3 * SAMPLES):
        slow.on_ended(record(spent=spent(0.1)))
    found = slow.on_ended(record(end=RequestOutcome.FAILED, ttft=None, spent=spent(0.1)))
    assert found is not None
    assert found.usual.requests == SAMPLES


def test_a_diagnosis_takes_two_kilobytes_at_most_and_keeps_the_best_candidates() -> None:
    """With the usual values, which the route's requests share, left out; of a fleet of 64 with long names."""
    ranked = [candidate(f"engines/{'host' * 10}-{number}:8000") for number in range(64)]
    ended = record(ttft=2.0, spent=spent(1.9), endpoint=ranked[0].endpoint.id)
    ended.decision = Decision(Placement.PLACE, 0.0, 1.0, ranked)
    found = slow_requests([]).on_ended(ended)
    assert isinstance(found, Diagnosis)
    assert len(found.as_json()["candidates"]) == MOST
    assert size(found, {id(found.usual), *map(id, found.alternatives.endpoints)}) < 2048


def test_a_crowd_of_slow_requests_is_looked_into_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storm of refusals costs the loop a bounded share of its time; each still has a cause, and tells how sure."""
    monkeypatch.setattr(module, "monotonic", lambda: 7.0)
    slow, decided = slow_requests([]), 0
    for number in range(3 * LOOKED_INTO):
        found = slow.on_ended(record(end=RequestOutcome.SHED, ttft=None, total=0.1 * number, spent=spent(0.1)))
        assert found is not None
        decided += not found.verdict.evidence.startswith("one of more than")
        assert found.verdict.over == 0.1 * number
    assert decided == LOOKED_INTO
    monkeypatch.setattr(module, "monotonic", lambda: 8.0)
    found = slow.on_ended(record(end=RequestOutcome.SHED, ttft=None, spent=spent(0.1)))
    assert found is not None
    assert not found.verdict.evidence.startswith("one of more than")


def test_a_callers_own_fault_has_no_cause() -> None:
    refused = record(end=RequestOutcome.REFUSED, ttft=None, status=400, spent=spent(0.1))
    assert slow_requests([]).on_ended(refused) is None
    assert refused.cause == ""
