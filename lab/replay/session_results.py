"""Results of a replay by session: whole sessions in time, and their duration against an idle fleet.

Only turns that were offered count: the end of the traffic cuts sessions short. The time of a session is that of its
answers, from arrival to last token, and of the thoughts between them. In a closed loop it is what the session took; in
an open loop, what it would have taken had each turn waited for the answer before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backends.server_profiles import EngineProfile, Profile
from lab.engines.engine_events import EngineRequest
from lab.replay.results import ReplayOutcome, RequestResult, Results, quantile
from lab.replay.sim_fleet import Scenario, SimFleet
from lab.traffic.traces import Arrival

ALONE = "idle"  # the only endpoint of an idle fleet
LONGEST = 1e5  # s, of an answer
UNLIMITED = 10**8  # tokens, or requests per minute


@dataclass(frozen=True, slots=True)
class SessionRow:
    """Statistics of all sessions. A share of nothing is NaN."""

    sessions: int
    turns: float  # offered, mean
    good: float  # share of sessions with every offered turn good
    answered: float  # share of sessions with every offered turn answered completely
    slowdown: tuple[float, float]  # time of these against an idle fleet: p50, p90


def session_row(results: Results, arrivals: Sequence[Arrival], scenario: Scenario) -> SessionRow | None:
    """None without sessions."""
    by_session: dict[int, list[RequestResult]] = {}
    for result in results.requests:
        if result.session:
            by_session.setdefault(result.session, []).append(result)
    if not by_session:
        return None
    found = list(by_session.values())
    answered = [turns for turns in found if all(turn.end is ReplayOutcome.COMPLETED for turn in turns)]
    slowdowns = [_slowdown(turns, [arrivals[turn.number - 1] for turn in turns], scenario) for turns in answered]
    return SessionRow(
        sessions=len(found),
        turns=sum(map(len, found)) / len(found),
        good=sum(all(map(results.is_good, turns)) for turns in found) / len(found),
        answered=len(answered) / len(found),
        slowdown=(quantile(slowdowns, 0.5), quantile(slowdowns, 0.9)),
    )


def _slowdown(turns: Sequence[RequestResult], arrivals: Sequence[Arrival], scenario: Scenario) -> float:
    thought = sum(arrival.think for arrival in arrivals[1:])
    return (sum(turn.took for turn in turns) + thought) / (idle_seconds(arrivals, scenario) + thought)


def idle_seconds(turns: Iterable[Arrival], scenario: Scenario) -> float:
    """Seconds of all answers of a session, one after the other, by an idle fleet."""
    fleets: dict[str, SimFleet] = {}
    now = 0.0
    for number, turn in enumerate(turns):
        fleet = fleets.setdefault(
            turn.route, SimFleet({ALONE: _first_choice(scenario, turn.route)}, block=scenario.block)
        )
        fleet.submit(ALONE, EngineRequest(number, turn.prompt_tokens, turn.output_tokens, turn.hashes), now)
        now = max(event.at for event in fleet.run_until(now + LONGEST))
    return now


def _first_choice(scenario: Scenario, route: str) -> Profile:
    """Profile of the first endpoint of the first tier, without noise or limits of length."""
    pool = scenario.routes[route].tiers[0].pool
    endpoint = next(endpoint.id for found in scenario.pools if found.name == pool for endpoint in found.endpoints)
    profile = scenario.profiles[endpoint]
    if isinstance(profile, EngineProfile):
        return replace(profile, sigma=0.0, kv_tokens=UNLIMITED)
    return replace(profile, ttft_sigma=0.0, tpot_sigma=0.0, max_model_len=UNLIMITED, requests_per_minute=UNLIMITED)
