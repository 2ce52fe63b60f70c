"""One sentence per route, the worst first: what an operator reads in the first seconds."""

from __future__ import annotations

from typing import Any

import pytest

from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.incident_groups import IncidentGroup
from policies.diagnosis.route_verdicts import RouteState, RouteVerdict, WindowCounts, verdicts

NOW = 1_000.0


def counts(route: str = "chat", **members: Any) -> WindowCounts:
    given = {"asked": 400, "failed": 0, "shed": 0, "met": {"ttft": 0.992}, "promised": 0.95, "ttft_budget": 0.8}
    return WindowCounts(route, **{**given, **members})


def incident(cause: Cause, culprit: str = "", *, failed: bool = True, ago: float = 1.0, route: str = "chat") -> Any:
    verdict = CauseVerdict(cause, "seen", "Mend it.", "upstream", 1.0, culprit, failed=failed)
    return IncidentGroup.of(route, verdict, NOW - ago, "r1")


def verdict(of: WindowCounts, *incidents: IncidentGroup) -> RouteVerdict:
    (found,) = verdicts([of], incidents, NOW)
    return found


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (counts(), "chat fine: 99.2% in 800 ms"),
        (counts(met={"ttft": 1.0}, ttft_budget=2.0), "chat fine: 100% in 2 s"),
        (counts(met={"ttft": 0.99996}), "chat fine: 99.9% in 800 ms"),
        (counts(met={}), "chat fine: 400 answered"),
        (counts(asked=0, met={}), "chat idle: no request"),
    ],
)
def test_a_route_that_keeps_its_promise_has_nothing_to_mend(of: WindowCounts, text: str) -> None:
    found = verdict(of)
    assert (found.text, found.mend) == (text, "")
    assert found.state <= RouteState.FINE


def test_a_failure_is_told_with_its_cause_culprit_and_mend() -> None:
    """Also one of many, and though late requests are more."""
    late = incident(Cause.QUEUED, "large", failed=False)
    found = verdict(counts(failed=1, met={"ttft": 0.5}), late, incident(Cause.CONNECTION, "small/10.0.0.3:8000"))
    assert found.text == "chat fails 1 of 400 requests: no connection (small/10.0.0.3:8000)"
    assert (found.state, found.mend, found.request_id) == (RouteState.FAILS, "Mend it.", "r1")


def test_refused_requests_are_shed() -> None:
    found = verdict(counts(shed=28), incident(Cause.QUEUED, "large"))
    assert (found.state, found.text) == (RouteState.SHEDS, "chat sheds 7% of 400 requests: engines full (large)")


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (counts(met={"ttft": 0.9, "total": 0.99}), "chat late: 90% within 800 ms, 95% promised: long prompts"),
        (counts(met={"ttft": 0.99, "tpot": 0.5}), "chat late: 50% within the tpot budget, 95% promised: long prompts"),
        (
            counts(met={"ttft": 0.9}, ttft_budget=None),
            "chat late: 90% within the ttft budget, 95% promised: long prompts",
        ),
    ],
)
def test_a_broken_promise_names_the_budget_that_was_missed(of: WindowCounts, text: str) -> None:
    """A budget that grows with the prompt has no figure of its own."""
    found = verdict(of, incident(Cause.LONG_PROMPT, failed=False))
    assert (found.state, found.text) == (RouteState.LATE, text)


def test_misses_within_the_promise_are_no_trouble_and_told() -> None:
    found = verdict(counts(met={"ttft": 0.951}), incident(Cause.QUEUED, "large", failed=False))
    assert (found.state, found.mend) == (RouteState.FINE, "")
    assert found.text == "chat fine: 95.1% in 800 ms; 1 late: engines full (large)"


def test_what_is_over_is_told_as_over() -> None:
    found = verdict(counts(failed=20), incident(Cause.CONNECTION, "small/a", ago=130.0))
    assert found.state is RouteState.RECOVERED
    assert found.text == "chat fails 20 of 400 requests: no connection (small/a); not in the last 2 min"
    again = verdict(counts(failed=20), incident(Cause.CONNECTION, "small/a", ago=130.0), incident(Cause.UNKNOWN, ago=5))
    assert again.state is RouteState.FAILS


def test_without_a_cause_the_evidence_is_told() -> None:
    found = verdict(counts(met={"ttft": 0.5}), incident(Cause.UNKNOWN, "small/a", failed=False))
    assert found.text.endswith("promised: seen")


def test_the_worst_route_is_first_and_incidents_stay_with_their_route() -> None:
    routes = [counts("a"), counts("b", shed=4), counts("c", failed=4), counts("d", met={"ttft": 0.1})]
    found = verdicts(routes, [incident(Cause.CONNECTION, "x", route="b")], NOW)
    assert [each.route for each in found] == ["c", "b", "d", "a"]
    assert [each.mend for each in found] == ["", "Mend it.", "", ""]


def test_every_cause_has_a_gloss_of_a_few_words() -> None:
    assert all(0 < len(cause.gloss.split()) <= 9 for cause in Cause)
    assert len({cause.gloss for cause in Cause}) == len(Cause)
