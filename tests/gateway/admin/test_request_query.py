"""Filters on recent Records."""

from __future__ import annotations

import csv
from time import monotonic

import pytest

from gateway.admin.admin_server import requests_csv
from gateway.admin.admin_views import request_view
from gateway.admin.request_query import parse_query
from gateway.api.api_error import ApiError
from gateway.observe.record import Record, RequestOutcome
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.diagnosis_report import Alternatives, Diagnosis
from policies.diagnosis.usual import Usual
from tests.support.builders import record

ROUTES, POOLS = ["chat", "agent"], ["small", "large"]
RECENT = [
    record(request_id="a"),
    record(request_id="b", route="agent", pool="large", ttft=0.9),
    record(request_id="c", end=RequestOutcome.SHED, pool="-", ttft=None, total=0.001),
    record(request_id="d", end=RequestOutcome.FAILED, ttft=None, total=3.0),
    record(request_id="e", stream=False, ttft=9.0),
    record(request_id="f", route="-", pool="-", end=RequestOutcome.REFUSED, ttft=None, total=0.0),
]


def asked(recent: list[Record] = RECENT, **query: str) -> list[str]:
    return [found.request_id for found in parse_query(query, ROUTES, POOLS).select(recent)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["a", "b", "c", "d", "e", "f"]),
        ({"last": "2"}, ["e", "f"]),
        ({"last": "0"}, []),
        ({"route": "agent"}, ["b"]),
        ({"route": "-"}, ["f"]),
        ({"pool": "large"}, ["b"]),
        ({"pool": "-"}, ["c", "f"]),
        ({"outcome": "shed"}, ["c"]),
        ({"slow": "1"}, ["b", "c", "d"]),
        ({"id": "d"}, ["d"]),
        ({"id": "unknown"}, []),
        ({"slow": "1", "route": "chat"}, ["c", "d"]),
        ({"slow": "1", "last": "1"}, ["d"]),
        ({"slowest": "2"}, ["d", "b"]),
        ({"slowest": "9", "route": "chat"}, ["d", "a", "c"]),
        ({"slowest": "0"}, []),
    ],
)
def test_all_that_is_asked_for_must_hold(query: dict[str, str], expected: list[str]) -> None:
    """The last of all matches, or the streams with the longest wait; `slow` selects missed TTFT budgets."""
    assert asked(**query) == expected


def missed(request_id: str, over: float, ago: float = 0.0, cause: Cause = Cause.QUEUED, **known: object) -> Record:
    """A Record that ended `ago` seconds ago, `over` seconds over its budget."""
    verdict = CauseVerdict(cause, "seen", "mend", "queue", over)
    diagnosis = Diagnosis(verdict, Usual(), Alternatives())
    return record(request_id=request_id, arrival=monotonic() - ago - 1.0, diagnosis=diagnosis, **known)


def misses() -> list[Record]:
    return [
        missed("a", 0.5, 1000.0),
        missed("b", 3.0, tenant="team"),
        missed("c", 1.0, 100.0, Cause.COLD_CACHE, endpoint="small/b"),
    ]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["b", "c", "a"]),
        ({"worst": "1"}, ["b"]),
        ({"within": "300"}, ["b", "c"]),
        ({"key": "team"}, ["b"]),
        ({"key": "nobody"}, []),
        ({"endpoint": "small/b"}, ["c"]),
        ({"cause": "cold_cache"}, ["c"]),
        ({"cause": "queued", "within": "300"}, ["b"]),
        ({"route": "agent"}, []),
    ],
)
def test_misses_come_by_the_time_over_budget(query: dict[str, str], expected: list[str]) -> None:
    """Of those that are kept longer than the recent Records; every filter must hold."""
    found = parse_query({"worst": "9", **query}, ROUTES, POOLS).select(RECENT, misses())
    assert [each.request_id for each in found] == expected


def test_a_miss_is_found_by_its_id_when_the_recent_records_have_moved_on() -> None:
    """Once, although it is among both for a while."""
    query = parse_query({"id": "b"}, ROUTES, POOLS)
    kept = misses()
    assert [each.request_id for each in query.select([], kept)] == ["b"]
    assert [each.request_id for each in query.select([kept[1]], kept)] == ["b"]


def test_misses_of_several_workers_are_merged_by_the_time_over() -> None:
    query = parse_query({"worst": "2"}, ROUTES, POOLS)
    views = [[request_view(each)] for each in misses()]
    found = query.merge({1: views[0], 2: views[1], 3: views[2]})
    assert [(each["request_id"], each["worker"]) for each in found] == [("b", 2), ("c", 3)]


def test_a_csv_has_no_cell_that_a_spreadsheet_computes() -> None:
    """A caller names request ids; a label that is unknown stays a dash."""
    hostile = request_view(missed("-1+cmd", 0.5, pool="-", endpoint="-"))
    head, line = csv.reader(requests_csv([hostile]).decode().splitlines())
    found = dict(zip(head, line, strict=True))
    assert (found["request_id"], found["endpoint"], found["over_ms"]) == ("'-1+cmd", "-", "500.0")


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ({"last": "x"}, "last", "last must be a whole number."),
        ({"last": "²"}, "last", "last must be a whole number."),
        ({"slowest": "-1"}, "slowest", "slowest must be a whole number."),
        ({"route": "chatt"}, "route", "route 'chatt' is unknown; did you mean 'chat'?."),
        ({"pool": "zzz"}, "pool", "pool 'zzz' is unknown; known: -, large, small."),
        ({"outcome": "sheds"}, "outcome", "outcome 'sheds' is unknown; did you mean 'shed'?."),
        ({"slow": "yes"}, "slow", "slow 'yes' is unknown; known: 1."),
        ({"id": "a b"}, "id", "id must be a request id: up to 128 letters, digits and -_.:"),
        ({"rout": "chat"}, "rout", "There is no filter 'rout'; did you mean 'route'?."),
    ],
)
def test_an_unknown_value_is_refused_with_the_known_values(query: dict[str, str], param: str, message: str) -> None:
    """An empty answer to a misspelt name would be believed."""
    with pytest.raises(ApiError) as refused:
        asked(**query)
    assert (refused.value.status, refused.value.param, refused.value.message) == (
        400,
        param,
        message.replace("?.", "?"),
    )


def test_records_of_several_workers_are_merged_by_end() -> None:
    """Each entry names the worker; the slowest are the slowest of all workers."""
    told = {
        1: [
            {"request_id": "a", "wall": 100.0, "total_ms": 900.0, "ttft_ms": 300.0},
            {"request_id": "d", "wall": 102.0, "total_ms": 1.0, "ttft_ms": None},
        ],
        2: [{"request_id": "b", "wall": 100.5, "total_ms": 100.0, "ttft_ms": 20.0}],
    }
    found = [(r["request_id"], r["worker"]) for r in parse_query({}, ROUTES, POOLS).merge(told)]
    assert found == [("b", 2), ("a", 1), ("d", 1)]
    assert [r["request_id"] for r in parse_query({"last": "1"}, ROUTES, POOLS).merge(told)] == ["d"]
    assert parse_query({"last": "0"}, ROUTES, POOLS).merge(told) == []
    assert [r["request_id"] for r in parse_query({"slowest": "2"}, ROUTES, POOLS).merge(told)] == ["a", "b"]
