"""Engines that the latest traffic of a gateway takes, at a bounded cost: the question asked every minute.

Rules:
- The traffic is that of the last ten minutes. Where its replays cost more than they may, the older part is left out
  first: its needs were found in earlier minutes, and are kept (`lab.capacity.replica_law`). Then sessions are.
- The engines simulated are those that the gateway has learned, and its predictions begin with what it knows.
- A fleet below the present one has to have room: a need between two numbers does not swing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.server_profiles import EngineProfile
from lab.capacity.fleet_size import SLICE, FleetSizeQuestion, replayed
from lab.capacity.learned_profile import learned_profile
from lab.capacity.replica_law import KEPT, growth
from lab.capacity.smallest_fleet import FleetSearch, SmallestFleet
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import Arrival
from policies.latency.learned_state import LearnedEndpoint

REPLAYS = 4  # of a question, about
SHORTEST = 240.0  # s of traffic that a cheap replay has left


@dataclass(frozen=True, slots=True)
class ReplicasQuestion:
    """`arrivals`: of the last KEPT seconds, from 0 on, each with a session; `now`: s, their end. `seen`: share of all
    sessions among them; `start_time`: s until a new engine serves; `cost`: requests of all replays, about.

    `learned`: of one engine of each pool; `kv_tokens`: as its engines report."""

    scenario: Scenario
    arrivals: Sequence[Arrival]
    pool: str
    current: int
    least: int
    most: int
    start_time: float
    now: float
    since: float = 0.0  # traffic is known from then on
    seen: float = 1.0
    cost: int = 4_000
    learned: Mapping[str, LearnedEndpoint] = field(default_factory=dict)
    kv_tokens: Mapping[str, int] = field(default_factory=dict)


def replicas_needed(question: ReplicasQuestion) -> SmallestFleet:
    """Raises ValueError where a learned value does not fit."""
    if not question.arrivals:
        return SmallestFleet(question.least, True)
    factor = growth([each.at for each in question.arrivals], question.since, question.now, question.start_time)
    cost = question.cost // REPLAYS
    asked = FleetSizeQuestion(
        scenario=_with_learned_engines(question),
        arrivals=_latest(question, cost / (factor / question.seen)),
        pool=question.pool,
        current=question.current,
        growth=factor,
        seen=question.seen,
        slice=max(SLICE, question.start_time),
        learned=question.learned,
        cost=cost,
    )
    search = FleetSearch(lambda n: replayed(asked, n), question.least, question.most, question.current)
    return search.around(question.current)


def _latest(question: ReplicasQuestion, affordable: float) -> list[Arrival]:
    """The latest part, of about so many requests, and SHORTEST at least; its times begin at 0."""
    arrivals = [each for each in question.arrivals if each.at >= question.now - KEPT]
    start = arrivals[max(len(arrivals) - max(int(affordable), 1), 0)].at if arrivals else 0.0
    start = max(min(start, question.now - SHORTEST), 0.0)
    return [replace(each, at=each.at - start) for each in arrivals if each.at >= start]


def _with_learned_engines(question: ReplicasQuestion) -> Scenario:
    profiles = dict(question.scenario.profiles)
    for pool in question.scenario.pools:
        for endpoint in pool.endpoints:
            assumed = profiles[endpoint.id]
            if isinstance(assumed, EngineProfile):
                known, room = question.learned.get(pool.name), question.kv_tokens.get(pool.name)
                profiles[endpoint.id] = learned_profile(known, assumed, room)
    return replace(question.scenario, profiles=profiles)
