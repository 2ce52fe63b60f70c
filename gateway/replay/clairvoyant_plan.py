"""Who goes where among the engines of one pool: earliest deadline first, and who gives way.

Moore and Hodgson 1968, carried over to several machines: jobs are planned in the order of their deadlines, each
where it would be done first; when one would be late, the one of those planned that takes the longest gives way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.demand import Demand
from gateway.replay.exact_engine import Machine
from gateway.replay.sim_fleet import SimFleet
from gateway.replay.traces import BLOCK, Arrival
from policies.routes.route import Route
from policies.types import FOREVER, Pool

FAR = 1e6  # s: whatever can go at once is before whatever cannot


@dataclass(slots=True, eq=False)
class PlannedRequest:
    """A request without a first token."""

    ticket: int
    arrival: Arrival
    route: Route
    deadline: float
    tiers: tuple[int, ...]  # in the order of preference
    at: int = 0  # index into `tiers`; behind the last one, it waits for spare time
    hits: dict[str, int] = field(default_factory=dict)  # blocks at hand, by pool

    def __lt__(self, other: PlannedRequest) -> bool:
        return (self.deadline, self.ticket) < (other.deadline, other.ticket)

    @property
    def pool(self) -> str | None:
        """The one that it waits for."""
        return self.route.tiers[self.tiers[self.at]].pool if self.at < len(self.tiers) else None

    @property
    def pace(self) -> float:
        """Seconds per token that its caller was promised."""
        return self.route.tpot.budget if self.route.tpot else FOREVER


class _Option(NamedTuple):
    preference: float
    lane: _EngineQueue
    seconds: float
    at_once: bool


class _EngineQueue:
    """What is planned for one engine."""

    __slots__ = ("first", "free", "jobs", "machine", "ready")

    def __init__(self, machine: Machine, now: float) -> None:
        machine.look()
        self.machine, self.free, self.ready = machine, machine.free_at(now), machine.wants(now)
        self.jobs: list[tuple[PlannedRequest, float]] = []  # with their seconds
        self.first: PlannedRequest | None = None  # goes at once

    def add(self, job: PlannedRequest, seconds: float, at_once: bool) -> None:
        self.jobs.append((job, seconds))
        self.free += seconds
        if at_once:
            self.first = job

    def remove(self, job: PlannedRequest, seconds: float) -> None:
        self.jobs.remove((job, seconds))
        self.free -= seconds
        if self.first is job:
            self.first = None


class EngineGroup:
    """A pool of engines: its queue, and all that they ever computed."""

    def __init__(self, pool: Pool, world: SimFleet, arrivals: Sequence[Arrival], routes: Mapping[str, Route]) -> None:
        self.pool, self.queue = pool, list[PlannedRequest]()
        self.known = set[Hashable]()
        engines = ((endpoint, world.machines[endpoint.id]) for endpoint in pool.endpoints)
        self.machines = [Machine(e, engine, self.known) for e, engine in engines if isinstance(engine, VirtualEngine)]
        self.demand = Demand(pool.name, self.machines, arrivals, routes)
        self._refused: dict[tuple[int, str], tuple[int, int]] = {}  # what was seen when an engine could not take a job

    def add(self, job: PlannedRequest) -> None:
        insort(self.queue, job)

    def hit(self, job: PlannedRequest) -> int:
        """Tokens of its prompt that need not be computed."""
        hashes, known = job.arrival.hashes, self.known
        blocks, most = job.hits.get(self.pool.name, 0), min(len(hashes), (job.arrival.prompt_tokens - 1) // BLOCK)
        while blocks < most and hashes[blocks] in known:
            blocks += 1
        job.hits[self.pool.name] = blocks
        return blocks * BLOCK

    def plan(self, now: float) -> tuple[list[tuple[PlannedRequest, Machine]], list[PlannedRequest]]:
        """Who goes now, and where to; and who gives way. Both leave the queue."""
        lanes = [_EngineQueue(machine, now) for machine in self.machines if machine.engine.alive]
        wanted = [(job, hit, self.demand.cost(job.arrival, hit)) for job in self.queue for hit in [self.hit(job)]]
        limit = self.demand.limit(now, (cost for *_, cost in wanted))
        late = [job for job, _, cost in wanted if cost > limit]
        for job, hit, cost in wanted:
            if cost > limit:
                continue
            options = (self._option(job, hit, lane, now) for lane in lanes)
            best = min((option for option in options if option is not None), key=lambda o: o.preference, default=None)
            if best is not None:
                best.lane.add(job, best.seconds, best.at_once)
            else:
                late.append(self._give_way(job, hit, lanes))
        go = [(lane.first, lane.machine) for lane in lanes if lane.first is not None]
        for job in (*late, *(job for job, _ in go)):
            self.queue.remove(job)
        return go, late

    def _option(self, job: PlannedRequest, hit: int, lane: _EngineQueue, now: float) -> _Option | None:
        """To be in time there: now, the better the less it slows the answers; else as soon as it could be done."""
        machine = lane.machine
        seconds = machine.prefill(job.arrival.prompt_tokens, hit)[0]
        if lane.ready and not lane.jobs:
            first = self.first_token(job, machine, now)
            if first is not None and first <= job.deadline:
                slowed = machine.pace(len(machine.answers) + 1, machine.context + job.arrival.prompt_tokens)
                return _Option(slowed - FAR, lane, first - lane.free, True)
        start = max(lane.free, machine.opens_at(seconds))
        if start + seconds > job.deadline or (lane.ready and not lane.jobs and start <= lane.free):
            return None
        return _Option(start + seconds, lane, start + seconds - lane.free, False)

    def first_token(self, job: PlannedRequest, machine: Machine, now: float) -> float | None:
        """When it would come, were it sent now; None if that takes the pace from an answer."""
        hit = self.hit(job)
        key, seen = (job.ticket, machine.endpoint.id), (machine.version, hit)
        if self._refused.get(key) == seen:
            return None
        first = machine.first_token(job.arrival, hit, job.pace, now)
        if first is None:
            self._refused[key] = seen
        return first

    def _give_way(self, job: PlannedRequest, hit: int, lanes: Sequence[_EngineQueue]) -> PlannedRequest:
        """The longest one planned, if that lets this one be in time; else this one."""
        longest: tuple[float, PlannedRequest, _EngineQueue, float] | None = None
        for lane in lanes:
            seconds = lane.machine.prefill(job.arrival.prompt_tokens, hit)[0]
            for other, took in lane.jobs:
                in_time = took > seconds and lane.free - took + seconds <= job.deadline
                if in_time and (longest is None or took > longest[0]):
                    longest = took, other, lane, seconds
        if longest is None:
            return job
        took, other, lane, seconds = longest
        lane.remove(other, took)
        lane.add(job, seconds, False)
        return other

    def forget(self, job: PlannedRequest) -> None:
        for machine in self.machines:
            self._refused.pop((job.ticket, machine.endpoint.id), None)
