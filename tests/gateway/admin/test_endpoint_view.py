"""An endpoint's statistics, for people."""

from __future__ import annotations

import json

from gateway.admin.admin_views import endpoint_view
from gateway.strict_json import encode
from policies.fleet.endpoint_state import EndpointStatistics
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Candidate, Forecast, PoolEstimate
from tests.support.builders import POOL

A = POOL.endpoints[0]


def asked(fleet: Fleet, now: float) -> EndpointStatistics:
    return fleet.view.statistics(A.id, now)


def attempt(
    fleet: Fleet, key: str, sent: float, ending: AttemptOutcome, first: float | None = None, p50: float = 0.2
) -> None:
    candidate = Candidate(A, 0, 100, 0, Forecast(p50, (1.0,) * 10 + (2.0,) * 4), 1.0, 0.0)
    fleet.on_sent(key, candidate, PoolEstimate(100), sent, True)
    if first is not None:
        fleet.on_first_token(key, first)
    fleet.on_ended(
        key, ending, first or sent, AttemptReport(connected=ending is not AttemptOutcome.FAILED, retry_after=7.0)
    )


def test_a_healthy_endpoint_shows_no_reason() -> None:
    """Events that never happened are null, not infinitely long ago; all of the view is JSON."""
    found = endpoint_view(asked(Fleet([POOL]), 100.0), 100.0)
    health = [found[name] for name in ("breaker", "why", "tried_again_in_s", "limited_for_s")]
    assert health == ["closed", None, None, None]
    assert (found["scraped_s_ago"], found["heard_s_ago"], found["calibration"]) == (None, None, None)
    assert json.loads(encode(found))["load"]["health"] == "up"


def test_an_ejected_endpoint_shows_reason_and_end() -> None:
    """Afterwards one request may try, and the result decides."""
    fleet = Fleet([POOL])
    for number in range(2):
        attempt(fleet, f"{number}", 100.0, AttemptOutcome.FAILED)
    down = endpoint_view(asked(fleet, 101.0), 101.0)
    assert (down["breaker"], down["why"]) == ("open", "2 connections in a row were refused or reset")
    assert (down["load"]["health"], down["tried_again_in_s"]) == ("down", 4.0)
    fleet.on_sent("probe", Candidate(A, 0, 100, 0, Forecast(0.2), 1.0, 0.0), PoolEstimate(100), 106.0, True)
    tried = endpoint_view(asked(fleet, 106.0), 106.0)
    assert tried["why"] == "2 connections in a row were refused or reset; one request at a time may try it"
    fleet.on_ended("probe", AttemptOutcome.FAILED, 106.5, AttemptReport())
    assert endpoint_view(asked(fleet, 106.5), 106.5)["why"] == "the trial request failed"


def test_a_rate_limited_endpoint_is_healthy() -> None:
    """The reason is shown too."""
    fleet = Fleet([POOL])
    attempt(fleet, "a", 100.0, AttemptOutcome.RATE_LIMITED)
    found = endpoint_view(asked(fleet, 101.0), 101.0)
    assert (found["load"]["health"], found["limited_for_s"]) == ("up", 6.0)
    assert found["why"] == "limited by its provider for 6.0 s more: rate limit reached"


def test_calibration_is_the_share_of_first_tokens_within_p50_and_p90() -> None:
    """Of ten first tokens five came within the p50 and nine within the p90: a correct calibration."""
    fleet = Fleet([POOL])
    for number, took in enumerate([0.1] * 5 + [0.3] * 4 + [0.9]):
        attempt(fleet, f"{number}", 100.0 + number, AttemptOutcome.COMPLETED, 100.0 + number + took)
    found = endpoint_view(asked(fleet, 111.9), 111.9)
    assert found["calibration"] == {"under_p50": 0.5, "under_p90": 0.9, "samples": 10}
    assert (found["samples"], found["heard_s_ago"]) == (10, 2.0)


def test_the_load_of_an_endpoint_keeps_its_public_names() -> None:
    """Dashboards and scripts read these names of `GET /fleet`, whatever the code calls the values."""
    load = endpoint_view(asked(Fleet([POOL]), 100.0), 100.0)["load"]
    assert load.keys() == {
        *(
            "at",
            "health",
            "failing",
            "in_flight",
            "prefilling",
            "ahead",
            "running",
            "waiting",
            "kv_usage",
            "scraped_at",
        ),
        *("blocked_until", "busy", "wait", "harm", "stalled", "strain", "closed", "duty", "tpot", "context"),
        *("heard_at", "warming", "full", "limits"),
    }
