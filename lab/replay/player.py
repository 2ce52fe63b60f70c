"""Plays a trace through the gateway's own decision code, in virtual time, against simulated engines.

The player replaces sockets and the clock only, and is deterministic: equal seeds give equal results. Each worker or
replica is a SimGateway of its own. Requests are assigned to gateways at random, as the kernel does with connections.
Workers and replicas exchange the same messages as over Unix sockets and Redis.

Time advances from one possible decision to the next. While no request is queued or has several attempts, only arrivals
and timers allow decisions. Otherwise any event may be one, and the servers run at most `SimFleet.overhead` ahead, the
time that a request or a cancellation takes to reach an engine.

Gateways are told the exact tokens of answers in progress, those of the step under way included, which none is told over
HTTP: waits in their queues are shorter than there. With `Scenario.late_counts` they are told those of their last count.

`run` plays many replays over all cores: one per load, scorer and seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from random import Random
from statistics import fmean
from time import process_time
from typing import Any, TypeVar

from gateway.admin.admin_views import explain
from lab.engines.engine_events import RequestId
from lab.replay.results import CalibrationResult, RegrettedDecision, ResultRow, Results
from lab.replay.session_results import SessionRow, session_row
from lab.replay.sim_fleet import Clock, Node, Scenario, ScheduledFault, SimFleet
from lab.replay.sim_gateway import ATTEMPTS, SimGateway
from lab.traffic.traces import BLOCK, Arrival
from lab.traffic.traffic import Traffic
from policies.fleet.peers import PeerLink
from policies.types import FOREVER

PROGRESS = 0.2  # s between two counts of generated tokens
SCRAPE = 0.5  # s between two scrapes of an engine
WORKER_DELAY = 0.0005  # s of a message between workers of one machine
Row = TypeVar("Row", ResultRow, SessionRow)
POINTS = 200  # of a plot
DRAIN = 300.0  # s after the last arrival at which the replay ends


class Player:
    """One replay. `play` may be called once. `keep`: number of decisions kept in the results, the most regretted.
    `gateway`: makes each gateway process."""

    def __init__(
        self,
        scenario: Scenario,
        arrivals: Sequence[Arrival],
        seed: int = 0,
        keep: int = 0,
        gateway: Callable[..., SimGateway] = SimGateway,
    ) -> None:
        self.scenario = scenario
        self.arrivals = arrivals
        self.clock = Clock()
        adapters = {endpoint.id: pool.variants for pool in scenario.pools for endpoint in pool.endpoints}
        hung = 0.0 if scenario.clairvoyant else scenario.hung
        self.servers = SimFleet(scenario.profiles, seed, hung, adapters, scenario.tokens_per_event, scenario.block)
        last = max(arrivals[-1].at, 1e-9) if arrivals else 1.0
        self.results = Results(scenario.scored_routes, scenario.seconds or last, keep)
        links, random = self._peer_links(), Random(seed)
        self.gateways = [
            gateway(scenario, self.clock, self.servers, self.results, arrivals, self._on_ended, link) for link in links
        ]
        self._gateway_of = [self.gateways[random.randrange(len(links))] for _ in range(len(arrivals) + 1)]  # by number
        self._local = {endpoint.id for pool in scenario.pools if pool.local for endpoint in pool.endpoints}
        self._timed = [number for number, arrival in enumerate(arrivals, 1) if not arrival.follows]
        self._next = 0  # index into `_timed`
        self._followers = followers(arrivals)
        self._thinking = 0  # sessions between two turns
        self._counted: dict[tuple[int, str], Mapping[RequestId, int]] = {}  # with late counts: by gateway and endpoint
        self.end = self.results.seconds + DRAIN  # of the replay, at the latest

    def _peer_links(self) -> list[PeerLink | None]:
        """One per gateway process."""
        scenario = self.scenario
        count = max(scenario.workers, scenario.replicas)
        if scenario.clairvoyant or count == 1:
            return [None]
        delay = scenario.peer_delay if scenario.replicas > 1 else WORKER_DELAY
        nodes: list[Node] = []
        for _ in range(count):
            Node(self.clock, delay, nodes, scenario.profiles.__contains__)
        return [*nodes]

    def play(self) -> Results:
        """Runs until the last answer, or until `end`: DRAIN seconds after the last arrival."""
        for fault in self.scenario.all_faults:
            self.clock.at(fault.at, self._apply_fault, fault)
        pairs = [(gateway, endpoint) for endpoint in self.scenario.profiles for gateway in self.gateways]
        for i, (gateway, endpoint) in enumerate(pairs):
            self.clock.at(SCRAPE * i / len(pairs), self._scrape, gateway, endpoint)
            self.clock.at(PROGRESS * i / len(pairs), self._progress, gateway, endpoint)
        while self.clock.now < self.end and self._unfinished():
            self._advance(min(self._next_decision(), self.end))
        return self.results

    def _unfinished(self) -> bool:
        waits = self._next < len(self._timed) or self._thinking > 0
        return waits or any(gateway.active for gateway in self.gateways)

    def _next_decision(self) -> float:
        upcoming, now = self.clock.upcoming, self.clock.now
        upcoming = min(upcoming, self._next_arrival())
        upcoming = min(upcoming, max(min(gateway.queue.wake_at for gateway in self.gateways), now))
        busy = any(gateway.queue.held or gateway.racing for gateway in self.gateways)
        return min(upcoming, now + self.servers.overhead) if busy else upcoming

    def _advance(self, until: float) -> None:
        for event in self.servers.run_until(until):
            self.clock.now = max(self.clock.now, event.at)
            gateway = self._gateway_of[int(event.id) // ATTEMPTS]
            gateway.on_event(event)
            gateway.dispatch_queued()
        self.clock.now = until
        self.clock.run()
        while self._next_arrival() <= until:
            self._next += 1
            self._arrive(self._timed[self._next - 1])
        for gateway in self.gateways:
            if gateway.queue.wake_at <= until:
                gateway.dispatch_queued()

    # ---------------------------------------------------------------- arrivals

    def _next_arrival(self) -> float:
        """Time of the next arrival that follows no answer."""
        return self.arrivals[self._timed[self._next] - 1].at if self._next < len(self._timed) else FOREVER

    def _arrive(self, number: int) -> None:
        self._gateway_of[number].arrive(number, self.arrivals[number - 1])

    def _on_ended(self, number: int) -> None:
        """Answered, refused or lost: the session goes on after the think time of the next turn."""
        if (follower := self._followers.get(number)) is None:
            return
        turn = self.arrivals[follower - 1]
        at = self.clock.now + turn.think
        if turn.logged or at < self.results.seconds:
            self._thinking += 1
            self.clock.at(at, self._follow, follower)

    def _follow(self, number: int) -> None:
        self._thinking -= 1
        self._arrive(number)

    # ---------------------------------------------------------------- timers

    def _scrape(self, gateway: SimGateway, endpoint: str) -> None:
        now = self.clock.now
        if (load := self.servers.load_of(endpoint)) is not None:
            gateway.fleet.on_scrape(endpoint, load, now)
        elif endpoint in self._local:
            gateway.fleet.on_probe_failed(endpoint, now)
        self.clock.at(now + SCRAPE, self._scrape, gateway, endpoint)
        gateway.dispatch_queued()

    def _progress(self, gateway: SimGateway, endpoint: str) -> None:
        counts = self.servers.progress(endpoint)
        if self.scenario.late_counts:
            counts = self._counts_before(gateway, endpoint, dict(counts))
        gateway.fleet.on_progress(counts, self.clock.now)
        self.clock.at(self.clock.now + PROGRESS, self._progress, gateway, endpoint)

    def _counts_before(
        self, gateway: SimGateway, endpoint: str, counts: Mapping[RequestId, int]
    ) -> Iterable[tuple[RequestId, int]]:
        """The gateway's counts before these; of an answer that had none, its first token."""
        key = self.gateways.index(gateway), endpoint
        before, self._counted[key] = self._counted.get(key, {}), counts
        return [(answer, before.get(answer, 1)) for answer in counts]

    def _apply_fault(self, fault: ScheduledFault) -> None:
        """The gateway hears of lost requests once all faults of the moment are there."""
        written = dict(self.servers.progress(fault.endpoint))
        for key in self.servers.apply_fault(fault, self.clock.now):
            gateway = self._gateway_of[int(key) // ATTEMPTS]
            self.clock.at(self.clock.now, gateway.on_engine_death, int(key), written.get(key, 0))


def followers(arrivals: Sequence[Arrival]) -> dict[int, int]:
    """Number of the turn after each turn that has one to follow, by number."""
    latest, found = dict[int, int](), dict[int, int]()
    for number, arrival in enumerate(arrivals, 1):
        if arrival.follows:
            found[latest[arrival.session]] = number
        latest[arrival.session] = number
    return found


def play(scenario: Scenario, arrivals: Sequence[Arrival], seed: int = 0, keep: int = 0) -> Results:
    return Player(scenario, arrivals, seed, keep).play()


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """One replay. `name`: label in the report; `keep`: number of decisions to show, the most regretted."""

    name: str
    scenario: Scenario
    load: float
    seed: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The figures of a task, as printed by `--json`."""

    name: str
    load: float
    seed: int
    rows: tuple[ResultRow, ...]
    calibration: tuple[CalibrationResult, ...]
    seconds: float  # of offered traffic
    played: float  # virtual seconds until the last answer
    took: float  # CPU seconds, reading the trace included
    sessions: SessionRow | None = None  # None: the trace holds no sessions
    worst: tuple[dict[str, Any], ...] = ()
    first_tokens: tuple[tuple[float, float], ...] = ()  # TTFT in s, and the share of requests with one by then


def run(tasks: Sequence[ReplayTask], traffic: Traffic) -> Iterator[ReplayResult]:
    """In the order of the tasks. Deterministic for any number of cores."""
    workers = min(len(tasks), os.cpu_count() or 1)
    if workers < 2:
        yield from map(partial(_run, traffic), tasks)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(partial(_run, traffic), tasks)


def _run(traffic: Traffic, task: ReplayTask) -> ReplayResult:
    began = process_time()
    offered = replace(traffic, repaired=task.scenario.repaired)
    arrivals = offered.arrivals(task.scenario.routes, task.load, task.seed)
    scenario = replace(task.scenario, seconds=traffic.window, block=arrivals[0].block if arrivals else BLOCK)
    results = play(scenario, arrivals, task.seed, task.keep)
    return ReplayResult(
        name=task.name,
        load=task.load,
        seed=task.seed,
        rows=tuple(results.rows()),
        calibration=tuple(results.calibration()),
        seconds=results.seconds,
        played=max((result.ended_at or result.arrived for result in results.requests), default=0.0),
        took=process_time() - began,
        sessions=session_row(results, arrivals, scenario),
        first_tokens=tuple(results.first_tokens(POINTS)),
        worst=tuple(_described(rank, decision) for rank, decision in enumerate(results.worst(), 1)),
    )


def _described(rank: int, regretted: RegrettedDecision) -> dict[str, Any]:
    """The decision as in /explain, and the outcome."""
    result = regretted.result
    return {
        "rank": rank,
        "request": result.number,
        "arrived_s": round(result.arrived, 3),
        "route": result.route,
        "endpoint": result.endpoint,
        "ttft_ms": round((result.ttft or 0.0) * 1e3, 1),
        "upstream_ms": round((result.upstream or 0.0) * 1e3, 1),
        "regret_ms": round(result.regret * 1e3, 1),
        "cached_tokens": result.cached,
        **explain(regretted.decision, regretted.estimate, {}, {}, {}),
    }


def mean_rows(results: Iterable[ReplayResult]) -> list[ResultRow]:
    """Row by row, over the seeds."""
    by_seed = list(zip(*(result.rows for result in results), strict=True))
    return [replace(_mean_row(rows), interval=_widest(row.interval for row in rows)) for rows in by_seed]


def _widest(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    lows, highs = zip(*intervals, strict=True)
    return min(lows), max(highs)


def mean_sessions(results: Iterable[ReplayResult]) -> SessionRow | None:
    """Over the seeds; None where the traces hold no sessions."""
    found = [result.sessions for result in results if result.sessions is not None]
    return _mean_row(found) if found else None


def _mean_row(rows: Sequence[Row]) -> Row:
    names = [field.name for field in fields(rows[0])]
    return type(rows[0])(**{name: _mean([getattr(row, name) for row in rows]) for name in names})


def _mean(values: Sequence[Any]) -> Any:
    if len(values) == 1 or isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], tuple):
        longest = max(map(len, values))
        padded = [(*value, *(0.0,) * (longest - len(value))) for value in values]
        return tuple(fmean(column) for column in zip(*padded, strict=True))
    return fmean(values)
