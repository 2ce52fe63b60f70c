"""Differences between two snapshots of GET /routes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.top_tables import buckets, gateway_view, grown, quantile, route_views

BOUNDS = [10.0, 20.0, 50.0]


def snapshot(at: float, counts: list[float], **more: Any) -> dict[str, Any]:
    chat = {
        "route": "chat",
        "ttft_budget_ms": 20.0,
        "ttft_target": 0.9,
        "held": 0.0,
        "requests": {},
        "pools": {},
        "slo": {"ttft": {}},
        "ttft_ms": {"le": BOUNDS, "counts": counts},
        **more,
    }
    lag = {"le": [1.0, 5.0], "counts": [at * 20, 0.0, 0.0]}
    return {"at": at, "gateway": {"loop_stalls": 0.0, "loop_lag_ms": lag}, "routes": [chat]}


def test_rates_and_shares_are_differences_of_snapshots() -> None:
    """Totals since the start do not count."""
    before = snapshot(
        100.0, [5.0, 0.0, 0.0, 0.0], requests={"completed": 5.0}, pools={"small": 5.0}, slo={"ttft": {"true": 5.0}}
    )
    after = snapshot(
        102.0,
        [5.0, 10.0, 0.0, 0.0],
        held=3.0,
        requests={"completed": 13.0, "shed": 2.0, "failed": 4.0},
        pools={"small": 7.0, "large": 6.0, "-": 6.0},
        slo={"ttft": {"true": 13.0, "false": 2.0}},
    )
    (chat,) = route_views(before, after)
    assert (chat.per_second, chat.shed, chat.failed, chat.held) == (7.0, 1.0, 2.0, 3)
    assert chat.attainment == 0.8
    assert chat.pools == {"large": 0.75, "small": 0.25}
    assert (chat.p50, chat.p99) == (15.0, pytest.approx(19.9))
    assert (chat.budget, chat.target) == (20.0, 0.9)


def test_no_requests_give_a_zero_rate_and_no_quantiles() -> None:
    """The rate is 0; quantiles and attainment are None."""
    (chat,) = route_views(snapshot(100.0, [5.0, 0.0, 0.0, 0.0]), snapshot(102.0, [5.0, 0.0, 0.0, 0.0]))
    assert (chat.per_second, chat.p50, chat.attainment, chat.pools) == (0.0, None, None, {})


def test_counters_reset_after_a_restart() -> None:
    """After a restart the new counts are the difference; no rate is negative."""
    assert grown({"a": 7.0, "gone": 1.0}, {"a": 2.0, "new": 3.0}) == {"a": 2.0, "new": 3.0}
    (chat,) = route_views(snapshot(100.0, [9.0, 9.0, 0.0, 0.0]), snapshot(102.0, [0.0, 2.0, 0.0, 0.0]))
    assert chat.p50 == 15.0


def test_changed_buckets_reset_the_difference() -> None:
    """Counts of different buckets cannot be subtracted: the first difference is zero."""
    before, after = {"le": [1.0], "counts": [3.0, 0.0]}, {"le": [1.0, 2.0], "counts": [3.0, 1.0, 0.0]}
    assert buckets(before, after) == ([1.0, 2.0], [0.0, 0.0, 0.0])
    assert buckets(None, after) == ([1.0, 2.0], [3.0, 1.0, 0.0])
    assert buckets({"le": [], "counts": []}, after) == ([1.0, 2.0], [3.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([4.0, 0.0, 0.0, 0.0], 0.5, 5.0),
        ([0.0, 4.0, 0.0, 0.0], 0.25, 12.5),
        ([2.0, 0.0, 2.0, 0.0], 0.5, 10.0),
        ([2.0, 0.0, 2.0, 0.0], 0.75, 35.0),
        ([0.0, 0.0, 0.0, 9.0], 0.5, 50.0),
        ([0.0, 0.0, 0.0, 0.0], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_a_quantile_lies_on_a_straight_line_through_its_bucket(
    counts: list[float], q: float, expected: float | None
) -> None:
    """Beyond the last bound the quantile is the last bound."""
    assert quantile(BOUNDS, counts, q) == expected


def test_loop_lag_is_the_bound_of_the_last_bucket_that_grew() -> None:
    """Values absent from the gateway are not shown."""
    before, after = snapshot(100.0, [0.0] * 4), snapshot(102.0, [0.0] * 4)
    assert gateway_view(before, after).lag == 1.0
    after["gateway"]["loop_lag_ms"]["counts"][1] += 1
    after["gateway"].update(loop_stalls=1.0, workers=2.0)
    found = gateway_view(before, after)
    assert (found.lag, found.stalls, found.said) == (5.0, 1, {"workers": 2.0})
    after["gateway"]["loop_lag_ms"]["counts"][2] += 1
    assert gateway_view(before, after).lag == float("inf")
