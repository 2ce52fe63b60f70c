"""Engines that come up after the gateway, and streams that carry several tokens per event."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from backends.server_profiles import PROFILES
from lab.engines.engine_events import EngineRequest
from lab.replay.player import Player, play
from lab.replay.results import ReplayOutcome
from lab.replay.sim_fleet import Scenario, SimFleet, events_of
from lab.replay.sim_gateway import ActiveRequest
from policies.attempts.wire import Failed
from policies.fleet.circuit_breaker import BreakerState, CircuitBreaker
from policies.types import Endpoint
from tests.support.replay_builders import arrivals, scenario

OFFERED = arrivals(80, rate=4.0)
LATE = "main/0"


# --------------------------------------------------------------------------- several tokens per event


@pytest.mark.parametrize(
    ("tokens", "per_event", "events"), [(1, 4, 1), (2, 4, 1), (5, 4, 2), (8, 4, 2), (9, 4, 3), (9, 1, 9)]
)
def test_the_first_token_is_an_event_of_its_own(tokens: int, per_event: int, events: int) -> None:
    """Then an event is written once it is full."""
    assert events_of(tokens, per_event) == events


def test_progress_is_counted_in_events() -> None:
    """The engine writes tokens; the gateway sees events."""
    seen = []
    for per_event in (1, 4):
        servers = SimFleet({LATE: PROFILES["8b-h100"]}, tokens_per_event=per_event)
        servers.submit(LATE, EngineRequest(1, 500, 200), 0.0)
        list(servers.run_until(1.0))
        seen.append(dict(servers.progress(LATE))[1])
    tokens, events = seen
    assert events == events_of(tokens, 4) < tokens


@pytest.mark.parametrize("per_event", [1, 4, 8])
def test_the_gateway_learns_the_tokens_of_an_event(per_event: int) -> None:
    """From the usage at the end of each answer, by the code that does so in production: it is told nothing else."""
    player = Player(replace(scenario(2), tokens_per_event=per_event), OFFERED)
    player.play()
    fleet = player.gateways[0].fleet
    believed = [fleet.view.learned(endpoint, player.clock.now) for endpoint in player.scenario.profiles]
    assert [one.tokens_per_event for one in believed if one] == pytest.approx([per_event] * 2, rel=0.25)


# --------------------------------------------------------------------------- engines that come up late


def late(**starts: float) -> Scenario:
    """Three engines, those named by number (`e0=5.0`) late."""
    return replace(scenario(3), starts={f"main/{name[1:]}": at for name, at in starts.items()})


@pytest.mark.parametrize("scorer", ["ours", "lpwl", "reference"])
def test_a_late_engine_answers_nothing_before_its_start(scorer: str) -> None:
    """The other engines answer meanwhile, no request is lost, and the late one takes its part afterwards."""
    results = play(late(e0=5.0).with_scorer(scorer), OFFERED)
    assert Counter(result.end for result in results.requests) == {ReplayOutcome.COMPLETED: 80}
    there = [result.sent_at or 0.0 for result in results.requests if result.endpoint == LATE]
    assert len(there) > 5
    assert min(there) >= 5.0


def test_an_engine_is_half_open_once_it_answers_its_probes() -> None:
    """Unreachable until its start, on trial from the first probe that it answers, up after the first token."""
    player = Player(late(e0=5.0), OFFERED)
    changes = list[tuple[float, BreakerState]]()

    def note(endpoint: Endpoint, breaker: CircuitBreaker) -> None:
        if endpoint.id == LATE:
            changes.append((player.clock.now, breaker.state))

    player.gateways[0].fleet.on_breaker = note
    player.play()
    assert [state for _, state in changes] == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    (opened, _), (tried, _), (closed, _) = changes
    assert opened < 1.5
    assert 5.0 <= tried < 6.0
    assert tried < closed


def test_a_half_open_engine_has_one_trial_until_its_first_token() -> None:
    """No second request goes there before, however idle it is."""
    player = Player(late(e0=5.0, e1=5.0, e2=5.0), [replace(each, at=each.at + 6.0) for each in OFFERED])
    results = player.play()
    for endpoint in player.scenario.profiles:
        there = sorted((r.sent_at, r.first_at) for r in results.requests if r.endpoint == endpoint and r.first_at)
        (_, first_token), *others = there
        assert all(sent >= first_token for sent, _ in others if sent is not None and first_token is not None)


def test_requests_before_any_engine_is_up_are_refused() -> None:
    """Refused connections first; once the probes have failed twice, a 503 without an attempt."""
    player = Player(late(e0=5.0, e1=5.0, e2=5.0), OFFERED)
    failed = Counter[str]()
    fail = player.gateways[0]._fail

    def counted(request: ActiveRequest, failure: Failed) -> None:
        failed[failure.blame.kind] += 1
        fail(request, failure)

    player.gateways[0]._fail = counted  # type: ignore[method-assign]
    results = player.play()
    early = [result for result in results.requests if result.arrived < 4.5]
    assert {result.end for result in early} == {ReplayOutcome.LOST, ReplayOutcome.SHED}
    assert failed["connect"] > 0
    assert all(result.attempts == 0 for result in early if result.arrived > 1.5)
    assert all(result.end is ReplayOutcome.COMPLETED for result in results.requests if result.arrived > 6.5)
