"""What counts as demand, and how it is read again."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from time import time
from typing import Any

import pytest

from gateway.admin.admin_views import request_view
from gateway.observe.record import AttemptRecord, RequestOutcome
from gateway.strict_json import encode
from lab.autoscale.demand import MAX_DELAY, MAX_ROWS, DemandRow, DemandWindow
from lab.autoscale.replay_process import question_of
from lab.capacity.replica_law import KEPT
from policies.types import AttemptKind, AttemptOutcome
from tests.lab.autoscale.jobs import job
from tests.support.builders import record as ended

NOW = time()


def record(end: str = "completed", *, at: float = NOW, **more: Any) -> dict[str, Any]:
    """A member of the answer of GET /requests."""
    given = {"route": "chat", "tenant": "t", "prompt_tokens_estimated": 900, "output_tokens": 50, "prefix": [1], **more}
    session = given.pop("session", 0)
    found = ended(arrival=at, wall=at, end=RequestOutcome(end), **given)
    return {**json.loads(encode(request_view(found))), "session": f"s{session}" if session else None}


def window(*records: dict[str, Any]) -> DemandWindow:
    found = DemandWindow()
    found.routes = frozenset({"chat"})
    for each in records:
        found.add(each)
    return found


def test_what_was_shed_lost_or_abandoned_is_demand_and_a_callers_fault_is_none() -> None:
    ends = [end for end in RequestOutcome if window(record(end.value)).rows({"chat"})]
    assert set(RequestOutcome) - set(ends) == {RequestOutcome.REFUSED}
    assert not window(record(cache="hit")).rows({"chat"})
    assert not window(record(prompt_tokens_estimated=None)).rows({"chat"})


def test_only_routes_of_scaled_pools_are_kept() -> None:
    assert not window(record(route="other")).rows({"other"})


def test_the_window_is_bounded_in_time_and_in_number() -> None:
    late = window(record(at=NOW), record(at=NOW + KEPT + 1))
    assert [row.at for row in late.rows({"chat"})] == [NOW + KEPT + 1]


def test_of_too_many_requests_whole_sessions_are_left_out_and_no_time() -> None:
    """Twenty seconds of a busy gateway end before the answers do: half of the engines would seem enough."""
    many = DemandWindow()
    many.routes, began = frozenset({"chat"}), many.since
    for i in range(2 * MAX_ROWS):
        many.add(record(at=NOW + i / 1_000, session=i // 10 + 1, prompt_tokens_estimated=900 + i % 10))
    rows = many.rows({"chat"})
    assert len(rows) <= MAX_ROWS
    assert many.since == began
    assert many.share == pytest.approx(len(rows) / (2 * MAX_ROWS), rel=0.1)
    assert {sum(row.session == each for row in rows) for each in {row.session for row in rows}} == {10}


def test_all_sessions_are_kept_again_a_window_after_there_is_room_for_them() -> None:
    many = window(*(record(at=NOW + i / 1_000) for i in range(MAX_ROWS + 1)))
    assert many.share == 0.5
    for second in range(int(2.5 * KEPT)):
        many.add(record(at=NOW + 11.0 + second, session=second + 1))
    rows = many.rows({"chat"})
    assert many.share == 1.0
    assert len(rows) == pytest.approx(KEPT, abs=2)


def test_a_session_of_a_caller_that_is_most_of_the_traffic_is_bounded_too() -> None:
    one = window(*(record(at=NOW + i / 1_000, session=3, prompt_tokens_estimated=900 + i) for i in range(MAX_ROWS + 9)))
    assert len(one.rows({"chat"})) <= MAX_ROWS


def row(at: float, prefix: list[int], is_answered: bool, output: int = 50) -> DemandRow:
    return DemandRow(NOW + at, "chat", "t", 0, 900, output, array("Q", prefix).tobytes(), is_answered)


def test_a_prompt_sent_again_after_a_refusal_is_the_same_demand() -> None:
    rows = [row(-500.0, [1], False, 0), row(-495.0, [1], False, 0), row(-480.0, [1], True), row(-100.0, [1], True)]
    again = [*rows, row(-90.0, [1], True)]  # asked again after an answer: more demand
    found = question_of(job(now=NOW, rows=again)).arrivals
    assert [round(each.at) for each in found] == [100, 500, 510]
    assert [each.output_tokens for each in found] == [50, 50, 50]


def test_requests_without_a_prefix_are_never_taken_for_retries() -> None:
    rows = [row(-500.0, [], False), row(-499.0, [], True)]
    assert len(question_of(job(now=NOW, rows=rows)).arrivals) == 2


def test_the_window_ends_where_most_answers_have_ended() -> None:
    """Requests in progress are not read: the last minute of long answers would look like falling traffic."""
    assert window().delay == 0.0
    times = [*range(1, 11)]
    assert window(*(record(at=NOW + took, total=float(took)) for took in times)).delay == 10.0
    assert window(record(total=500.0)).delay == MAX_DELAY
    late = [row(-5.0, [1], True), row(-50.0, [2], True)]
    assert len(question_of(job(now=NOW - 10.0, rows=late)).arrivals) == 1


def test_kv_caches_are_as_the_engines_report() -> None:
    attempt = AttemptRecord(1, AttemptKind.PRIMARY, "main/a", "main", 0.0, 1.0, AttemptOutcome.COMPLETED)
    records = (record(pool="main", attempts=[replace(attempt, engine_kv_tokens=kv)]) for kv in (9_000, 8_000, 0))
    assert window(*records).kv_tokens() == {"main": 8_000}
