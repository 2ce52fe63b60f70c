"""An engine that was slow for some time, beside three that never were, at half of their load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lab.replay.player import play
from lab.replay.results import Results
from lab.replay.sim_fleet import ScheduledFault
from tests.support.replay_builders import arrivals, scenario

SLOW, TIMES = "main/0", 10.0
OFFERED = arrivals(720, rate=4.0)  # 180 s


def replayed(until: float) -> Results:
    """SLOW takes TIMES as long until then."""
    faults = (ScheduledFault(0.0, SLOW, "slow", TIMES), ScheduledFault(until, SLOW, "slow", 1.0))
    return play(replace(scenario(4), faults=faults).with_scorer("ours"), OFFERED)


def share_of_slow(results: Results, while_arrived: Callable[[float], bool]) -> float:
    found = [result for result in results.requests if while_arrived(result.arrived)]
    return sum(result.endpoint == SLOW for result in found) / len(found)


def test_an_engine_that_was_slow_gets_its_share_within_a_minute_of_its_recovery() -> None:
    """A quarter of the requests; before, nearly none came in an hour, and so no sample."""
    results = replayed(until=60.0)
    assert share_of_slow(results, lambda at: 5 < at < 60) < 0.03
    assert share_of_slow(results, lambda at: at > 120) > 0.15
    assert results.overall().good > 0.99


def test_an_engine_that_is_still_slow_is_asked_about_once_a_minute() -> None:
    """A request more is slow each time, and few of those miss their budget."""
    results = replayed(until=1000.0)
    assert share_of_slow(results, lambda at: at > 5) < 0.015
    assert results.overall().good > 0.99
