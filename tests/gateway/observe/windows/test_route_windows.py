"""GET /windows: figures of routes in a window."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.observe.metrics.scrape_collectors import counts_in_place, route_stats
from gateway.observe.record import RequestOutcome
from gateway.observe.windows.count_history import NOW, SPANS, CountHistory
from gateway.observe.windows.route_windows import quantile, totals, windows_view
from tests.gateway.observe.metrics.test_scrape_collectors import ROUTES, observed
from tests.support.builders import record

NOON = 1_700_000_100.0
COUNTED = ("requests", "pools", "slo", "tokens", "causes", "ttft_ms", "tpot_ms", "longest_gap_ms", "cost_usd")


def filled() -> tuple[CountHistory, dict[str, Any], dict[str, Any]]:
    """A history of two moments, and the answers of /routes then."""
    registry, metrics = observed()
    before = route_stats(counts_in_place(registry.collectors), ROUTES, NOON)
    for ttft in (0.05, 0.05, 0.3):
        metrics(record(ttft=ttft, ttft_budget=0.15, output_tokens=4))
    metrics(record(end=RequestOutcome.SHED, ttft=None, ttft_budget=0.15, pool="-"))
    after = route_stats(counts_in_place(registry.collectors), ROUTES, NOON + 20)
    history = CountHistory()
    history.note(totals(before), NOON)
    history.note(totals(after), NOON + 20)
    return history, before, after


def test_a_window_has_the_form_of_the_counts_since_the_start() -> None:
    """Every counted member is there, with the growth alone."""
    history, before, after = filled()
    chat = windows_view(history, SPANS["5m"], after, NOON + 20)["routes"][0]
    was, now = before["routes"][0], after["routes"][0]
    for member in COUNTED:
        if isinstance(now[member], dict):
            assert chat[member].keys() == now[member].keys(), member
    assert chat["cost_usd"] == now["cost_usd"] - was["cost_usd"]
    assert chat["requests"] == {"completed": 3.0, "shed": 1.0}
    assert chat["slo"]["ttft"] == {"true": 2.0, "false": 2.0}
    assert chat["slo"]["goodput"] == {"true": 2.0, "false": 2.0}
    assert chat["tokens"]["output"] == now["tokens"]["output"] - was["tokens"]["output"] == 12
    assert chat["ttft_ms"]["le"] == now["ttft_ms"]["le"]
    grown = [late - early for early, late in zip(was["ttft_ms"]["counts"], now["ttft_ms"]["counts"], strict=True)]
    assert chat["ttft_ms"]["counts"] == grown
    assert (chat["route"], chat["ttft_budget_ms"], chat["held"]) == ("chat", 150.0, 3)


def test_figures_are_rates_shares_and_quantiles_of_the_window() -> None:
    """Three answers and a refusal in 20 s; two answers kept every budget."""
    history, _, after = filled()
    found = windows_view(history, NOW, after, NOON + 20)
    chat, agent = found["routes"]
    seen = chat["figures"]
    assert (found["window"], found["window_s"], found["covered_s"]) == ("now", 10.0, 20.0)
    assert [seen[name] for name in ("requests_per_s", "good_per_s", "shed_per_s", "failed_per_s")] == [
        0.2,
        0.1,
        0.05,
        0.0,
    ]
    assert (seen["met"], seen["goodput"], seen["pools"]) == (0.5, 0.5, {"small": 1.0})
    histogram = chat["ttft_ms"]["le"], chat["ttft_ms"]["counts"]
    assert seen["ttft_ms"] == {f"p{q}": quantile(*histogram, q / 100) for q in (50, 95, 99)}
    assert seen["usd_per_1000"] == pytest.approx(250 * chat["cost_usd"])
    nothing = agent["figures"]
    assert (nothing["requests_per_s"], nothing["met"], nothing["hit"], nothing["pools"]) == (0.0, None, None, {})
    assert len(chat["points"]) == SPANS["5m"].slots


def test_stalls_and_lag_of_the_gateway_are_those_of_the_window() -> None:
    """Other members are of this moment."""
    stats = [
        {
            "gateway": {"version": "1", "loop_stalls": stalls, "loop_lag_ms": {"le": [1.0], "counts": counts}},
            "routes": [],
        }
        for stalls, counts in ((2.0, [5.0, 1.0]), (3.0, [9.0, 1.0]))
    ]
    history = CountHistory()
    for at, found in enumerate(stats):
        history.note(totals(found), NOON + at)
    shown = windows_view(history, NOW, stats[-1], NOON + 1)["gateway"]
    assert (shown["version"], shown["loop_stalls"]) == ("1", 1.0)
    assert (shown["loop_lag_ms"]["le"], shown["loop_lag_ms"]["counts"]) == ([1.0], [4.0, 0.0])


def test_the_curve_has_a_point_for_each_slot() -> None:
    """None where nothing was sampled; the last point is of the present slot."""
    history, _, after = filled()
    chat, agent = windows_view(history, SPANS["5m"], after, NOON + 20)["routes"]
    assert len(chat["points"]) == SPANS["5m"].slots
    assert [point for point in chat["points"][:-1] if point is not None] == [(None, None, 0.0)]
    p50, p95, asked = chat["points"][-1]
    counts = chat["ttft_ms"]["counts"]
    assert (p50, p95) == (quantile(chat["ttft_ms"]["le"], counts, 0.5), quantile(chat["ttft_ms"]["le"], counts, 0.95))
    assert asked == 4
    assert agent["points"][-1] == (None, None, 0.0)


def test_a_curve_that_was_computed_once_stays_the_same() -> None:
    """Slots that are over are not computed again."""
    history, _, after = filled()
    first = windows_view(history, SPANS["5m"], after, NOON + 20)["routes"][0]["points"]
    history.note(totals(after), NOON + 30)
    second = windows_view(history, SPANS["5m"], after, NOON + 30)["routes"][0]["points"]
    assert second[:-2] == first[2:]
