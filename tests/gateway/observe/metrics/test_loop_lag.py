"""Lateness of the event loop, and the share of a request."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.observe.metrics.loop_lag import BEFORE, LOG_INTERVAL, PERIOD, SETTLING, STALL, LoopLag
from lab.virtual_time import stall
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time


def exported(lag: LoopLag) -> dict[str, float | None]:
    """Values of one scrape."""
    registry = CollectorRegistry()
    registry.register(lag)
    samples = {s.name: s.value for family in registry.collect() for s in family.samples}
    return {
        name: samples.get(f"firsttoken_loop_{name}")
        for name in ("lag_seconds_count", "lag_seconds_sum", "lag_max_seconds", "stalls_total")
    }


# --------------------------------------------------------------------------- metrics and log


def test_every_lateness_is_counted_and_stalls_too() -> None:
    """All latenesses are in the histogram; those from STALL on are counted as stalls."""
    lag = LoopLag()
    for i, late in enumerate((0.0, STALL / 2, STALL, STALL * 3)):
        lag.saw(late, float(i))
    assert exported(lag) == {
        "lag_seconds_count": 4,
        "lag_seconds_sum": pytest.approx(STALL * 4.5),
        "lag_max_seconds": STALL * 3,
        "stalls_total": 2,
    }


def test_the_greatest_lateness_is_reset_by_a_scrape() -> None:
    """A stall is shown in one scrape, and no stall is missed between two scrapes."""
    lag = LoopLag()
    lag.saw(0.3, 1.0)
    lag.saw(0.1, 2.0)
    assert [exported(lag)["lag_max_seconds"] for _ in range(2)] == [0.3, 0.0]
    lag.saw(0.2, 3.0)
    assert exported(lag)["lag_max_seconds"] == 0.2


def test_a_stall_is_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """With length and count: stalls in between were counted."""
    lag = LoopLag()
    with caplog.at_level(logging.WARNING, "firsttoken"):
        for at in (100.0, 110.0, 100.0 + LOG_INTERVAL - 1, 100.0 + LOG_INTERVAL, 101.0 + LOG_INTERVAL):
            lag.saw(0.0125, at)
        lag.saw(STALL - 1e-6, 500.0)
    assert [entry.message for entry in caplog.records] == [
        "event loop stalled for 12.5 ms (stall 1)",
        "event loop stalled for 12.5 ms (stall 4)",
    ]


async def test_stalls_of_the_start_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """First connections and late imports stall each process; stalls from SETTLING on are logged."""
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    lag.close()
    start = monotonic()
    with caplog.at_level(logging.WARNING, "firsttoken"):
        lag.saw(0.0125, start + SETTLING - 1.0)
        assert caplog.records == []
        lag.saw(0.0125, start + SETTLING + 1.0)
    assert [entry.message for entry in caplog.records] == ["event loop stalled for 12.5 ms (stall 2)"]


async def test_a_stalled_loop_is_measured() -> None:
    """A real timer is late by the length of the stall."""
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    arrival = monotonic()
    stall(3 * PERIOD)
    lasting = lag.since(arrival, monotonic())
    await eventually(lambda: exported(lag)["stalls_total"])
    ended = lag.since(arrival, monotonic())
    lag.close()
    assert 1.9 * PERIOD <= lasting <= ended < 10 * PERIOD


async def test_a_closed_measurement_reports_nothing() -> None:
    """Without measurement nothing is reported."""
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    lag.close()
    await asyncio.sleep(2 * PERIOD)
    assert exported(lag)["lag_seconds_count"] is None
    assert lag.since(0.0, monotonic()) == 0.0


# --------------------------------------------------------------------------- stalls of a request


def test_a_request_is_charged_with_stalls_since_its_arrival() -> None:
    """Also shortly before arrival, with the bytes in the socket meanwhile."""
    lag = LoopLag()
    lag.saw(0.5, 100.0)
    assert lag.since(100.0 + BEFORE / 2, 101.0) == 0.5
    assert lag.since(100.0 + BEFORE * 2, 101.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.01, 1.0)), max_size=40), st.floats(0.0, 50.0))
def test_a_request_is_charged_with_the_longest_stall(looks: list[tuple[float, float]], after: float) -> None:
    """The kept history is enough for any arrival."""
    lag, now, seen = LoopLag(), 100.0, []
    for late, later in looks:
        now += later
        seen.append((now, late))
        lag.saw(late, now)
    arrival = 100.0 + after
    assert lag.since(arrival, now) == max((late for at, late in seen if at >= arrival - BEFORE), default=0.0)


def test_the_past_is_bounded() -> None:
    """However the latenesses fall: no request waits longer than the kept time."""
    lag = LoopLag()
    for i in range(100_000):
        lag.saw(1.0 / (i + 1), i * PERIOD)
    assert len(lag._late) <= 12_001
