"""Incidents: misses by route and culprit, failures first, the culprit before its victims."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.incident_groups import IncidentGroup, as_json, from_json, headline, incidents

CALLERS = ("", "caller a", "caller b")


def miss(cause: Cause, culprit: str = "", *, route: str = "chat", at: float = 0.0, **known: Any) -> IncidentGroup:
    over = known.pop("over", 0.1)
    verdict = CauseVerdict(cause, f"evidence of {cause}", cause.mend, "queue", over, culprit, **known)
    return IncidentGroup.of(route, verdict, at, f"request-{at:.0f}")


def refused(culprit: str = "dead/a", **known: Any) -> IncidentGroup:
    return miss(Cause.CONNECTION, culprit, failed=True, **known)


def test_an_outage_comes_before_a_slow_route_whatever_the_time_over() -> None:
    """A refusal in a millisecond is worse than an answer that is a second late."""
    late = [miss(Cause.QUEUED, "large", route="slow", over=9.0) for _ in range(50)]
    first, second = incidents([*late, *(refused(route="down", over=0.001) for _ in range(20))])
    assert headline(first, 20) == "20 failed of 20 requests: dead/a"
    assert headline(second, 80) == "50 late of 80 requests: large"


def test_requests_that_found_an_endpoint_down_belong_to_the_outage_that_others_saw() -> None:
    """One incident, with the cause and evidence of the requests that were refused themselves."""
    unasked = [miss(Cause.ENDPOINT_FAILED, "dead/a", failed=True, witnessed=False, at=at) for at in range(5, 25)]
    (only,) = incidents([*unasked, refused(at=1), refused(at=2)])
    assert (only.failed, only.cause, only.evidence) == (22, "connection", "evidence of connection")
    assert (only.since, only.last) == (1, 24)
    assert only.request_id in ("request-1", "request-2")


def test_a_noisy_caller_is_told_once_with_its_victims_and_its_own_late_requests() -> None:
    """Also where its own requests take most of the time over, failed, or are of another route."""
    own = [miss(Cause.QUEUED, "large", own="caller b", over=5.0) for _ in range(4)]
    own += [miss(Cause.LONG_PROMPT, "caller b", own="caller b", route="docs", over=7.0)]
    own += [miss(Cause.QUEUED, "large", own="caller b", failed=True)]
    (only,) = incidents([*own, miss(Cause.NOISY_NEIGHBOUR, "caller b", over=0.2)])
    assert (only.cause, only.culprit, only.route) == ("noisy_neighbour", "caller b", "chat")
    assert headline(only, 30) == "1 failed and 6 late of 30 requests: caller b (6 of its own)"


def test_what_others_suffer_comes_before_what_callers_bring_upon_themselves() -> None:
    """Unless it is next to nothing beside it."""
    own = [miss(Cause.LONG_PROMPT, "caller b", own="caller b", over=5.0) for _ in range(12)]
    evicted = miss(Cause.EVICTED_SESSION, "large/a", over=0.2)
    assert [each.cause for each in incidents([*own, evicted])] == ["evicted_session", "long_prompt"]
    assert [each.cause for each in incidents([*own * 10, evicted])] == ["long_prompt", "evicted_session"]


def test_without_a_culprit_misses_of_one_cause_are_one_incident() -> None:
    found = incidents([miss(Cause.UNKNOWN), miss(Cause.UNKNOWN), miss(Cause.QUEUED)])
    assert sorted((each.cause, each.late) for each in found) == [("queued", 1), ("unknown", 2)]


@given(
    st.lists(
        st.builds(
            lambda cause, culprit, route, failed, own, at: miss(
                cause, culprit, route=route, failed=failed, own=own, at=at
            ),
            st.sampled_from(list(Cause)),
            st.sampled_from(["", "large", "large/a", "caller a", "caller b"]),
            st.sampled_from(["chat", "code"]),
            st.booleans(),
            st.sampled_from(CALLERS),
            st.integers(0, 100),
        ),
        max_size=20,
    ),
    st.integers(0, 20),
)
def test_no_miss_is_lost_or_told_twice_and_workers_incidents_add_up(misses: list[IncidentGroup], cut: int) -> None:
    """Whichever worker saw which, and by way of JSON."""
    whole = incidents(misses)
    parts = [*incidents(misses[:cut]), *incidents(misses[cut:])]
    again = incidents([from_json(as_json(each, {})) for each in parts])
    for found in (whole, again):
        assert sum(each.failed for each in found) == sum(each.failed for each in misses)
        assert sum(each.requests for each in found) == len(misses)
    assert [each.failed > 0 for each in whole] == sorted((each.failed > 0 for each in whole), reverse=True)


@pytest.mark.parametrize("requests", [0, 3])
def test_a_count_of_requests_is_never_below_the_misses(requests: int) -> None:
    """A window by the minute may have lost the minute in which a request was counted."""
    assert headline(refused(), requests) == f"1 failed of {max(requests, 1)} requests: dead/a"
