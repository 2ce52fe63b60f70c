"""Statistics by route from the Records of the last seconds."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from gateway.cli.top_tables import text_table
from gateway.observe.record import Record, RequestOutcome
from lab.demo.demo import COLUMNS, WINDOW, rows
from tests.support.builders import record

NOW = 1000.0


def ended(at: float = NOW, **known: Any) -> Record:
    """Record of a request of one second that ended at `at`."""
    return record(arrival=at - 1.0, total=1.0, **known)


def row(*records: Record, now: float = NOW, since: float = NOW - WINDOW) -> dict[str, str]:
    """The cells by column."""
    (found,) = rows(records, ["chat"], now, since)
    return dict(zip(COLUMNS, found, strict=True))


def shown(*records: Record) -> list[str]:
    console = Console(width=110, no_color=True)
    with console.capture() as capture:
        console.print(text_table(COLUMNS, [tuple(row(*records).values())], title="last 30 s", wrapped="answered by"))
    return capture.get().splitlines()


def test_each_route_is_a_row_in_the_given_order() -> None:
    """Routes without requests have a row too."""
    records = [*[ended(route="code")] * 60, *[ended(route="chat")] * 30]
    found = rows(records, ["chat", "agent", "code"], NOW, 0.0)
    assert [cells[:2] for cells in found] == [("chat", "1.0"), ("agent", "0.0"), ("code", "2.0")]


def test_only_requests_that_ended_within_the_window_count() -> None:
    """A long answer counts at the end time, not at the arrival time."""
    old, long = ended(NOW - WINDOW - 1.0), record(arrival=NOW - 2 * WINDOW, total=2 * WINDOW)
    assert row(*[old] * 60, *[long] * 30)["req/s"] == "1.0"


def test_the_first_seconds_are_not_divided_by_a_whole_window() -> None:
    """Nor by nothing at all."""
    assert row(*[ended()] * 10, since=NOW - 5.0)["req/s"] == "2.0"
    assert row(*[ended()] * 10, since=NOW)["req/s"] == "10.0"


def test_ttft_counts_streams_only() -> None:
    """Median and p99; an answer without streaming has no TTFT."""
    found = row(*[ended(ttft=i / 100) for i in range(100)], *[ended(ttft=50.0, stream=False)] * 50, ended(ttft=None))
    assert (found["TTFT p50"], found["p99"]) == ("500 ms", "990 ms")


def test_attainment_is_the_share_of_judged_requests_that_met_the_budget() -> None:
    """Shed requests are misses; a caller that left early is not counted."""
    found = row(
        ended(ttft=0.1),
        ended(ttft=0.9),
        ended(ttft=None, end=RequestOutcome.SHED),
        ended(ttft=0.1),
        ended(ttft=None, end=RequestOutcome.REFUSED),
        budgetless := ended(ttft_budget=None),
    )
    assert budgetless.ttft_met is None
    assert (found["met"], found["budget"]) == ("50%", "800 ms")


def test_the_budget_is_that_of_the_latest_request() -> None:
    """A caller may name another budget, and a request may have none."""
    assert row(ended(ttft_budget=0.3), ended(ttft_budget=0.2), ended(ttft_budget=None))["budget"] == "200 ms"


def test_tiers_are_shares_of_answered_requests_largest_first() -> None:
    """A shed request has no tier."""
    found = row(*[ended(pool="small")] * 3, ended(pool="large"), ended(pool="-", ttft=None, end=RequestOutcome.SHED))
    assert found["answered by"] == "small 75%  large 25%"
    assert (found["shed"], found["failed"]) == ("20%", "0")


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        (RequestOutcome.FAILED, 1),
        (RequestOutcome.UPSTREAM_BROKE, 1),
        (RequestOutcome.INTERNAL, 1),
        (RequestOutcome.CLIENT_GONE, 0),
        (RequestOutcome.SHED, 0),
        (RequestOutcome.REFUSED, 0),
    ],
)
def test_failures_exclude_rejections_and_client_disconnects(end: RequestOutcome, failed: int) -> None:
    """A rejection before dispatch is no failure."""
    assert row(ended(end=end))["failed"] == str(failed)


def test_the_hit_ratio_is_by_tokens_as_reported() -> None:
    """A long prompt weighs more than a short prompt."""
    found = row(
        ended(prompt_tokens_reported=900, cached_tokens_reported=900),
        ended(prompt_tokens_reported=100, cached_tokens_reported=0),
        ended(),
    )
    assert found["hit"] == "90%"


def test_missing_values_are_a_dash() -> None:
    """A zero would read as a time or a share."""
    empty = row()
    assert [empty[name] for name in ("TTFT p50", "p99", "met", "hit", "budget")] == ["–"] * 5
    assert shown()[-2].split() == ["chat", "0.0", "–", "–", "–", "–", "–", "0%", "0"]


def test_the_table_is_read_in_milliseconds_and_per_cent() -> None:
    """A line per route beneath the column headings, within 110 characters."""
    lines = shown(*[ended(pool="small", prompt_tokens_reported=100, cached_tokens_reported=64)] * 30)
    assert lines[0].startswith("last 30 s")
    assert all(name in lines[1] + lines[2] for name in COLUMNS)
    assert lines[-2].split() == "chat 1.0 800 ms 200 ms 200 ms 100% small 100% 64% 0% 0".split()
    assert max(map(len, lines)) <= 110
