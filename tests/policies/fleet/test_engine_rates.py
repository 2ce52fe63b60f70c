"""Rates of an engine from the counters of its reports."""

from __future__ import annotations

import pytest

from policies.fleet.engine_load import MAX_SAMPLES, EngineCounters, EngineRates


def test_a_rate_is_of_the_last_minute() -> None:
    """Ten preemptions long ago, one in each of the last six reports."""
    rates = EngineRates()
    rates.note(EngineCounters(preemptions=0.0), 0.0)
    rates.note(EngineCounters(preemptions=10.0), 10.0)
    assert rates.preemptions_per_s == pytest.approx(1.0)
    for step in range(1, 13):
        rates.note(EngineCounters(preemptions=10.0 + step), 10.0 + 10.0 * step)
    assert rates.preemptions_per_s == pytest.approx(0.1)


def test_unreported_counters_have_no_rate() -> None:
    """Absent is not 0; one report alone says nothing of a rate."""
    rates = EngineRates()
    assert (rates.preemptions_per_s, rates.evictions_per_s, rates.acceptance) == (None, None, None)
    rates.note(EngineCounters(preemptions=1.0), 0.0)
    assert rates.preemptions_per_s is None
    rates.note(EngineCounters(preemptions=1.0), 5.0)
    assert (rates.preemptions_per_s, rates.evictions_per_s, rates.acceptance) == (0.0, None, None)


def test_a_restarted_engine_begins_anew() -> None:
    """A smaller total is of another process: no negative rate."""
    rates = EngineRates()
    rates.note(EngineCounters(preemptions=100.0), 0.0)
    rates.note(EngineCounters(preemptions=2.0), 5.0)
    assert rates.preemptions_per_s is None
    rates.note(EngineCounters(preemptions=4.0), 6.0)
    assert rates.preemptions_per_s == pytest.approx(2.0)


def test_acceptance_is_told_from_a_score_of_drafted_tokens_on() -> None:
    rates = EngineRates()
    rates.note(EngineCounters(drafted=0.0, accepted=0.0), 0.0)
    rates.note(EngineCounters(drafted=19.0, accepted=10.0), 1.0)
    assert rates.acceptance is None
    rates.note(EngineCounters(drafted=100.0, accepted=60.0), 2.0)
    assert rates.acceptance == pytest.approx(0.6)


def test_frequent_reports_take_bounded_memory() -> None:
    """A scrape each 10 ms is as good as one each second."""
    rates = EngineRates()
    for step in range(20_000):
        rates.note(EngineCounters(preemptions=float(step)), step / 100)
    assert len(rates._samples) <= MAX_SAMPLES + 2
    assert rates.preemptions_per_s == pytest.approx(100.0, rel=0.02)
