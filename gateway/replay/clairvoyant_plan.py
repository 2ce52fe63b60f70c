"""Plans of the clairvoyant scheduler for the engines of one pool: earliest deadline first, and who is postponed.

Moore and Hodgson (1968), extended to several machines: requests are planned in order of their deadlines, each on the
engine that would finish it first. When one would be late, the planned request with the longest service time is
postponed.
ExactEngine knows exact service times; only the noise of the next steps is unknown.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from backends.simulated.kv_cache import PrefixCache
from backends.simulated.profiles import RequestId
from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.sim_fleet import SimFleet
from gateway.replay.traces import BLOCK, Arrival
from policies.routes.route import Route
from policies.types import FOREVER, Endpoint, Pool

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


class SharedCache(PrefixCache):
    """An engine's cache that holds every block that any engine of the pool ever computed."""

    def __init__(self, capacity: int, known: set[Hashable]) -> None:
        super().__init__(capacity)
        self._known = known

    def match(self, chain: Sequence[Hashable], limit: int) -> int:
        for block in chain[:limit]:
            if block in self._idle:
                self._idle.move_to_end(block)
            elif block in self._known and block not in self._used and self.free:
                self.allocate(1)
                self._idle[block] = None
        return super().match(chain, limit)

    def commit(self, blocks: Sequence[Hashable]) -> None:
        super().commit(blocks)
        self._known.update(blocks)

    def in_use(self, chain: Sequence[Hashable]) -> int:
        """Number of these blocks held by running requests, which need no further room."""
        return sum(block in self._used for block in chain)


@dataclass(slots=True, eq=False)
class ExactAnswer:
    """An answer in progress. `finish`: its end if no prefill intervenes; `slack`: s from there until `due`."""

    tokens: int
    context: int
    due: float
    slack: float = 0.0
    finish: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DecodeState:
    """The decoding of an answer: output tokens left, and tokens in the KV cache."""

    left: int
    context: int
    answer: ExactAnswer


class ExactEngine:
    """Call `refresh` before asking anything, and `invalidate` when `answers` have changed."""

    def __init__(self, endpoint: Endpoint, virtual: VirtualEngine, known: set[Hashable]) -> None:
        self.endpoint = endpoint
        self.virtual = virtual
        self.engine = virtual.engine
        self.profile = self.engine.profile
        self.cache = SharedCache(self.engine.cache.capacity, known)
        self.engine.cache = self.cache
        self.answers: dict[RequestId, ExactAnswer] = {}
        self.clear_at = 0.0  # all prompts sent are computed by then
        self.context = 0  # tokens that its answers attend to
        self._decoding: list[DecodeState] = []  # fewest tokens left first
        self._slacks: list[float] = []  # of the answers that keep their TPOT, ascending
        self._finished_by: list[float] = []  # latest finish of the answers up to the same index of `_slacks`
        self._stale = True

    def invalidate(self) -> None:
        self._stale = True

    def refresh(self) -> None:
        """Computes each answer's end without further prefills, and the stall that the answers tolerate until then."""
        if not self._stale:
            return
        self._stale = False
        generated = dict(self.engine.progress())
        self._decoding = [
            DecodeState(
                answer.tokens - generated.get(key, answer.tokens), answer.context + generated.get(key, 0), answer
            )
            for key, answer in self.answers.items()
        ]
        self._decoding.sort(key=lambda state: state.left)
        self.context = sum(state.context for state in self._decoding)
        for answer, finish in self._finishes(self._decoding, self.virtual.busy_until, 0):
            answer.finish = finish
            answer.slack = answer.due - finish
        kept = sorted((state.answer.slack, state.answer.finish) for state in self._decoding if state.answer.slack >= 0)
        self._slacks = [slack for slack, _ in kept]
        self._finished_by = list(accumulate((finish for _, finish in kept), max))

    # ---------------------------------------------------------------- moments

    def accepts_prompt(self, now: float) -> bool:
        """No prefill remains after the step in progress, and a request sent now joins the next step."""
        ready = self.virtual.busy_until <= now + self.profile.overhead
        return ready and self.engine.alive and not self.engine.backlog

    def free_at(self, now: float) -> float:
        """Earliest start of the prefill of a request sent now."""
        busy = self.virtual.busy_until
        return max(self.clear_at, busy) if self.engine.backlog else max(busy, now + self.profile.overhead)

    def tolerates_from(self, stall: float) -> float:
        """From then on, no answer that keeps its TPOT would lose it to a stall of `stall` seconds."""
        i = bisect_left(self._slacks, stall)
        return self._finished_by[i - 1] if i else 0.0

    # ---------------------------------------------------------------- durations

    def prefill(self, tokens: int, hit: int) -> tuple[float, int]:
        """Seconds and steps to compute the uncached part of a prompt beside the current decodes."""
        profile, rest, decoding = self.profile, tokens - hit, len(self.answers)
        whole, last = divmod(rest, profile.max_num_batched_tokens - decoding)
        ms = whole * profile.fixed_ms(profile.max_num_batched_tokens, decoding + 1)
        ms += profile.fixed_ms(last + decoding, decoding + 1) if last else 0.0
        steps = whole + (last > 0)
        ms += profile.attention_ns * 1e-6 * rest * (hit + rest / 2) + steps * profile.context_us * 1e-3 * self.context
        return ms * 1e-3 * self.engine.slowness, steps

    def compute(self, tokens: int, hit: int) -> float:
        """Seconds that the uncached part of a prompt adds to the steps that compute it."""
        profile, rest = self.profile, tokens - hit
        linear = rest / profile.tokens_per_ms + profile.allreduce_ms * rest
        return (linear + profile.attention_ns * 1e-6 * rest * (hit + rest / 2)) * 1e-3

    def attention(self, context: float) -> float:
        """Seconds that one answer with `context` tokens adds to a step."""
        return (self.profile.sequence_ms + self.profile.context_us * 1e-3 * context) * 1e-3

    def spare(self, tpot: float) -> float:
        """Share of the time left for `compute` and `attention` while answers keep `tpot`, at normal speed."""
        if not self.engine.alive:
            return 0.0
        return max(1 / self.engine.slowness - self.profile.fixed_ms(0, 0) * 1e-3 / tpot, 0.0)

    def decode_step(self, sequences: int, context: float) -> float:
        """Seconds of a step without prefill."""
        fixed = self.profile.fixed_ms(sequences, sequences)
        return (fixed + self.profile.context_us * 1e-3 * context) * 1e-3 * self.engine.slowness

    def first_token(self, arrival: Arrival, hit: int, tpot: float, now: float) -> float | None:
        """Time of the first token if the request were sent now; None if any answer, its own included, would miss
        its TPOT because of it."""
        if not self._has_room(arrival, hit):
            return None
        seconds, steps = self.prefill(arrival.prompt_tokens, hit)
        first, left = self.free_at(now) + seconds, arrival.output_tokens - 1
        due = FOREVER if tpot == FOREVER else first + tpot * left
        joined = list(self._decoding)
        own = ExactAnswer(arrival.output_tokens, arrival.prompt_tokens, due)
        insort(joined, DecodeState(left + steps, arrival.prompt_tokens - steps, own), key=lambda state: state.left)
        if any(finish > answer.due and answer.slack >= 0 for answer, finish in self._finishes(joined, first, steps)):
            return None
        return first

    def _has_room(self, arrival: Arrival, hit: int) -> bool:
        """The request would neither wait inside the engine nor preempt another."""
        size = self.profile.block_size
        needed = (arrival.prompt_tokens + arrival.output_tokens) // size + 1
        return needed - self.cache.in_use(arrival.hashes[: hit // size]) <= self.cache.free

    def _finishes(self, decoding: Sequence[DecodeState], at: float, steps: int) -> Iterator[tuple[ExactAnswer, float]]:
        """Each answer's end, if all have `steps` more tokens at `at` and no prefill follows."""
        count = len(decoding)
        context = float(sum(state.context for state in decoding) + steps * count)
        done = steps
        for state in decoding:
            if (more := state.left - done) > 0:
                at += more * self.decode_step(count, context + count * more / 2)
                context += count * more
                done = state.left
            yield state.answer, at
            context -= state.context + state.left
            count -= 1
