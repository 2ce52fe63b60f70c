"""Filters on recent Records."""

from __future__ import annotations

import pytest

from gateway.admin.admin_views import parse_query
from gateway.api.api_error import ApiError
from gateway.observe.record import Record, RequestOutcome
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
