"""Plans of the clairvoyant scheduler for the engines of one pool: earliest deadline first, and postponed requests.

Moore and Hodgson (1968), extended to several machines: requests are planned in order of their deadlines, each on the
engine that would finish first. When a request would be late, the planned request with the longest service time is
postponed. With real caches, a request goes where it takes the least engine time, and waits for that engine as long as
its deadline allows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lab.engines.virtual_engine import VirtualEngine
from lab.replay.clairvoyant_engine import ExactEngine
from lab.replay.sim_fleet import SimFleet
from lab.traffic.traces import Arrival
from policies.routes.route import Route
from policies.types import FOREVER, Pool

HORIZON = 10.0  # s of known future arrivals: about the duration of an answer
REVIEW = 0.5  # s between two calculations of the cost limit
IMMEDIATE = 1e6  # s: prefers any engine ready now over any other
WAIT = 0.5  # price of a second in the queue, in seconds of engine time, with real caches


@dataclass(slots=True, eq=False)
class PlannedRequest:
    """A request without a first token."""

    number: int
    arrival: Arrival
    route: Route
    deadline: float
    tiers: tuple[int, ...]  # in order of preference
    at: int = 0  # index into `tiers`; past the last tier, the request waits for idle engines
    hits: dict[str, int] = field(default_factory=dict)  # cached blocks, by pool

    def __lt__(self, other: PlannedRequest) -> bool:
        return (self.deadline, self.number) < (other.deadline, other.number)

    @property
    def pool(self) -> str | None:
        """Pool of the current tier."""
        return self.route.tiers[self.tiers[self.at]].pool if self.at < len(self.tiers) else None

    @property
    def due(self) -> float:
        """Of the last token; FOREVER without a total budget."""
        return FOREVER if self.route.total is None else self.arrival.at + self.route.total.budget

    @property
    def tpot(self) -> float:
        """Budget, s per token."""
        return self.route.tpot.budget if self.route.tpot else FOREVER


@dataclass(slots=True, eq=False)
class _EngineQueue:
    """Requests planned for one engine."""

    engine: ExactEngine
    free_at: float
    ready: bool  # accepts a prompt now
    planned: list[tuple[PlannedRequest, float]] = field(default_factory=list)  # with service times, s
    first: PlannedRequest | None = None  # to be sent now

    def add(self, request: PlannedRequest, seconds: float, immediate: bool = False) -> None:
        self.planned.append((request, seconds))
        self.free_at += seconds
        if immediate:
            self.first = request

    def remove(self, request: PlannedRequest, seconds: float) -> None:
        self.planned.remove((request, seconds))
        self.free_at -= seconds
        if self.first is request:
            self.first = None


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to serve a request in time. The least `preference` is the best."""

    preference: float
    queue: _EngineQueue
    seconds: float
    immediate: bool


class EngineGroup:
    """The engines of a pool, their common queue, all prefix blocks computed so far, and the coming demand.

    An answer with a TPOT of p seconds leaves 1 - d/p of the engine's time for prefills and for the contexts that
    every step reads (d: the rest of a step). When the total cost of the requests exceeds that time, accepting the
    cheapest makes most of them good: a knapsack of equal values. `arrivals`: of the whole replay; only arrivals
    with a deadline and this pool as first tier count.
    """

    def __init__(
        self,
        pool: Pool,
        servers: SimFleet,
        arrivals: Sequence[Arrival],
        routes: Mapping[str, Route],
        perfect_caches: bool = True,
    ) -> None:
        self.pool = pool
        self.queue: list[PlannedRequest] = []
        self.known = set[Hashable]() if perfect_caches else None
        found = ((endpoint, servers.servers[endpoint.id]) for endpoint in pool.endpoints)
        self.engines = [ExactEngine(e, server, self.known) for e, server in found if isinstance(server, VirtualEngine)]
        promised = [route for route in routes.values() if route.ttft or route.total]
        first_tier = [route for route in promised if route.tiers[0].pool == pool.name]
        self._routes = {route.name: route for route in first_tier}
        self._adapters = {name: route.variants.get(pool.name, "") for name, route in routes.items()}
        self._horizon = HORIZON + max((route.ttft.budget for route in first_tier if route.ttft), default=0.0)
        self._tpot = min((route.tpot.budget for route in first_tier if route.tpot), default=FOREVER)
        self._costs = list(self._future_costs(arrivals))
        self._limit = FOREVER
        self._review_at = 0.0

    def _future_costs(self, arrivals: Iterable[Arrival]) -> Iterator[tuple[float, float]]:
        """Time and cost of each arrival, with all earlier prompts cached; without arrivals that even an idle engine
        could not serve in time."""
        known, engine = set[int](), self.engines[0]
        for arrival in arrivals:
            if (route := self._routes.get(arrival.route)) is None:
                continue
            new = next((i for i, block in enumerate(arrival.hashes) if block not in known), len(arrival.hashes))
            known.update(arrival.hashes)
            hit = min(new * arrival.block, (arrival.prompt_tokens - 1) // arrival.block * arrival.block)
            if engine.prefill(arrival.prompt_tokens, hit)[0] < route.ttft_budget(None, arrival.prompt_tokens - hit):
                yield arrival.at, engine.cost(arrival, hit)

    def limit(self, now: float, waiting: Iterable[float] = ()) -> float:
        """Cost above which a request should not start; FOREVER while there is time for all."""
        if now >= self._review_at:
            self._review_at = now + REVIEW
            self._limit = FOREVER
            spare = sum(engine.spare(self._tpot) for engine in self.engines)
            left = self._horizon * spare
            for cost in sorted([*waiting, *(cost for _, cost in self.upcoming(now))]):
                left -= cost
                if left < 0:
                    self._limit = cost
                    break
        return self._limit

    def upcoming(self, now: float) -> Sequence[tuple[float, float]]:
        """Times and costs of the arrivals up to HORIZON."""
        return self._costs[bisect_left(self._costs, (now,)) : bisect_left(self._costs, (now + HORIZON,))]

    def hit(self, request: PlannedRequest, engine: ExactEngine) -> int:
        """Tokens of the prompt that the engine has cached."""
        block = request.arrival.block
        if self.known is None:
            return engine.cached(request.arrival) * block
        hashes, blocks = request.arrival.hashes, request.hits.get(self.pool.name, 0)
        most = min(len(hashes), (request.arrival.prompt_tokens - 1) // block)
        while blocks < most and hashes[blocks] in self.known:
            blocks += 1
        request.hits[self.pool.name] = blocks
        return blocks * block

    def adapter(self, request: PlannedRequest) -> str:
        return self._adapters[request.route.name]

    def best_hit(self, request: PlannedRequest) -> int:
        """Most tokens of the prompt that any engine has cached."""
        engines = self.engines if self.known is None else self.engines[:1]
        return max(self.hit(request, engine) for engine in engines)

    def plan(self, now: float) -> tuple[list[tuple[PlannedRequest, ExactEngine]], list[PlannedRequest]]:
        """Requests to send now, each with an engine, and requests to postpone. Both leave the queue."""
        queues = []
        for engine in self.engines:
            if engine.engine.alive:
                engine.refresh()
                queues.append(_EngineQueue(engine, engine.free_at(now), engine.accepts_prompt(now)))
        costs = [self._cost(request) for request in self.queue]
        limit = self.limit(now, costs)
        late = [request for request, cost in zip(self.queue, costs, strict=True) if cost > limit]
        for request, cost in zip(self.queue, costs, strict=True):
            if cost > limit:
                continue
            options = (self._option(request, queue, now) for queue in queues)
            best = min((option for option in options if option is not None), key=lambda o: o.preference, default=None)
            if best is not None:
                best.queue.add(request, best.seconds, best.immediate)
            elif now > request.deadline or any(queue.engine.has_place(self.adapter(request)) for queue in queues):
                late.append(self._postpone(request, queues))
        send = [(queue.first, queue.engine) for queue in queues if queue.first is not None]
        for request in (*late, *(request for request, _ in send)):
            self.queue.remove(request)
        return send, late

    def _cost(self, request: PlannedRequest) -> float:
        """Engine time that the request takes where most of its prompt is cached."""
        return self.engines[0].cost(request.arrival, self.best_hit(request))

    def _option(self, request: PlannedRequest, queue: _EngineQueue, now: float) -> _Option | None:
        """In time on this engine: now, where it slows the answers least, or else as soon as possible."""
        engine, idle = queue.engine, queue.ready and not queue.planned
        hit, adapter = self.hit(request, engine), self.adapter(request)
        if not engine.has_place(adapter):
            return None
        loading = engine.loading(adapter)
        seconds = engine.prefill(request.arrival.prompt_tokens, hit)[0] + loading
        step = engine.decode_step(len(engine.answers) + 1, engine.context + request.arrival.prompt_tokens)
        if idle:
            first = engine.first_token(request.arrival, hit, request.tpot, now, loading, request.due)
            if first is not None and first <= request.deadline:
                price = first + loading if loading else step - IMMEDIATE
                return _Option(seconds + step if self.known is None else price, queue, first - queue.free_at, True)
        start = max(queue.free_at, engine.tolerates_from(seconds))
        whole = start + seconds + engine.decode_seconds(request.arrival)
        if start + seconds > request.deadline or whole > request.due or (idle and start <= queue.free_at):
            return None
        price = seconds + step + WAIT * (start - now) if self.known is None else start + seconds
        return _Option(price, queue, start + seconds - queue.free_at, False)

    def _postpone(self, request: PlannedRequest, queues: Sequence[_EngineQueue]) -> PlannedRequest:
        """The longest planned request, if `request` can then be in time; otherwise `request`."""
        longest: tuple[float, PlannedRequest, _EngineQueue, float] | None = None
        for queue in queues:
            seconds = queue.engine.prefill(request.arrival.prompt_tokens, self.hit(request, queue.engine))[0]
            for other, took in queue.planned:
                in_time = took > seconds and queue.free_at - took + seconds <= request.deadline
                if in_time and (longest is None or took > longest[0]):
                    longest = took, other, queue, seconds
        if longest is None:
            return request
        took, other, queue, seconds = longest
        queue.remove(other, took)
        queue.add(request, seconds)
        return other
