"""Quotes in a replay: every arrival is quoted, and the quotes are scored by the first tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.replay.player import play
from lab.replay.results import ReplayOutcome, Results
from lab.traffic.traces import Agents, agents
from policies.types import FOREVER
from tests.support.replay_builders import arrivals, route, scenario

WARM_UP = 40.0  # s


def quoted(sessions: float, seed: int) -> Results:
    """Agents over two engines, after the synthetic start of all sessions."""
    shape = Agents(seconds=240.0 + WARM_UP, sessions=sessions)
    made = [replace(each, at=each.at - WARM_UP, route="agent") for each in agents(shape, seed)]
    chosen = scenario(2, "8b-h100", route(ttft={"budget": "2s"}, tpot={"budget": "40ms"}))
    return play(chosen, [each for each in made if each.at >= 0], seed)


@pytest.mark.parametrize(("sessions", "held"), [(0.2, 0.03), (0.3, 0.08)])
def test_nine_in_ten_requests_keep_the_p90_of_their_quote(sessions: float, held: float) -> None:
    """At rest, and where the queue holds a good many: 87 to 93%."""
    scored = [quote for seed in (1, 2, 3) for result in quoted(sessions, seed).requests for quote in result.quotes]
    promised = [(each.ttft, p90) for each in scored if (p90 := each.quote.p90) is not None]
    assert sum(bool(each.quote.held_as) for each in scored) / len(scored) == pytest.approx(held, rel=0.5)
    assert len(promised) > 0.95 * len(scored) > 1000
    assert 0.87 <= sum(ttft <= p90 for ttft, p90 in promised) / len(promised) <= 0.93


def test_a_held_request_is_quoted_by_what_became_of_those_held_before() -> None:
    """Its own forecast alone, without the wait that the rule costs, would hold for far fewer."""
    scored = [quote for result in quoted(0.4, 1).requests for quote in result.quotes if quote.quote.held_as]
    forecast = sum(each.ttft <= 1.2 * each.quote.forecast.point_estimate for each in scored) / len(scored)
    kept = sum(each.ttft <= (each.quote.p90 or FOREVER) for each in scored) / len(scored)
    assert forecast < 0.6 < 0.75 < kept


def test_a_request_that_is_refused_after_its_wait_has_not_kept_its_quote() -> None:
    late = route(ttft={"budget": "50ms"}, on_miss="shed")
    results = play(scenario(1, "8b-l4", late), arrivals(200, rate=20.0))
    refused = [each for each in results.requests if each.end is ReplayOutcome.SHED]
    assert refused
    assert all(each.ttft == FOREVER for result in refused for each in result.quotes)
