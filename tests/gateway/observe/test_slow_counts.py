"""Slow requests by cause and minute: a window against the one before; bounded."""

from __future__ import annotations

from gateway.observe.slow_requests import KEPT, SlowCounts, merge_windows
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.facts import hit_tokens
from policies.diagnosis.incident_groups import IncidentGroup
from policies.diagnosis.usual import NOTHING, Sample, Usual


def miss(cause: Cause, over: float, route: str = "chat") -> IncidentGroup:
    return IncidentGroup.of(route, CauseVerdict(cause, "", "", "", over), at=0.0, request_id="")


QUEUED, LONG = miss(Cause.QUEUED, 0.25), miss(Cause.LONG_PROMPT, 1.0)


def test_a_window_counts_its_own_minutes_and_route() -> None:
    counts = SlowCounts()
    for minute, found in ((0, LONG), (1, QUEUED), (2, QUEUED), (2, None)):
        counts.count("chat", found, minute * 60.0)
    counts.count("batch", miss(Cause.LONG_PROMPT, 1.0, "batch"), 120.0)
    assert counts.window("chat", 130.0, 2) == {
        "requests": 3,
        "causes": {"queued": {"requests": 2, "over_ms": 500.0}},
    }
    before = counts.window("chat", 130.0, 2, back=2)
    assert before == {"requests": 1, "causes": {"long_prompt": {"requests": 1, "over_ms": 1000.0}}}


def test_minutes_that_are_too_old_are_dropped() -> None:
    counts = SlowCounts()
    for minute in range(KEPT + 5):
        counts.count("chat", QUEUED, minute * 60.0)
    assert counts.window("chat", (KEPT + 4) * 60.0, 10 * KEPT)["requests"] == KEPT


def test_windows_of_workers_add_up() -> None:
    one = {"requests": 3, "causes": {"queued": {"requests": 1, "over_ms": 10.0}}}
    other = {"requests": 4, "causes": {"queued": {"requests": 2, "over_ms": 5.5}}}
    merged = merge_windows([one, other])
    assert merged == {"requests": 7, "causes": {"queued": {"requests": 3, "over_ms": 15.5}}}


def test_usual_values_are_quantiles_by_stage_and_of_computed_tokens() -> None:
    """A value that no sample knows has none."""
    samples = [
        Sample([i / 10, None], 1000, computed, 0.9, 8, None, None, None, 0.0, 0.0)
        for i, computed in enumerate([1000, 500, 100, 500, 500, 500, 500, 500, 500, 500])
    ]
    usual = Usual.of(("read", "queue"), samples)
    assert usual.known
    assert (usual.stages["read"].p50, usual.stages["read"].p90) == (0.5, 0.9)
    assert "queue" not in usual.stages
    assert (usual.computed.p50, usual.computed.p90) == (500, 1000)
    assert usual.tpot == NOTHING


def test_a_report_of_no_hit_is_not_replaced_by_the_forecast() -> None:
    assert [hit_tokens(1000, reported, 900) for reported in (0, 500, None)] == [0, 500, 900]
