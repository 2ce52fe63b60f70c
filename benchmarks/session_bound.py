"""What no policy can do better on recorded sessions in the closed loop: turns that an idle engine could not answer in
time, though every earlier prompt is cached there.

A session goes on after each answer, so the turns that come before the end of the traffic depend on the pace. `idle`:
each answer as fast as by an idle engine. `slowest`: as slow as the budgets of TTFT and TPOT allow. A session with every
turn good goes at least as fast as the latter, and reaches at least its turns, so that a session with an impossible turn
among these cannot be good as a whole, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from backends.server_profiles import EngineProfile
from lab.engines.engine_events import EngineFirstToken, EngineRequest
from lab.replay.session_results import ALONE, LONGEST, UNLIMITED
from lab.replay.sim_fleet import Scenario, SimFleet
from lab.traffic.traces import Arrival


@dataclass(frozen=True, slots=True)
class Bound:
    """`turns`: good share of the turns that are reached at the pace of an idle engine, at most; `whole`: share of the
    sessions with every turn good, at most; `whole_idle`: the same where answers are as fast as by an idle engine."""

    sessions: int
    turns: float
    whole: float
    whole_idle: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """Of an idle engine: time to the first token and of the whole answer, s."""

    arrival: Arrival
    ttft: float
    took: float


def bound(arrivals: Sequence[Arrival], scenario: Scenario) -> Bound:
    by_session: dict[int, list[_Turn]] = {}
    for turn in _alone(arrivals, scenario):
        by_session.setdefault(turn.arrival.session, []).append(turn)
    idle = [list(_reached(turns, scenario, slowest=False)) for turns in by_session.values()]
    slowest = [list(_reached(turns, scenario, slowest=True)) for turns in by_session.values()]
    flat = [possible for session in idle for possible in session]
    return Bound(
        sessions=len(by_session),
        turns=sum(flat) / len(flat),
        whole=sum(map(all, slowest)) / len(slowest),
        whole_idle=sum(map(all, idle)) / len(idle),
    )


def _alone(arrivals: Iterable[Arrival], scenario: Scenario) -> Iterator[_Turn]:
    """Each turn after the other on one engine with room for all prompts."""
    (profile, *_) = scenario.profiles.values()
    assert isinstance(profile, EngineProfile)
    fleet = SimFleet({ALONE: replace(profile, sigma=0.0, kv_tokens=UNLIMITED)}, block=scenario.block)
    now = 0.0
    for number, arrival in enumerate(arrivals):
        sizes = arrival.prompt_tokens, arrival.output_tokens
        fleet.submit(ALONE, EngineRequest(number, *sizes, arrival.hashes, arrival.answer_hashes), now)
        events = list(fleet.run_until(now + LONGEST))
        first = next(event.at for event in events if isinstance(event, EngineFirstToken))
        ended = max(event.at for event in events)
        yield _Turn(arrival, first - now, ended - now)
        now = ended


def _reached(turns: Sequence[_Turn], scenario: Scenario, slowest: bool) -> Iterator[bool]:
    """Of each turn that comes before the end of the traffic: an idle engine answers it in time."""
    now = turns[0].arrival.at
    for number, turn in enumerate(turns):
        if number and (now := now + turn.arrival.think) >= scenario.seconds:
            return
        route = scenario.routes[turn.arrival.route]
        budget, pace = route.ttft_budget(None, 0), route.tpot
        allowed = budget + (pace.budget if pace else 0.0) * (turn.arrival.output_tokens - 1)
        yield turn.ttft <= budget
        now += allowed if slowest else turn.took
