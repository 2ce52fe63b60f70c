"""Plans of the clairvoyant scheduler for the engines of one pool: earliest deadline first, and postponed requests.

Moore and Hodgson (1968), extended to several machines: requests are planned in order of their deadlines, each on the
engine that would finish first. When a request would be late, the planned request with the longest service time is
postponed. `ExactEngine` knows exact service times; only the noise of the next steps is unknown.
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
IMMEDIATE = 1e6  # s: prefers any engine ready now over any other


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
    """An answer in progress. `left` and `context` are as of the last `ExactEngine.refresh`, as the two below.

    `finish`: the end if no prefill intervenes; `slack`: s from there until `due`.
    """

    tokens: int
    prompt: int
    due: float
    left: int = 0  # output tokens
    context: int = 0  # tokens in the KV cache
    slack: float = 0.0
    finish: float = 0.0


class ExactEngine:
    """Call `refresh` before asking anything, and set `stale` when `answers` have changed."""

    def __init__(self, endpoint: Endpoint, virtual: VirtualEngine, known: set[Hashable]) -> None:
        self.endpoint = endpoint
        self.virtual = virtual
        self.engine = virtual.engine
        self.profile = self.engine.profile
        self.cache = SharedCache(self.engine.cache.capacity, known)
        self.engine.cache = self.cache
        self.answers: dict[RequestId, ExactAnswer] = {}
        self.stale = True
        self.clear_at = 0.0  # all prompts sent are computed by then
        self.context = 0  # tokens that the answers attend to
        self._decoding: list[ExactAnswer] = []  # fewest tokens left first
        self._slacks: list[float] = []  # of the answers within their TPOT, ascending
        self._finished_by: list[float] = []  # latest finish of the answers up to the same index of `_slacks`

    def refresh(self) -> None:
        """Computes each answer's end without further prefills, and the stall tolerated until then."""
        if not self.stale:
            return
        self.stale = False
        generated = dict(self.engine.progress())
        for key, answer in self.answers.items():
            answer.left = answer.tokens - generated.get(key, answer.tokens)
            answer.context = answer.prompt + generated.get(key, 0)
        self._decoding = sorted(self.answers.values(), key=lambda answer: answer.left)
        self.context = sum(answer.context for answer in self._decoding)
        for answer, finish in self._finishes(self._decoding, self.virtual.busy_until, 0):
            answer.finish = finish
            answer.slack = answer.due - finish
        kept = sorted((answer.slack, answer.finish) for answer in self._decoding if answer.slack >= 0)
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
        """Time from which a stall of `stall` seconds makes no answer miss a kept TPOT."""
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

    def cost(self, arrival: Arrival, hit: int) -> float:
        """Seconds of engine time that a request takes from all others: prefill, and own context in every step."""
        profile, rest = self.profile, arrival.prompt_tokens - hit
        linear = rest / profile.tokens_per_ms + profile.allreduce_ms * rest
        compute = (linear + profile.attention_ns * 1e-6 * rest * (hit + rest / 2)) * 1e-3
        context = arrival.prompt_tokens + arrival.output_tokens / 2
        return compute + arrival.output_tokens * ((profile.sequence_ms + profile.context_us * 1e-3 * context) * 1e-3)

    def spare(self, tpot: float) -> float:
        """Share of the time left for `cost` while answers keep `tpot`, at normal speed."""
        if not self.engine.alive:
            return 0.0
        return max(1 / self.engine.slowness - self.profile.fixed_ms(0, 0) * 1e-3 / tpot, 0.0)

    def decode_step(self, sequences: int, context: float) -> float:
        """Seconds of a step without prefill."""
        fixed = self.profile.fixed_ms(sequences, sequences)
        return (fixed + self.profile.context_us * 1e-3 * context) * 1e-3 * self.engine.slowness

    def first_token(self, arrival: Arrival, hit: int, tpot: float, now: float) -> float | None:
        """Time of the first token if the request were sent now.

        None if the request would wait inside the engine or preempt another, or would make any answer, the own
        included, miss a TPOT.
        """
        size = self.profile.block_size
        blocks = (arrival.prompt_tokens + arrival.output_tokens) // size + 1
        if blocks - self.cache.in_use(arrival.hashes[: hit // size]) > self.cache.free:
            return None
        seconds, steps = self.prefill(arrival.prompt_tokens, hit)
        first, left = self.free_at(now) + seconds, arrival.output_tokens - 1
        due = FOREVER if tpot == FOREVER else first + tpot * left
        own = ExactAnswer(
            arrival.output_tokens, arrival.prompt_tokens, due, left + steps, arrival.prompt_tokens - steps
        )
        joined = list(self._decoding)
        insort(joined, own, key=lambda answer: answer.left)
        if any(finish > answer.due and answer.slack >= 0 for answer, finish in self._finishes(joined, first, steps)):
            return None
        return first

    def _finishes(self, decoding: Sequence[ExactAnswer], at: float, steps: int) -> Iterator[tuple[ExactAnswer, float]]:
        """Each answer's end, if all have `steps` more tokens at `at` and no prefill follows."""
        count = len(decoding)
        context = float(sum(answer.context for answer in decoding) + steps * count)
        done = steps
        for answer in decoding:
            if (more := answer.left - done) > 0:
                at += more * self.decode_step(count, context + count * more / 2)
                context += count * more
                done = answer.left
            yield answer, at
            context -= answer.context + answer.left
            count -= 1


# ---------------------------------------------------------------- plans


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

    def __init__(self, pool: Pool, servers: SimFleet, arrivals: Sequence[Arrival], routes: Mapping[str, Route]) -> None:
        self.pool = pool
        self.queue: list[PlannedRequest] = []
        self.known = set[Hashable]()
        found = ((endpoint, servers.servers[endpoint.id]) for endpoint in pool.endpoints)
        self.engines = [ExactEngine(e, server, self.known) for e, server in found if isinstance(server, VirtualEngine)]
        first_tier = [route for route in routes.values() if route.ttft and route.tiers[0].pool == pool.name]
        self._routes = {route.name: route for route in first_tier}
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
            hit = min(new * BLOCK, (arrival.prompt_tokens - 1) // BLOCK * BLOCK)
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

    def hit(self, request: PlannedRequest) -> int:
        """Cached tokens of the prompt."""
        hashes, blocks = request.arrival.hashes, request.hits.get(self.pool.name, 0)
        most = min(len(hashes), (request.arrival.prompt_tokens - 1) // BLOCK)
        while blocks < most and hashes[blocks] in self.known:
            blocks += 1
        request.hits[self.pool.name] = blocks
        return blocks * BLOCK

    def plan(self, now: float) -> tuple[list[tuple[PlannedRequest, ExactEngine]], list[PlannedRequest]]:
        """Requests to send now, each with an engine, and requests to postpone. Both leave the queue."""
        queues = []
        for engine in self.engines:
            if engine.engine.alive:
                engine.refresh()
                queues.append(_EngineQueue(engine, engine.free_at(now), engine.accepts_prompt(now)))
        hits = [self.hit(request) for request in self.queue]
        costs = [self.engines[0].cost(request.arrival, hit) for request, hit in zip(self.queue, hits, strict=True)]
        limit = self.limit(now, costs)
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
        """The longest planned request, if `request` can then be in time; otherwise `request`."""
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
        queue.add(request, seconds)
        return other
