"""Plans of the clairvoyant scheduler for the engines of one pool: earliest deadline first, and who is postponed.

Moore and Hodgson (1968), extended to several machines: requests are planned in order of their deadlines, each on the
engine that would finish it first. When one would be late, the planned request with the longest service time is
postponed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.exact_engine import ExactEngine
from gateway.replay.sim_fleet import SimFleet
from gateway.replay.traces import BLOCK, Arrival
from policies.routes.route import Route
from policies.types import FOREVER, Pool

HORIZON = 10.0  # s of known future arrivals: about the duration of an answer
REVIEW = 0.5  # s between two calculations of the cost limit
IMMEDIATE = 1e6  # s: prefers any engine that can start now over any that cannot


@dataclass(slots=True, eq=False)
class PlannedRequest:
    """A request without a first token."""

    number: int
    arrival: Arrival
    route: Route
    deadline: float
    tiers: tuple[int, ...]  # in order of preference
    at: int = 0  # index into `tiers`; past the last one, the request waits for idle engines
    hits: dict[str, int] = field(default_factory=dict)  # cached blocks, by pool

    def __lt__(self, other: PlannedRequest) -> bool:
        return (self.deadline, self.number) < (other.deadline, other.number)

    @property
    def pool(self) -> str | None:
        """Pool of the current tier."""
        return self.route.tiers[self.tiers[self.at]].pool if self.at < len(self.tiers) else None

    @property
    def tpot(self) -> float:
        """Budget, s per token."""
        return self.route.tpot.budget if self.route.tpot else FOREVER


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to serve a request in time. The least `preference` is the best."""

    preference: float
    queue: _EngineQueue
    seconds: float
    immediate: bool


class _EngineQueue:
    """Requests planned for one engine."""

    def __init__(self, engine: ExactEngine, now: float) -> None:
        engine.refresh()
        self.engine = engine
        self.free_at = engine.free_at(now)
        self.ready = engine.accepts_prompt(now)
        self.planned: list[tuple[PlannedRequest, float]] = []  # with service times, s
        self.first: PlannedRequest | None = None  # to be sent now

    def add(self, request: PlannedRequest, seconds: float, immediate: bool) -> None:
        self.planned.append((request, seconds))
        self.free_at += seconds
        if immediate:
            self.first = request

    def remove(self, request: PlannedRequest, seconds: float) -> None:
        self.planned.remove((request, seconds))
        self.free_at -= seconds
        if self.first is request:
            self.first = None


class Demand:
    """Expected demand of a pool, and the requests worth starting when it exceeds the capacity.

    An answer with a TPOT of p seconds leaves 1 - d/p of its engine's time for prefills and for the contexts that
    every step reads (d: the rest of a step). A request therefore costs its prefill, and its own context once per
    output token. When the total cost exceeds the time, accepting the cheapest requests makes most of them good: a
    knapsack of equal values. `arrivals`: all of the replay; those with a deadline and this pool as first tier count.
    """

    def __init__(
        self, pool: str, engines: Sequence[ExactEngine], arrivals: Sequence[Arrival], routes: Mapping[str, Route]
    ) -> None:
        first_tier = [route for route in routes.values() if route.ttft and route.tiers[0].pool == pool]
        self._engines = engines
        self._budgets = {route.name: route.ttft.budget for route in first_tier if route.ttft}
        self._tpot = min((route.tpot.budget for route in first_tier if route.tpot), default=FOREVER)
        self._costs = list(self._future_costs(arrivals)) if engines else []
        self._limit = FOREVER
        self._review_at = 0.0

    def _future_costs(self, arrivals: Iterable[Arrival]) -> Iterator[tuple[float, float]]:
        """Time and cost of each arrival, given that all before it are cached; without those that even an idle engine
        could not serve in time."""
        known = set[int]()
        for arrival in arrivals:
            if (budget := self._budgets.get(arrival.route)) is None:
                continue
            new = next((i for i, block in enumerate(arrival.hashes) if block not in known), len(arrival.hashes))
            known.update(arrival.hashes)
            hit = min(new * BLOCK, (arrival.prompt_tokens - 1) // BLOCK * BLOCK)
            if self._engines[0].prefill(arrival.prompt_tokens, hit)[0] < budget:
                yield arrival.at, self.cost(arrival, hit)

    def cost(self, arrival: Arrival, hit: int) -> float:
        """Seconds of engine time that a request takes from all others."""
        context, engine = arrival.prompt_tokens + arrival.output_tokens / 2, self._engines[0]
        return engine.compute(arrival.prompt_tokens, hit) + arrival.output_tokens * engine.attention(context)

    def limit(self, now: float, waiting: Iterable[float] = ()) -> float:
        """Cost above which a request should not start; FOREVER while there is time for all."""
        if now >= self._review_at:
            self._review_at = now + REVIEW
            self._limit = FOREVER
            spare = sum(engine.spare(self._tpot) for engine in self._engines)
            left = (HORIZON + max(self._budgets.values(), default=0.0)) * spare
            for cost in sorted([*waiting, *(cost for _, cost in self.upcoming(now, now + HORIZON))]):
                left -= cost
                if left < 0:
                    self._limit = cost
                    break
        return self._limit

    def upcoming(self, start: float, end: float) -> Sequence[tuple[float, float]]:
        """Times and costs of the arrivals in [start, end)."""
        return self._costs[bisect_left(self._costs, (start,)) : bisect_left(self._costs, (end,))]


class EngineGroup:
    """The engines of a pool, their common queue, and every prefix block that they ever computed."""

    def __init__(self, pool: Pool, servers: SimFleet, arrivals: Sequence[Arrival], routes: Mapping[str, Route]) -> None:
        self.pool = pool
        self.queue: list[PlannedRequest] = []
        self.known = set[Hashable]()
        found = ((endpoint, servers.servers[endpoint.id]) for endpoint in pool.endpoints)
        self.engines = [ExactEngine(e, server, self.known) for e, server in found if isinstance(server, VirtualEngine)]
        self.demand = Demand(pool.name, self.engines, arrivals, routes)

    def hit(self, request: PlannedRequest) -> int:
        """Cached tokens of the prompt."""
        hashes, known = request.arrival.hashes, self.known
        blocks, most = request.hits.get(self.pool.name, 0), (request.arrival.prompt_tokens - 1) // BLOCK
        most = min(len(hashes), most)
        while blocks < most and hashes[blocks] in known:
            blocks += 1
        request.hits[self.pool.name] = blocks
        return blocks * BLOCK

    def plan(self, now: float) -> tuple[list[tuple[PlannedRequest, ExactEngine]], list[PlannedRequest]]:
        """Requests to send now, each with its engine, and requests to postpone. Both leave the queue."""
        queues = [_EngineQueue(engine, now) for engine in self.engines if engine.engine.alive]
        hits = [self.hit(request) for request in self.queue]
        costs = [self.demand.cost(request.arrival, hit) for request, hit in zip(self.queue, hits, strict=True)]
        limit = self.demand.limit(now, costs)
        late = [request for request, cost in zip(self.queue, costs, strict=True) if cost > limit]
        for request, hit, cost in zip(self.queue, hits, costs, strict=True):
            if cost > limit:
                continue
            options = (self._option(request, hit, queue, now) for queue in queues)
            best = min((option for option in options if option is not None), key=lambda o: o.preference, default=None)
            if best is not None:
                best.queue.add(request, best.seconds, best.immediate)
            else:
                late.append(self._postpone(request, hit, queues))
        send = [(queue.first, queue.engine) for queue in queues if queue.first is not None]
        for request in (*late, *(request for request, _ in send)):
            self.queue.remove(request)
        return send, late

    def _option(self, request: PlannedRequest, hit: int, queue: _EngineQueue, now: float) -> _Option | None:
        """In time on this engine: now, where it slows the answers least, or else as soon as possible."""
        engine, idle = queue.engine, queue.ready and not queue.planned
        seconds = engine.prefill(request.arrival.prompt_tokens, hit)[0]
        if idle:
            first = engine.first_token(request.arrival, hit, request.tpot, now)
            if first is not None and first <= request.deadline:
                step = engine.decode_step(len(engine.answers) + 1, engine.context + request.arrival.prompt_tokens)
                return _Option(step - IMMEDIATE, queue, first - queue.free_at, True)
        start = max(queue.free_at, engine.tolerates_from(seconds))
        if start + seconds > request.deadline or (idle and start <= queue.free_at):
            return None
        return _Option(start + seconds, queue, start + seconds - queue.free_at, False)

    def _postpone(self, request: PlannedRequest, hit: int, queues: Sequence[_EngineQueue]) -> PlannedRequest:
        """The longest planned request, if this one can then be in time; otherwise this one."""
        longest: tuple[float, PlannedRequest, _EngineQueue, float] | None = None
        for queue in queues:
            seconds = queue.engine.prefill(request.arrival.prompt_tokens, hit)[0]
            for other, took in queue.planned:
                in_time = took > seconds and queue.free_at - took + seconds <= request.deadline
                if in_time and (longest is None or took > longest[0]):
                    longest = took, other, queue, seconds
        if longest is None:
            return request
        took, other, queue, seconds = longest
        queue.remove(other, took)
        queue.add(request, seconds, False)
        return other
