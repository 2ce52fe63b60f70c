"""The clairvoyant reference: a scheduler with access to the simulated engines and knowledge of every output length.

The reference replaces the QueueScheduler of a replay, so results can be stated as a share of the reachable. Relaxations
beyond the knowledge and means of any gateway:
- Service times are exact: profile, present slowness, prefill chunks, concurrent decodes. Only the noise of single
  steps (5 %) is unknown.
- Caches are perfect: a prefix computed by one engine of a pool is cached on all of them. With `reference_lru`, each
  engine has what it computed itself and has not evicted, and the reference knows exactly what that is.
- Output lengths are known, and so is the exact slack of each answer before a missed TPOT or total.
- Arrivals of the next seconds are known (`clairvoyant_plan.EngineGroup`).
- Dead engines are known at once, no request hangs, and requests lost before the first token start again; so do answers
  where the route rescues them, on a new TTFT budget, with what was written in their prompts.

Rules:
- Earliest deadline first, from one queue per pool, with late binding: an engine receives the next prompt during the
  last chunk of the previous prompt, so no request waits inside an engine.
- If not all can be in time, the request that needs the most engine time is postponed (Moore and Hodgson 1968): to the
  route's next tier and, after the last tier, until engines are idle.
- If demand exceeds capacity, the requests with the highest cost in engine time are not started.
- A request goes to an engine with a place for its LoRA adapter, and where it is held rather than where it is loaded
  first. Which adapters an engine should hold is not planned.
- No prefill starts that makes an answer miss an otherwise kept TPOT.
- Late requests, and requests without a deadline, go to idle engines that no other request will need soon.

Every relaxation removes work or uncertainty, and for a single machine without TPOT the first two rules maximise the
number of requests in time, so the reference bounds the reachable in practice. A proof is missing: with several machines
and TPOT the plan is a greedy solution of an NP-hard problem. No policy exceeds the reference on the scenarios of
benchmarks/ROUTING.md. `reference_lru` is no bound: it does not plan which prefixes to keep.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence

from lab.engines.virtual_engine import HostedApi, VirtualEngine
from lab.replay.clairvoyant_engine import ExactAnswer, ExactEngine
from lab.replay.clairvoyant_plan import EngineGroup, PlannedRequest
from lab.replay.sim_fleet import Scenario, SimFleet
from lab.traffic.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Tier
from policies.types import FOREVER, Candidate, Decision, Endpoint, Forecast, Placement, RequestView

TICK = 0.015  # s between two decisions while requests with a deadline wait
IDLE_TICK = 0.25  # s, while only requests that are late or have no deadline wait
# Multiples of an API's median TTFT: nine of ten requests meet the former, one of forty the latter.
SAFE, LUCKY = 1.6, 0.5
SLOWER = 1.1  # times an API's median TPOT: five of six answers keep to it

Placed = tuple[Hashable, Decision]


class Clairvoyant:
    """Has the interface of `policies.queue.queue_scheduler.QueueScheduler`, and receives first tokens and ends."""

    def __init__(self, servers: SimFleet, scenario: Scenario, arrivals: Sequence[Arrival]) -> None:
        self.wake_at = FOREVER
        self._servers = servers.servers
        self._arrivals = [*arrivals]
        self._pools = {pool.name: pool for pool in scenario.pools}
        self._groups = {
            pool.name: EngineGroup(pool, servers, arrivals, scenario.routes, scenario.perfect_caches)
            for pool in scenario.pools
            if isinstance(self._servers[pool.endpoints[0].id], VirtualEngine)
        }
        self._new: list[PlannedRequest] = []  # to be offered to a tier
        self._spare: list[PlannedRequest] = []  # late or without a deadline
        self._sent: dict[int, tuple[PlannedRequest, ExactEngine]] = {}  # by number, until the first token
        self._answers: dict[int, tuple[ExactEngine, int]] = {}  # engine and key of the answer, by number

    @property
    def held(self) -> int:
        return len(self._new) + len(self._spare) + sum(len(group.queue) for group in self._groups.values())

    def enter(self, queued: QueuedRequest) -> None:
        """The sequence number counts arrivals from 1."""
        number, route = queued.sequence, queued.route
        arrival = self._arrivals[number - 1]
        tiers = [i for i, tier in enumerate(route.tiers) if self._fits(queued.request, tier, arrival)]
        if route.prefer == "cost":
            tiers.sort(key=lambda i: self._pools[route.tiers[i].pool].price.of(1000, 300))
        request = PlannedRequest(number, arrival, route, queued.deadline, tuple(tiers))
        if queued.deadline == FOREVER and tiers:
            insort(self._spare, request)
        else:
            self._new.append(request)

    def _fits(self, view: RequestView, tier: Tier, arrival: Arrival) -> bool:
        window = self._pools[tier.pool].context_window or FOREVER
        fits = arrival.prompt_tokens + arrival.output_tokens <= window
        return fits and (tier.when is None or not tier.when.refuses(view, arrival.prompt_tokens))

    def on_dispatched(self, number: Hashable) -> None:
        """Nothing to do: `release` has recorded the request."""

    def leave(self, number: Hashable, now: float) -> None:
        """The request has waited too long: with `reference_lru` only."""
        for waiting in (self._new, self._spare, *(group.queue for group in self._groups.values())):
            waiting[:] = [request for request in waiting if request.number != number]
        if not self.held:
            self.wake_at = FOREVER

    def on_first_token(self, number: int, key: int, now: float) -> None:
        """`key`: the engine's name of the request."""
        if (sent := self._sent.pop(number, None)) is not None:
            (request, engine), tokens = sent, self._arrivals[number - 1].output_tokens
            due = min(now + request.tpot * max(tokens - 1, 1), request.due)
            engine.answers[key] = ExactAnswer(tokens, request.arrival.prompt_tokens, due)
            engine.stale = True
            self._answers[number] = engine, key

    def on_ended(self, number: int) -> None:
        """The answer has ended, or its engine has died."""
        self._sent.pop(number, None)
        if (found := self._answers.pop(number, None)) is not None:
            engine, key = found
            del engine.answers[key]
            engine.stale = True

    def on_broken(self, number: int, rest: Arrival) -> None:
        """The engine died after the first token; `rest`: what another is to continue, on the budgets of a request."""
        self.on_ended(number)
        self._arrivals[number - 1] = rest

    # ---------------------------------------------------------------- decisions

    def release(self, fleet: Fleet, now: float) -> Iterator[Placed]:
        """Requests to send now. The caller sends each request before asking for the next."""
        pending = {name: group for name, group in self._groups.items() if group.queue}
        while self._new or pending:
            while self._new:
                if (placed := self._offer(self._new.pop(0), pending, now)) is not None:
                    yield placed
            if pending:
                group = pending.pop(next(iter(pending)))
                send, late = group.plan(now)
                for request, engine in send:
                    yield self._send(request, engine, now)
                for request in late:
                    request.at += 1
                self._new += late
        yield from self._fill(now)
        urgent = any(group.queue for group in self._groups.values())
        self.wake_at = now + TICK if urgent else now + IDLE_TICK if self._spare else FOREVER

    def _offer(self, request: PlannedRequest, pending: dict[str, EngineGroup], now: float) -> Placed | None:
        """Queues the request at the tier's engines, or sends it to the tier's API; after the last tier, to any API."""
        if not request.tiers:
            return request.number, Decision(Placement.UNFIT, now, request.deadline, scorer="reference")
        while (pool := request.pool) is not None:
            if (group := self._groups.get(pool)) is not None:
                insort(group.queue, request)
                pending[pool] = group
                return None
            if (placed := self._to_api(request, pool, now, SAFE)) is not None:
                return placed
            request.at += 1
        for pool in (request.route.tiers[tier].pool for tier in request.tiers):
            if pool not in self._groups and (placed := self._to_api(request, pool, now, LUCKY)) is not None:
                return placed
        insort(self._spare, request)
        return None

    def _fill(self, now: float) -> Iterator[Placed]:
        """Sends late requests, and requests without a deadline, to engines without coming demand."""
        for group in self._groups.values():
            if group.queue or not self._spare or group.limit(now) < FOREVER:
                continue
            ready = [engine for engine in group.engines if engine.accepts_prompt(now)]
            reserved = max(len(group.engines) // 2, 1) if group.upcoming(now) else 0
            for engine in sorted(ready, key=lambda engine: engine.context)[: max(len(ready) - reserved, 0)]:
                if (request := self._filling(group, engine, now)) is not None:
                    self._spare.remove(request)
                    yield self._send(request, engine, now)

    def _filling(self, group: EngineGroup, engine: ExactEngine, now: float) -> PlannedRequest | None:
        engine.refresh()
        for request in self._spare:
            # Without a deadline, a request can wait for the preferred tier.
            tiers = request.tiers if request.deadline < FOREVER else request.tiers[:1]
            accepted = any(request.route.tiers[tier].pool == group.pool.name for tier in tiers)
            hit, adapter = group.hit(request, engine), group.adapter(request)
            if not accepted or hit < group.best_hit(request) or not engine.has_place(adapter):
                continue
            if engine.first_token(request.arrival, hit, request.tpot, now, engine.loading(adapter)) is not None:
                return request
        return None

    # ---------------------------------------------------------------- sending

    def _send(self, request: PlannedRequest, engine: ExactEngine, now: float) -> Placed:
        group = self._groups[engine.endpoint.pool]
        hit = group.hit(request, engine)
        seconds = engine.prefill(request.arrival.prompt_tokens, hit)[0] + engine.loading(group.adapter(request))
        engine.clear_at = engine.free_at(now) + seconds
        self._sent[request.number] = request, engine
        return request.number, _decision(request, engine.endpoint, hit, engine.clear_at - now, now)

    def _to_api(self, request: PlannedRequest, pool: str, now: float, factor: float) -> Placed | None:
        """Sends the request if `factor` times the API's median TTFT is in time."""
        for endpoint in self._pools[pool].endpoints:
            server = self._servers[endpoint.id]
            if isinstance(server, HostedApi) and server.alive and server.remaining(now) > 0:
                median = server.profile.ttft + server.profile.ttft_per_token * request.arrival.prompt_tokens
                decode_s = server.profile.tpot * SLOWER * (request.arrival.output_tokens - 1)
                if now + factor * median <= min(request.deadline, request.due - decode_s):
                    return request.number, _decision(request, endpoint, 0, median, now)
        return None


def _decision(request: PlannedRequest, endpoint: Endpoint, hit: int, ttft: float, now: float) -> Decision:
    tier = next(i for i, tier in enumerate(request.route.tiers) if tier.pool == endpoint.pool)
    candidate = Candidate(endpoint, tier, request.arrival.prompt_tokens, hit, Forecast(ttft), 1.0, 0.0)
    return Decision(Placement.PLACE, now, request.deadline, (candidate,), scorer="reference")
