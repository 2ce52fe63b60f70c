"""Replays of the same traffic on fleets of different sizes: one pool has `n` engines, all else is as configured.

Rules:
- Nothing counts before `WARM_UP`: caches and predictions fill. Then the engines that a change of size makes new become
  cold; of a smaller fleet, as many as hold the sessions of the engines that would go. So a larger fleet pays for what
  its new engines compute first, and a smaller one for the conversations that it loses.
- `simulated` of the `n` engines are simulated, before the same share of the sessions. The fewer, the
  less sure the figure, by an engine at one of five (benchmarks/AUTOSCALING.md).
- A budget is met where it is met in every slice of the traffic, of one start of an engine or more: misses of the last
  minutes are not outweighed by an hour at rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from backends.server_profiles import Profile
from lab.capacity.budget_shares import BudgetShare, budget_shares, worst
from lab.replay.player import Player
from lab.replay.results import RequestResult, Results
from lab.replay.sim_fleet import Scenario, ScheduledFault
from lab.traffic.session_sample import sampled
from lab.traffic.traces import Arrival
from policies.latency.learned_state import LearnedEndpoint
from policies.types import Endpoint, Pool

WARM_UP = 0.2  # of the traffic
MAX_WARM_UP = 120.0  # s
SLICE = 120.0  # s, at least
ENDING = 120.0  # s after the last arrival; an answer that is still unfinished then is a miss
SHORTEST, MOST_COST = 30.0, 2  # s of a replay; times the cost that is asked for


@dataclass(frozen=True, slots=True)
class FleetSizeQuestion:
    """Traffic for a pool with `current` engines. `growth`: factor on the number of sessions; `seen`: share of all
    sessions that `arrivals` holds; `slice`: s; `learned`: of the pool's engines, by what the gateway knows of them."""

    scenario: Scenario
    arrivals: Sequence[Arrival]
    pool: str
    current: int
    growth: float = 1.0
    seen: float = 1.0
    slice: float = SLICE
    learned: Mapping[str, LearnedEndpoint] = field(default_factory=dict)  # by pool
    cost: int | None = None  # requests of a replay, about; None: all
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetSizeResult:
    """Of `n` engines, `simulated` of them in the replay. `shares`: the worst slice of each budget of each route."""

    n: int
    simulated: int
    requests: int
    shares: tuple[BudgetShare, ...]

    @property
    def is_enough(self) -> bool:
        return self.has_room(0.0)

    def has_room(self, spare: float) -> bool:
        """Every budget is met, by so much of what is possible."""
        return all(share.has_room(spare) for share in self.shares)

    @property
    def worst(self) -> BudgetShare | None:
        return max(self.shares, key=lambda share: share.shortfall, default=None)

    @property
    def attainment(self) -> float:
        """The share of the budget that is furthest from its target; 1 where no route has a budget."""
        return min((share.share for share in self.shares), default=1.0)


def replayed(question: FleetSizeQuestion, n: int) -> FleetSizeResult:
    """The question's traffic on `n` engines."""
    simulated = _simulated(question, n)
    share = simulated / n * question.growth / question.seen
    arrivals = _affordable(sampled(question.arrivals, share, question.seed), question.cost)
    scenario = resized(question.scenario, question.pool, simulated, simulated / n)
    warm_up = min(WARM_UP * _seconds(arrivals), MAX_WARM_UP)
    cold = cold_engines(n, question.current) * simulated / n
    scenario = replace(scenario, faults=(*scenario.faults, *_cold(scenario, question.pool, ceil(cold - 1e-9), warm_up)))
    player = Player(scenario, arrivals, question.seed)
    player.end = _seconds(arrivals) + ENDING
    for gateway in player.gateways:
        gateway.fleet.restore(_learned(question, scenario), 0.0, 0.0)
    shares = worst(s for part in _slices(player.play(), warm_up, question.slice) for s in part)
    return FleetSizeResult(n, simulated, len(arrivals), tuple(shares.values()))


def _simulated(question: FleetSizeQuestion, n: int) -> int:
    """Engines to simulate: as many as the cost allows, one at least."""
    if question.cost is None:
        return n
    offered = len(question.arrivals) * question.growth / question.seen
    return min(max(int(n * question.cost / max(offered, 1.0)), 1), n)


def _affordable(arrivals: list[Arrival], cost: int | None) -> list[Arrival]:
    """The latest part, of at most MOST_COST times the cost, and SHORTEST at least: a fleet that is far too small
    shows it soon."""
    if cost is None or len(arrivals) <= MOST_COST * cost:
        return arrivals
    start = max(min(arrivals[-MOST_COST * cost].at, arrivals[-1].at - SHORTEST), 0.0)
    return [replace(each, at=each.at - start) for each in arrivals if each.at >= start]


def _seconds(arrivals: Sequence[Arrival]) -> float:
    return arrivals[-1].at if arrivals else 0.0


def cold_engines(n: int, current: int) -> int:
    """Engines of `n` whose cache is empty after a change from `current`."""
    return min(n - current if n > current else ceil(n * (current - n) / current), n)


def resized(scenario: Scenario, pool: str, count: int, share: float = 1.0) -> Scenario:
    """The pool has `count` engines with the profiles of the present ones, and every other engine pool its `share`."""
    pools, profiles = list[Pool](), dict[str, Profile]()
    for found in scenario.pools:
        size = count if found.name == pool else max(round(share * len(found.endpoints)), 1)
        made = replace(found, endpoints=_endpoints(found, size)) if found.local and found.endpoints else found
        pools.append(made)
        before = [scenario.profiles[endpoint.id] for endpoint in found.endpoints]
        profiles |= {each.id: before[i % len(before)] for i, each in enumerate(made.endpoints)}
    return replace(scenario, pools=tuple(pools), profiles=profiles)


def _endpoints(pool: Pool, count: int) -> tuple[Endpoint, ...]:
    """Those of the pool, as far as they go."""
    first = pool.endpoints[0]
    added = (replace(first, id=f"{pool.name}/new-{i}") for i in range(len(pool.endpoints), count))
    return (*pool.endpoints[:count], *added)


def _cold(scenario: Scenario, pool: str, count: int, at: float) -> list[ScheduledFault]:
    endpoints = next(found.endpoints for found in scenario.pools if found.name == pool)
    return [ScheduledFault(at, endpoint.id, "cold") for endpoint in endpoints[len(endpoints) - count :]]


def _learned(question: FleetSizeQuestion, scenario: Scenario) -> dict[str, LearnedEndpoint]:
    known = question.learned
    return {each.id: known[pool.name] for pool in scenario.pools if pool.name in known for each in pool.endpoints}


def _slices(results: Results, warm_up: float, least: float) -> Iterator[list[BudgetShare]]:
    """Budget shares of each slice after the warm-up, all of the same length."""
    counted = [result for result in results.requests if result.arrived >= warm_up]
    seconds = max((result.arrived for result in counted), default=warm_up) - warm_up
    count = max(int(seconds // least), 1)
    by_slice: list[list[RequestResult]] = [[] for _ in range(count)]
    for result in counted:
        by_slice[min(int((result.arrived - warm_up) * count / (seconds or 1.0)), count - 1)].append(result)
    for found in by_slice:
        yield list(budget_shares(results, found))
