"""Verdicts of GET /verdicts come from two answers, whose times differ."""

from __future__ import annotations

import pytest

from gateway.admin.request_query import parse_minutes
from gateway.admin.verdict_view import verdict_window
from gateway.observe.slow_requests import SlowCounts
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.incident_groups import IncidentGroup

MINUTE = 60.0


@pytest.mark.parametrize(("window", "name", "seconds"), [("now", "5m", 300), ("5m", "5m", 300), ("1h", "1h", 3600)])
def test_a_request_of_the_window_has_its_incident(window: str, name: str, seconds: int) -> None:
    """Windows end now; incidents are counted by the minute of the clock, of which the present one has just begun."""
    now, counts = 1000 * MINUTE + 1, SlowCounts()
    miss = IncidentGroup.of("chat", CauseVerdict(Cause.CONNECTION, "seen", "Mend it.", "upstream", 1.0), 0.0, "r1")
    counts.count("chat", miss, now - seconds + 1)
    found, minutes = verdict_window(window)
    assert found == name
    assert counts.incidents(now, minutes)["incidents"]
    assert parse_minutes({"minutes": str(minutes)}) == minutes  # as workers are asked
