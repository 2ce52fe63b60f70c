"""One simulated gateway process: queue, decisions and attempts, with virtual time and simulated servers for sockets.

The decision code is the gateway's own (`policies.queue`, `policies.attempts.attempt_machine`, the retry and hedge
budgets), and the fleet is informed of the same events at the same times. With the clairvoyant reference, a request
enters the queue again after a lost attempt, because the decision ranks a single candidate.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from lab.engines.engine_events import EngineFirstToken, EngineRequest, Event, Finished, Refused
from lab.replay.clairvoyant import Clairvoyant
from lab.replay.results import ReplayOutcome, RequestResult, Results
from lab.replay.sim_fleet import OURS, Clock, Scenario, SimFleet
from lab.replay.sim_kv_events import SimKvEvents
from lab.scorers.research_scorers import REPLAY_SCORERS
from lab.traffic.traces import Arrival
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.attempts.wire import AttemptLimits, Failed, Wire
from policies.blame.blame import BLAME, Elsewhere
from policies.fleet.fleet import AttemptReport, Fleet
from policies.fleet.observations import LINGER
from policies.fleet.peers import PeerLink
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import QueuedRequest
from policies.queue_parts import queue_parts
from policies.rescue.successors import RESCUE_ATTEMPT, able, in_order
from policies.routes.route import Route
from policies.routing.decide import LONGEST_WAIT
from policies.routing.prompt_counts import uncached_tokens
from policies.scorers.scorers import tie_break
from policies.types import (
    FOREVER,
    Attempt,
    AttemptKind,
    AttemptOutcome,
    Candidate,
    Decision,
    FirstTokenOutlook,
    Placement,
    PoolEstimate,
    PrefixBlocks,
    PromptEstimate,
    Quantiles,
    RequestView,
)

ATTEMPTS = 16  # attempt keys per request


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    candidate: Candidate
    sent_at: float


@dataclass(slots=True)
class ActiveRequest:
    """A request in progress."""

    number: int
    arrival: Arrival
    route: Route
    estimate: PromptEstimate
    result: RequestResult
    entered_at: float  # arrival, or the last return after a refusal
    decision: Decision | None = None
    machine: AttemptMachine | None = None
    open: dict[int, OpenAttempt] = field(default_factory=dict)  # by attempt number
    won: int = 0
    written: int = 0  # tokens of the answer, by attempts that broke
    wake_at: float = FOREVER

    def key(self, attempt: int) -> int:
        return self.number * ATTEMPTS + attempt

    @property
    def left(self) -> Arrival:
        """Request to a peer after a break: the prompt with the answer so far, and the rest of the answer. Of the
        latter no block is known, as another sample has other words."""
        if not self.written:
            return self.arrival
        prompt, rest = self.arrival.prompt_tokens + self.written, max(self.arrival.output_tokens - self.written, 1)
        return replace(self.arrival, prompt_tokens=prompt, output_tokens=rest, answer_hashes=())


class SimWire(Wire):
    """Attempts of one request in virtual time. A hedge would take the place of a request in the queue; no answer is
    looked at once it has begun."""

    def __init__(self, gateway: SimGateway, request: ActiveRequest) -> None:
        self._gateway = gateway
        self._request = request

    def open(self, attempt: Attempt) -> None:
        self._gateway.open(self._request, attempt)

    def cancel(self, number: int, outcome: AttemptOutcome) -> None:
        self._gateway.cancel(self._request, number, outcome)

    def commit(self, number: int, *, was_kept: bool = False) -> None:
        self._request.won = number

    def give_up(self, reason: str, *, unasked: bool = False) -> None:
        self._gateway.close(self._request, ReplayOutcome.BROKEN if self._request.written else ReplayOutcome.LOST)

    def wake(self, at: float) -> None:
        self._gateway.wake(self._request, at)

    def is_saturated(self) -> bool:
        return bool(self._gateway.queue.held)

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        fleet, request, endpoint = self._gateway.fleet, self._request, upcoming.endpoint
        load, prompt = fleet.snapshot(now).loads.get(endpoint.id), request.estimate.pools[endpoint.pool]
        known = fleet.view.outlook(request.key(attempt.number), upcoming, load, prompt, now)
        return super().outlook(attempt, sent_at, upcoming, now) if known is None else known


class DecisionOverride:
    """Decisions in place of those of the gateway; the base class replaces none."""

    def on_entry(self, request: ActiveRequest) -> Decision | None:
        """Decision for a request before the queue; None: the request enters the queue."""
        return None

    def on_refusal(self, request: ActiveRequest, refusal: Decision) -> Decision:
        return refusal


class SimGateway:
    """`on_ended` is called with the number of each request at its end, whatever the end.

    `peers`: link to the other gateway processes, where there are several.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        servers: SimFleet,
        results: Results,
        arrivals: Sequence[Arrival],
        on_ended: Callable[[int], None],
        peers: PeerLink | None = None,
    ) -> None:
        self._on_ended = on_ended
        self.scenario = scenario
        self.clock = clock
        self.servers = servers
        self.results = results
        self.fleet = Fleet(scenario.pools)
        self.fleet.peers = peers
        self.fleet.request_learning = lambda: clock.at(clock.now + LINGER, self.fleet.learn)
        self._kv_events = SimKvEvents(scenario, servers, self.fleet)
        self.clairvoyant = Clairvoyant(servers, scenario, arrivals) if scenario.clairvoyant else None
        self.queue = self.clairvoyant or QueueScheduler(queue_parts(), REPLAY_SCORERS)
        self.active: dict[int, ActiveRequest] = {}
        self.override = DecisionOverride()
        self.racing: set[int] = set()  # requests with several attempts, or with a cancellation in transit
        self._retries = RetryBudget()
        self._hedges = {name: HedgeBudget(route.hedge_share) for name, route in scenario.routes.items()}
        self._pools = {pool.name: pool for pool in scenario.pools}

    # ---------------------------------------------------------------- queue and decisions

    def arrive(self, number: int, arrival: Arrival) -> None:
        route, now = self.scenario.routes[arrival.route], self.clock.now
        result = RequestResult(number, route.name, now, arrival.prompt_tokens, arrival.output_tokens, arrival.tenant)
        result.new_tokens = self.results.new_tokens(arrival)
        result.session = arrival.session
        result.stream = arrival.stream
        self.results.requests.append(result)
        estimate = self._estimate(arrival, route, result)
        request = self.active[number] = ActiveRequest(number, arrival, route, estimate, result, now)
        if arrival.leaves is not None:
            self.clock.at(now + arrival.leaves, self._leave, number)
        self._enter(request)

    def _enter(self, request: ActiveRequest) -> None:
        if (decision := self.override.on_entry(request)) is not None:
            self.on_decision(request, decision)
            return
        self._enqueue(request)
        limit = self.scenario.queue_limit if request.route.ttft else request.route.by or FOREVER
        if request.decision is None and limit < FOREVER:
            self.clock.at(request.entered_at + limit, self._on_queue_timeout, request.number, request.entered_at)

    def _estimate(self, arrival: Arrival, route: Route, result: RequestResult) -> PromptEstimate:
        expected = self.fleet.answer_lengths.expected_output(route.name, route.output_cap(arrival.max_tokens))
        estimate = estimate_of(arrival, route, expected)
        if not route.budget_grows:
            return estimate
        if self.clairvoyant is not None:
            return replace(estimate, uncached_tokens=result.new_tokens)
        view, fleet = RequestView(result.arrived, stream=True), self.fleet.snapshot(self.clock.now)
        return replace(estimate, uncached_tokens=uncached_tokens(view, route, estimate, fleet, self.fleet.view.hit))

    def _enqueue(self, request: ActiveRequest) -> None:
        arrival, tenant = request.arrival, request.arrival.tenant
        view = RequestView(request.entered_at, stream=arrival.stream, max_tokens=arrival.max_tokens)
        weight = self.scenario.weights.get(tenant, 1.0)
        route, tokens = request.route, self._answer_tokens(request)
        queued = QueuedRequest(
            *(request.number, view, request.estimate, route, request.number),
            tenant=tenant,
            weight=weight,
            answer_tokens=tokens,
            decode_s=self.fleet.view.decode_seconds(route, tokens) if tokens else 0.0,
        )
        self.queue.enter(queued)
        self.dispatch_queued()

    def _answer_tokens(self, request: ActiveRequest) -> Quantiles:
        arrival, route = request.arrival, request.route
        if not route.weighs_completion:
            return ()
        return self.fleet.answer_lengths.quantiles(route.name, route.output_cap(arrival.max_tokens), *_kind(arrival))

    def dispatch_queued(self) -> None:
        if self.queue.held:
            for number, decision in self.queue.release(self.fleet, self.clock.now):
                assert isinstance(number, int)
                self.on_decision(self.active[number], decision)

    def _on_queue_timeout(self, number: int, entered_at: float) -> None:
        request = self.active.get(number)
        if request is None or request.decision is not None or request.machine is not None:
            return
        if request.entered_at == entered_at:
            self.queue.leave(number, self.clock.now)
            self._shed(request, LONGEST_WAIT)

    def _leave(self, number: int) -> None:
        """The caller leaves, unless the first token is there."""
        request = self.active.get(number)
        if request is None or request.result.first_at is not None:
            return
        if request.decision is None:
            self.queue.leave(number, self.clock.now)
        for attempt in list(request.open):
            self.cancel(request, attempt, AttemptOutcome.CANCELLED)
        self.close(request, ReplayOutcome.LEFT)

    def on_decision(self, request: ActiveRequest, decision: Decision) -> None:
        if decision.outcome is not Placement.PLACE:
            decision = self.override.on_refusal(request, decision)
        request.decision = decision
        if decision.outcome is not Placement.PLACE:
            return self._shed(request, decision.retry_after)
        if self.scenario.pooled:
            decision = _without_tiers(decision, request.number)
        if self.scenario.scorer != OURS:  # baselines do not abandon silent attempts: that is part of our policy
            decision = replace(decision, deadline=FOREVER)
        request.decision = decision
        limits = AttemptLimits(
            max_attempts=request.route.max_attempts,
            hedge=request.route.hedge != "off",
            first_token_limit=self.scenario.first_token_limit,
            recovers=request.route.rescue == "on",
        )
        hedges, now = self._hedges[request.route.name], self.clock.now
        request.machine = AttemptMachine(decision, limits, self._retries, hedges, SimWire(self, request), now=now)
        return request.machine.begin(now)

    def _shed(self, request: ActiveRequest, retry_after: float) -> None:
        now, result = self.clock.now, request.result
        self.queue.on_dispatched(request.number)
        result.refusals.append(now - request.entered_at)
        if retry_after and len(result.refusals) <= self.scenario.returns:
            self.clock.at(now + retry_after, self._come_back, request)
        else:
            self.close(request, ReplayOutcome.SHED)

    def _come_back(self, request: ActiveRequest) -> None:
        """The caller sends the refused request again."""
        request.entered_at = request.result.returned_at = self.clock.now
        request.decision = None
        request.estimate = self._estimate(request.arrival, request.route, request.result)
        self._enter(request)

    # ---------------------------------------------------------------- calls of the wire

    def wake(self, request: ActiveRequest, at: float) -> None:
        if at not in (request.wake_at, FOREVER):
            request.wake_at = at
            self.clock.at(at, self._on_timer, request.number, at)

    def open(self, request: ActiveRequest, attempt: Attempt) -> None:
        candidate, now = attempt.candidate, self.clock.now
        endpoint, key, arrival = candidate.endpoint, request.key(attempt.number), request.left
        request.open[attempt.number] = OpenAttempt(candidate, now)
        if request.result.dispatched_at is None:
            request.result.dispatched_at = now
        request.result.attempts += 1
        request.result.hedges += attempt.kind is AttemptKind.HEDGE
        if len(request.open) > 1:
            self.racing.add(request.number)
        prompt, route = request.estimate.pools[endpoint.pool], request.route
        if request.written:
            prompt = replace(prompt, tokens=arrival.prompt_tokens)
        output = request.estimate.output_tokens
        pace = route.tpot_budget(None)
        session = self._kv_events.session(key)
        self.fleet.on_sent(
            key, candidate, prompt, now, arrival.stream, tpot_budget=pace, output=output, session=session, route=route
        )
        self.queue.on_dispatched(request.number)
        try:
            hashes, adapter = prompt.blocks.hashes, prompt.variant
            sizes = arrival.prompt_tokens, arrival.output_tokens
            sent = EngineRequest(key, *sizes, hashes, arrival.answer_hashes, adapter)
            self.servers.submit(endpoint.id, sent, now)
        except Refused as refused:
            self.clock.at(now, self._on_refused, key, refused)
        except ValueError:
            self.clock.at(now, self._on_refused, key, Refused(400, "too long"))

    def cancel(self, request: ActiveRequest, number: int, outcome: AttemptOutcome) -> None:
        """The cancellation reaches the engine after `overhead` seconds, as a request does."""
        opened, key, now = request.open.pop(number), request.key(number), self.clock.now
        endpoint = opened.candidate.endpoint.id
        self.results.prefilled(endpoint, opened.sent_at, now)
        self.racing.add(request.number)
        self.clock.at(now + self.servers.overhead, self._abort, request.number, endpoint, key)
        self.fleet.on_ended(key, outcome, now)

    def _abort(self, number: int, endpoint: str, key: int) -> None:
        self.servers.abort(endpoint, key)
        request = self.active.get(number)
        if request is None or len(request.open) < 2:
            self.racing.discard(number)

    def _on_timer(self, number: int, due: float) -> None:
        request = self.active.get(number)
        if request is None or request.machine is None or request.wake_at != due or request.won:
            return
        request.wake_at = FOREVER
        request.machine.look(self.clock.now)

    # ---------------------------------------------------------------- events of the servers

    def _waiting(self, key: int) -> ActiveRequest | None:
        """The request of an open attempt."""
        request = self.active.get(key // ATTEMPTS)
        return request if request is not None and key % ATTEMPTS in request.open else None

    def on_event(self, event: Event) -> None:
        attempt = int(event.id) % ATTEMPTS
        if (request := self._waiting(int(event.id))) is None:
            return
        self._kv_events.hear(request.open[attempt].candidate.endpoint.id)
        if isinstance(event, EngineFirstToken):
            self._on_first_token(request, attempt, event)
        else:
            self._on_finished(request, attempt, event)

    def _on_first_token(self, request: ActiveRequest, attempt: int, event: EngineFirstToken) -> None:
        opened, now = request.open[attempt], self.clock.now
        candidate, result, decision = opened.candidate, request.result, request.decision
        self.fleet.on_first_token(request.key(attempt), now)
        self.results.prefilled(candidate.endpoint.id, opened.sent_at, now)
        if self.clairvoyant is not None:
            self.clairvoyant.on_first_token(request.number, request.key(attempt), now)
        assert request.machine is not None
        if request.written:
            return request.machine.first_token(attempt, now)
        assert decision is not None
        result.first_at = now
        result.sent_at = opened.sent_at
        result.endpoint, result.pool = candidate.endpoint.id, candidate.endpoint.pool
        result.tier = candidate.tier
        result.external = not self._pools[candidate.endpoint.pool].local
        result.cached = event.cached_tokens
        if self.clairvoyant is None:
            result.p50 = candidate.forecast.p50
            result.p90 = candidate.forecast.p90
            if (completion := decision.completion(candidate)) is not None:
                result.total_p50, result.total_p90 = completion.p50, completion.p90
            others = (other.forecast.p50 for other in decision.ranked if other.endpoint != candidate.endpoint)
            result.alternative = min(others, default=None)
        self.results.answered(result, decision, request.estimate)
        request.machine.first_token(attempt, now)
        request.decision = None
        return None

    def _on_finished(self, request: ActiveRequest, attempt: int, event: Finished) -> None:
        result, arrival = request.result, request.arrival
        pool = self._pools[request.open.pop(attempt).candidate.endpoint.pool]
        result.ended_at = self.clock.now  # for the TPOT of the report
        cached = result.cached if pool.local else None
        reported = AttemptReport(arrival.prompt_tokens, cached, event.output_tokens, result.tpot)
        if request.written:
            reported = AttemptReport()
        self.fleet.on_ended(request.key(attempt), AttemptOutcome.COMPLETED, self.clock.now, reported)
        self.fleet.answer_lengths.observe_output(
            result.route, request.written + event.output_tokens, *_kind(arrival), under_p90=result.is_under_total_p90
        )
        result.cost = pool.price.of(arrival.prompt_tokens, event.output_tokens)
        self.close(request, ReplayOutcome.COMPLETED)

    def on_engine_death(self, key: int, written: int) -> None:
        """The engine of this attempt died, after so many tokens of the answer."""
        attempt = key % ATTEMPTS
        if (request := self._waiting(key)) is None:
            return
        if request.won == attempt:
            broken = request.open.pop(attempt).candidate
            self.fleet.on_ended(key, AttemptOutcome.BROKEN, self.clock.now, AttemptReport())
            self._break_off(request, broken, max(written, 1))
        else:
            self._fail(request, Failed(attempt, BLAME["reset"], accepted=True))

    def _break_off(self, request: ActiveRequest, broken: Candidate, written: int) -> None:
        """A peer that is up continues the answer, on a route with `rescue`."""
        if request.route.rescue == "off":
            return self.close(request, ReplayOutcome.BROKEN)
        request.won = 0
        request.written += written
        if self.clairvoyant is not None:
            self.clairvoyant.on_broken(request.number, request.left)
            request.entered_at = self.clock.now
            request.decision = None
            return self._enqueue(request)
        assert request.machine is not None
        others = self._peers(request, request.machine.others(), broken)
        if not request.machine.broken(BLAME["reset"], others, self.clock.now, RESCUE_ATTEMPT):
            self.close(request, ReplayOutcome.BROKEN)
        return None

    def _peers(self, request: ActiveRequest, others: Sequence[Candidate], broken: Candidate) -> list[Candidate]:
        """Those that are up, in order; of those that can bear another prefill the forecast as of now tells."""
        now, view, pools = self.clock.now, self.fleet.view, request.estimate.pools
        loads = self.fleet.snapshot(now).loads
        found = able(others, loads, lambda endpoint: "")
        ttfts = {
            each.id: view.continuation_ttft(each.id, loads[each.id], pools[each.pool], request.written, now)
            for each in (candidate.endpoint for candidate in found)
            if loads[each.id].tpot_pressure < 1
        }
        return in_order(broken.endpoint, found, ttfts)

    def _on_refused(self, key: int, refused: Refused) -> None:
        blame = BLAME[{0: "connect", 400: "client", 429: "rate_limited"}.get(refused.status, "overloaded")]
        if (request := self._waiting(key)) is not None:
            self._fail(request, Failed(key % ATTEMPTS, blame, refused.retry_after))

    def _fail(self, request: ActiveRequest, failure: Failed) -> None:
        opened, blame = request.open.pop(failure.number), failure.blame
        self.results.prefilled(opened.candidate.endpoint.id, opened.sent_at, self.clock.now)
        connected = failure.accepted or blame.kind not in ("connect", "reset")
        reported = AttemptReport(retry_after=failure.retry_after, connected=connected, blame=blame)
        self.fleet.on_ended(request.key(failure.number), blame.outcome, self.clock.now, reported)
        if self.clairvoyant is not None and blame.elsewhere is not Elsewhere.NOWHERE:
            self.clairvoyant.on_ended(request.number)
            request.decision = None
            return self._enqueue(request)
        assert request.machine is not None
        return request.machine.failed(failure, self.clock.now)

    def close(self, request: ActiveRequest, end: ReplayOutcome) -> None:
        request.result.end = end
        request.result.ended_at = self.clock.now
        del self.active[request.number]
        if self.clairvoyant is not None:
            self.clairvoyant.on_ended(request.number)
        self._on_ended(request.number)


def estimate_of(arrival: Arrival, route: Route, output_tokens: int) -> PromptEstimate:
    """The gateway's estimate, given an exact token count."""
    hashes = arrival.hashes if isinstance(arrival.hashes, array) else array("Q", arrival.hashes)
    pool = PoolEstimate(arrival.prompt_tokens, PrefixBlocks(hashes, arrival.block), arrival.prompt_tokens)
    pools = {tier.pool: pool for tier in route.tiers}
    for name, adapter in route.variants.items():
        seed = crc32(adapter.encode()) << 32  # adapters share no block
        own = PrefixBlocks(array("Q", [block ^ seed for block in hashes]), arrival.block)
        pools[name] = replace(pool, blocks=own, variant=adapter)
    return PromptEstimate(pools, output_tokens)


def _kind(arrival: Arrival) -> tuple[str, str, int]:
    """Class of the answer within its route: effort of reasoning, tenant, and head of the prompt."""
    return "", arrival.tenant, next(iter(arrival.hashes), 0)


def _without_tiers(decision: Decision, seed: int) -> Decision:
    """All endpoints of all tiers in one order, for scores that are comparable between pools."""
    ranked = sorted(decision.ranked, key=lambda candidate: (-candidate.value, tie_break(seed, candidate.endpoint.id)))
    return replace(decision, ranked=tuple(ranked))
