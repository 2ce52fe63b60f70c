"""Placement at one moment: decisions that count the queues, and endpoints with room.

Rules:
- The work ahead in the queues (`policies.queue.endpoint_queues`) counts as a wait at the endpoint; so do the seconds
  until the answers can bear another prefill.
- An endpoint has room while the backlog of prefill is at most ROOM seconds and the answers can bear another stall
  (`policies.latency.tpot`). An API always has room.
- A prefill that would cost answers their pace is held while the whole queue of the endpoint has slack, and no request
  is late: each further token makes the answers bear more.
- No request is sent beyond the cap of an endpoint, or before the provider's rate limit lets it pass: it is assigned to
  the endpoint and held. Requests held before it count when its wait is predicted.
- The forecast of when an engine's answers have caught up is unreliable, the forecast of another tier is not. So a
  queued request spills to another tier when better by the forecasts, and at the latest when the other tier can only
  just make the deadline, at RISK of the usual risk.
- A request of a tenant above its share (`policies.queue.fair_share`) counts as late.
- A long late prefill begins only while the pool is calm, and a late request that would wait for too long is refused at
  once (`policies.queue.late_work`), unless the forecast is not trained.
- Late requests go to idle endpoints only. An engine is idle if a prefill there makes no other request miss a deadline
  or pace. An API is idle unless at the rate limit within RATE_LIMIT_WINDOW seconds: then each late request takes a
  place from a request in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from policies.fleet.fleet import Fleet
from policies.fleet.learned_rate_limit import RATE_LIMIT_WINDOW
from policies.latency.tpot import TIME_CONSTANT, expected_tpot_misses
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.fair_share import FairShare
from policies.queue.late_work import LONG, PATIENCE, RefusedRequests, is_calm, is_overdue, patience_left
from policies.routes.route import Route
from policies.routing.candidates import QueuedRequest
from policies.routing.tiers import decide
from policies.types import (
    FOREVER,
    NEVER,
    Candidate,
    Decision,
    Endpoint,
    FleetSnapshot,
    Health,
    Load,
    Placement,
    RejectionKind,
)

ROOM = 0.1  # s of prefill queued inside an engine: enough for the next step
IDLE = 0.01  # s of prefill under which an engine is idle
HARM = 0.03  # expected TPOT misses, above which a prefill is held while there is slack
GAINING = 0.75  # of their TPOT budget: slower answers gain too little on it for holding to help
HARMLESS = 0.3  # expected TPOT misses because of an already late request
HARMLESS_ABOVE_SHARE = 0.01  # the same because of a request of a tenant above its share
LATE = 0.5  # chance below which a request is late
STILL = 0.9  # share of the target with which a request keeps the assigned endpoint
RISK = 0.5  # of 1 - target: waiting until the last moment must not add misses
RECHECK_TIERS = 0.1  # s between two comparisons of a queued request with other tiers
TICK = 0.05  # s between two rounds without events


@dataclass(slots=True)
class PlacementRound:
    """Decisions as of `now`. `rate_limited_until`: the end of each API's latest refusal; `refused`:
    requests that may come back."""

    queues: EndpointQueues
    fleet: Fleet
    now: float
    rate_limited_until: dict[str, float]
    shares: FairShare
    refused: RefusedRequests
    idle: dict[tuple[str, ...], list[Endpoint]] = field(default_factory=dict)  # for a prompt of no tokens, by pools

    # ---------------------------------------------------------------- decisions

    def decide(self, queued: QueuedRequest, ignore_interference: bool = False, behind: float = 0.0) -> Decision:
        """A decision with the queues ahead. `ignore_interference`: as if no engine's answers had to catch up. `behind`:
        more seconds to wait for any engine."""
        snapshot, queues = self.fleet.snapshot_for(queued.request.caller, self.now), self.queues
        if queued.route.scorer == "predicted":
            occupied = queues.in_dispatch or queues.assigned
            ahead = queues.prefill_ahead(queued) if occupied else {}
            limited = occupied and any(load.limits for load in snapshot.loads.values())
            held = queues.held_ahead(queued) if limited else {}
            delayed: dict[str, Load] = {}
            for name, load in snapshot.loads.items():
                wait = ahead.get(name, 0.0)
                if behind and self.fleet.is_local(name):
                    wait += behind
                if load.reopens_in and not ignore_interference:
                    wait += max(load.reopens_in - load.backlog_s, 0.0)
                requests, tokens = held.get(name, (0, 0.0)) if load.limits else (0, 0.0)
                if wait or requests:
                    delayed[name] = replace(load, wait=wait, held_requests=requests, held_tokens=tokens)
            if delayed:
                snapshot = FleetSnapshot(snapshot.at, snapshot.pools, {**snapshot.loads, **delayed})
        return decide(queued, snapshot, self.fleet, self.now)

    def place(self, queued: QueuedRequest) -> Decision | None:
        """The decision of a request dispatched now; None: queued."""
        decision = self.decide(queued)
        chosen = decision.chosen
        if chosen is None:
            return decision
        if self._must_wait(queued, chosen):
            self._assign(queued, decision, chosen)
            return None
        if queued.route.scorer != "predicted" or not self.fleet.is_local(chosen.endpoint.id):
            return decision
        queued.returned |= self.refused.take(queued, self.now)
        if queued.deadline == FOREVER or self.shares.is_over(queued.tenant):
            return self._place_best_effort(queued, decision)
        if chosen.probability < queued.route.target:
            anyway = self.decide(queued, ignore_interference=True)
            if anyway.ranked[0].probability >= queued.route.target or chosen.probability < LATE:
                decision, chosen = anyway, anyway.ranked[0]
            if chosen.probability < LATE:
                return self._place_best_effort(queued, decision)
        return decision if self._assign_or_dispatch(queued, decision, chosen) else None

    def _assign_or_dispatch(self, queued: QueuedRequest, decision: Decision, chosen: Candidate) -> bool:
        """True: dispatched now, as the endpoint has room and no queue. False: assigned."""
        endpoint = chosen.endpoint.id
        self._plan(queued, chosen)
        free = endpoint not in self.queues.assigned and self.has_room(endpoint, chosen.load)
        if (
            free
            and not self._holds(endpoint, (queued,))
            and not (self._may_close(chosen) and self.is_closed(queued, endpoint))
        ):
            return True
        self._assign(queued, decision, chosen)
        return False

    def _plan(self, queued: QueuedRequest, chosen: Candidate) -> None:
        forecast, load = chosen.forecast, chosen.load
        alone = max(forecast.point_estimate - load.wait - load.backlog_s, 0.0)
        queued.prefill_s = forecast.prefill
        queued.send_by = queued.deadline - alone * forecast.ratio(_sure(queued.route))

    def _holds(self, endpoint: str, queue: Sequence[QueuedRequest]) -> bool:
        """The first prefill would cost answers their pace, and waiting helps these: they gain on it, and no request
        is late or would become so."""
        load, first = self.fleet.snapshot(self.now).loads[endpoint], queue[0]
        if first.deadline == FOREVER or expected_tpot_misses(load, first.prefill_s) <= HARM:
            return False
        budget = first.route.tpot_budget(first.request.tpot_budget) or FOREVER
        if load.tpot * (1 - load.prefill_utilization) > GAINING * budget or self.queues.best_effort.late:
            return False
        starts = accumulate((queued.prefill_s for queued in queue), initial=self.now + load.backlog_s + TICK)
        return all(start < queued.send_by for start, queued in zip(starts, queue, strict=False))

    def _assign(self, queued: QueuedRequest, decision: Decision, chosen: Candidate) -> None:
        self._plan(queued, chosen)
        queued.checked_at = self.now
        spill_at = self._or_next_check(self._spill_at(queued, decision, chosen.endpoint.pool))
        limited = queued.route.prefer == "quality" and self._skipped_rate_limited(decision, chosen.tier)
        queued.set_rate_limited(self.now, limited or chosen.load.send_at > self.now)
        self.queues.assign(queued, chosen.endpoint, spill_at, chosen.load.refused_until > self.now)

    def _may_close(self, chosen: Candidate) -> bool:
        """The chosen endpoint has a cap or a rate limit."""
        load = chosen.load
        if load.limits or load.send_at > self.now:
            return True
        return self.fleet.closes and self.fleet.cap(chosen.endpoint.id) is not None

    def _must_wait(self, queued: QueuedRequest, chosen: Candidate) -> bool:
        """No slot or no rate is left at the chosen endpoint, or a request held there comes first."""
        if not self._may_close(chosen):
            return False
        endpoint = chosen.endpoint.id
        queue = self.queues.assigned.get(endpoint)
        return bool(queue and queue[0] < queued) or self.is_closed(queued, endpoint)

    def _spill_at(self, queued: QueuedRequest, decision: Decision, pool: str) -> float:
        """The last moment at which a tier other than `pool` makes the deadline."""
        if len(queued.route.tiers) == 1 or queued.deadline == FOREVER:
            return FOREVER
        others = [
            candidate.forecast.quantile(_sure(queued.route)) + queued.extra_reasoning(candidate.endpoint.pool)
            for candidate in decision.ranked
            if candidate.endpoint.pool != pool
        ]
        return queued.deadline - min(others, default=FOREVER) - TICK

    def _or_next_check(self, at: float) -> float:
        return at if at > self.now else self.now + RECHECK_TIERS

    def _place_best_effort(self, queued: QueuedRequest, decision: Decision) -> Decision | None:
        """Dispatches to an idle endpoint if no other best-effort request is queued; else queues at the end, or refuses
        where the route sheds and those ahead leave no time."""
        self.note_rate_limits()
        preferred = self.best_effort_order(queued, decision)
        queued.prefill_s = min(candidate.forecast.prefill for candidate in preferred)
        if not self.queues.best_effort and (idle := self.first_idle(queued, preferred)) is not None:
            return with_first(decision, idle)
        if queued.route.on_miss == "shed" and queued.deadline < FOREVER:
            shed = self.decide(queued, behind=self._best_effort_ahead(queued, decision))
            if shed.chosen is None:
                return shed
        late = self.queues.best_effort.late_work(queued)
        ahead_s = self.refused.work_ahead(queued, late, self.now)
        starts = not ahead_s and self._starts_within(queued, preferred, PATIENCE)
        may_refuse = not starts and not self._is_guess(preferred)
        if may_refuse and (refusal := self.refused.refuse_new(queued, decision, late, ahead_s, self.now)) is not None:
            return refusal
        queued.set_rate_limited(self.now, self.waits_for_rate_limit(queued, decision, preferred))
        self.queues.best_effort.add(queued, self.now)
        return None

    def overdue(self) -> list[QueuedRequest]:
        """The first of each best-effort queue, where its wait turns out to be too long, even as the next to begin."""
        waiting = self.queues.best_effort
        return [queued for queued in waiting.first() if is_overdue(queued, waiting.late_work(queued), self.now)]

    def refuse_if_certain(self, queued: QueuedRequest) -> Decision | None:
        """A refusal of an overdue request; None: it waits for a prefill in progress alone, or its wait is a guess."""
        late, now = self.queues.best_effort.late_work(queued), self.now
        decision, queued.checked_at = self.decide(queued), now
        order = self.best_effort_order(queued, decision) if decision.ranked else []
        if self._is_guess(order) or self._starts_within(queued, order, patience_left(queued, now)):
            return None
        wait = late.wait(self.refused.work_ahead(queued, late, now), now)
        return self.refused.refuse(queued, decision, wait, now)

    def _best_effort_ahead(self, queued: QueuedRequest, decision: Decision) -> float:
        """Seconds until the engines have taken what the tenant has queued before."""
        engines = sum(self.fleet.is_local(candidate.endpoint.id) for candidate in decision.ranked)
        return self.queues.best_effort.prefill_ahead(queued) / max(engines, 1)

    # ---------------------------------------------------------------- assigned requests

    def revalidate(self, queued: QueuedRequest, endpoint: str) -> Decision | None:
        """Decides again at the head of the queue: the assigned endpoint if still in time."""
        decision = self.decide(queued)
        for candidate in decision.ranked:
            if candidate.endpoint.id == endpoint and candidate.probability >= STILL * queued.route.target:
                return with_first(decision, candidate)
        chosen = decision.chosen
        if chosen is not None and chosen.endpoint.id == endpoint and chosen.probability >= LATE:
            return decision
        return self.place(queued)

    def spill(self, queued: QueuedRequest) -> Decision | None:
        """Moves a request to another tier where better by now; the decision, if dispatched there."""
        assert queued.assigned is not None
        decision, pool, target = self.decide(queued), queued.assigned.pool, queued.route.target
        spill_at = self._spill_at(queued, decision, pool)
        queued.spill_at = self._or_next_check(spill_at)
        if self.now >= spill_at:
            target *= STILL
        elif decision.ranked[0].endpoint.pool == pool:
            return None
        for candidate in decision.ranked:
            if candidate.endpoint.pool != pool and candidate.probability >= target:
                self.queues.unassign(queued)
                dispatched = self._assign_or_dispatch(queued, decision, candidate)
                return with_first(decision, candidate) if dispatched else None
        return None

    def leave_closed(self, queued: QueuedRequest) -> Decision | None:
        """Moves a request held at a closed endpoint to one that is open by now; a refusal where the wait has become too
        long. None: stays."""
        assert queued.assigned is not None
        endpoint = queued.assigned.id
        if not self.is_closed(queued, endpoint) or not (self._another_is_open(queued) or self._begin_check(queued)):
            return None
        decision = self.decide(queued)
        chosen = decision.chosen
        if chosen is not None and (chosen.endpoint.id == endpoint or self._must_wait(queued, chosen)):
            return None
        if chosen is not None and not self.has_room(chosen.endpoint.id, chosen.load):
            return None
        self.queues.unassign(queued)
        return decision

    def _another_is_open(self, queued: QueuedRequest) -> bool:
        snapshot = self.fleet.snapshot_for(queued.request.caller, self.now)
        pools = [snapshot.pools[name] for name in queued.route.pools if name in snapshot.pools]
        return any(
            snapshot.loads[each.id].health is Health.UP and not self.is_closed(queued, each.id)
            for pool in pools
            for each in pool.endpoints
            if each.id in snapshot.loads
        )

    def _begin_check(self, queued: QueuedRequest) -> bool:
        """Notes a decision of the request as of now; False: the last one is younger than RECHECK_TIERS."""
        if self.now - queued.checked_at < RECHECK_TIERS:
            return False
        queued.checked_at = self.now
        return True

    def begin_tier_comparison(self, queued: QueuedRequest) -> bool:
        """Notes a comparison as of now; False: no other tier exists, or the last one is younger than RECHECK_TIERS."""
        return queued.spill_at < FOREVER and self._begin_check(queued)

    # ---------------------------------------------------------------- best-effort requests

    def best_effort_order(self, queued: QueuedRequest, decision: Decision) -> list[Candidate]:
        """The fastest endpoint of each pool, fastest first, APIs at a rate limit last.

        Of a request without a deadline, the preferred tier's only.
        """
        by_pool: dict[str, Candidate] = {}
        for candidate in decision.ranked:
            if queued.deadline == FOREVER and candidate.tier != decision.ranked[0].tier:
                continue
            best = by_pool.setdefault(candidate.endpoint.pool, candidate)
            if candidate.forecast.p50 < best.forecast.p50:
                by_pool[candidate.endpoint.pool] = candidate
        return sorted(by_pool.values(), key=lambda c: (self.is_rate_limited(c.endpoint.id), c.forecast.p50))

    def first_idle(self, queued: QueuedRequest, candidates: list[Candidate], within: float = IDLE) -> Candidate | None:
        """The first candidate that is idle once the engine has prefilled for `within` seconds."""
        harmless = HARMLESS_ABOVE_SHARE if self.shares.is_over(queued.tenant) else HARMLESS
        idle = (c for c in candidates if self._may_take(queued, c.endpoint, c.forecast.prefill, harmless, within))
        return next((c for c in idle if not self.is_closed(queued, c.endpoint.id)), None)

    def _starts_within(self, queued: QueuedRequest, candidates: list[Candidate], seconds: float) -> bool:
        """A prefill in progress is all that the request waits for."""
        return seconds > 0 and self.first_idle(queued, candidates, seconds) is not None

    def _is_guess(self, candidates: list[Candidate]) -> bool:
        """The wait of a late request is no more than a guess: too few first tokens of an engine have been seen."""
        return any(not each.forecast.trained and self.fleet.is_local(each.endpoint.id) for each in candidates)

    def _may_take(
        self, queued: QueuedRequest, endpoint: Endpoint, prefill_s: float, harmless: float, within: float
    ) -> bool:
        if not self.is_idle(endpoint.id, prefill_s, harmless, within):
            return False
        return prefill_s <= LONG or queued.deadline == FOREVER or is_calm(self.fleet, endpoint.pool, self.now)

    def may_begin(self, queued: QueuedRequest) -> bool:
        """Without a decision: an endpoint may be idle for a best-effort request with the prefill of its placement."""
        if queued.route.on_miss == "shed":
            return True
        if queued.route.pools not in self.idle:
            pools = [self.fleet.snapshot(self.now).pools.get(name) for name in queued.route.pools]
            each = [endpoint for pool in pools if pool is not None for endpoint in pool.endpoints]
            self.idle[queued.route.pools] = [one for one in each if self.is_idle(one.id, 0.0, HARMLESS, IDLE)]
        return any(
            self._may_take(queued, one, queued.prefill_s, HARMLESS, IDLE) and not self.is_closed(queued, one.id)
            for one in self.idle[queued.route.pools]
        )

    def demote(self) -> None:
        """Move requests of tenants above the fair share behind all other requests."""
        for queue in tuple(self.queues.waiting()):
            for queued in [queued for queued in queue if self.shares.is_over(queued.tenant)]:
                self.queues.unassign(queued)
                self.queues.best_effort.add(queued, self.now)

    def waits_for_rate_limit(self, queued: QueuedRequest, decision: Decision, preferred: list[Candidate]) -> bool:
        """An API would take this best-effort request, but for a rate limit."""
        if any(self.is_rate_limited(c.endpoint.id) and not self.fleet.is_local(c.endpoint.id) for c in preferred):
            return True
        tier = decision.ranked[0].tier if queued.deadline == FOREVER else len(queued.route.tiers)
        return self._skipped_rate_limited(decision, tier)

    def _skipped_rate_limited(self, decision: Decision, tier: int) -> bool:
        """An API of a tier before `tier` was rejected for a rate limit."""
        return any(
            rejected.tier < tier
            and rejected.kind is RejectionKind.RATE_LIMITED
            and not self.fleet.is_local(rejected.endpoint)
            for rejected in decision.rejected
        )

    # ---------------------------------------------------------------- endpoints

    def can_advance(self, endpoint: str) -> bool:
        """The endpoint has room, or is gone and the queue must move elsewhere."""
        load = self.fleet.snapshot(self.now).loads.get(endpoint)
        if load is None or load.health is Health.DOWN:
            return True
        queue = self.queues.assigned[endpoint]
        return (
            self.has_room(endpoint, load)
            and not self.is_closed(queue[0], endpoint)
            and not self._holds(endpoint, queue)
        )

    def is_closed(self, queued: QueuedRequest, endpoint: str) -> bool:
        """The request would exceed the cap, or a rate limit of the provider."""
        cap, load = self.fleet.cap(endpoint), self.fleet.load_for(queued.request.caller, endpoint, self.now)
        dispatched = [c for c in self.queues.in_dispatch.values() if c.endpoint.id == endpoint]
        if cap is not None and load.in_flight + len(dispatched) >= cap:
            return True
        if dispatched and load.limits:
            load = replace(load, held_requests=len(dispatched), held_tokens=sum(c.prompt_tokens for c in dispatched))
        return load.send_wait(queued.estimate.pools[endpoint.partition("/")[0]].tokens, self.now) > 0

    def has_room(self, endpoint: str, load: Load) -> bool:
        return (load.backlog_s <= ROOM and not load.reopens_in) or not self.fleet.is_local(endpoint)

    def note_rate_limits(self) -> None:
        """The end of each rate limit is remembered."""
        for endpoint, load in self.fleet.snapshot(self.now).loads.items():
            if load.blocked_until > self.now:
                self.rate_limited_until[endpoint] = load.blocked_until

    def is_rate_limited(self, endpoint: str) -> bool:
        """The endpoint refused for a rate limit within RATE_LIMIT_WINDOW seconds, as of the latest note."""
        return self.now - self.rate_limited_until.get(endpoint, NEVER) <= RATE_LIMIT_WINDOW

    def is_idle(self, endpoint: str, prefill_s: float, harmless: float, within: float) -> bool:
        """No prefill above `within` seconds, no queue, and answers able to bear a stall of `prefill_s` with `harmless`
        expected misses."""
        load = self.fleet.snapshot(self.now).loads[endpoint]
        if not self.fleet.is_local(endpoint):
            return not self.is_rate_limited(endpoint) and load.health is not Health.DOWN
        if load.health is Health.DOWN or load.backlog_s > within:
            return False
        if load.tpot_pressure * (1 + prefill_s / TIME_CONSTANT) > 1:
            return False
        if endpoint in self.queues.assigned:
            return False
        if any(chosen.endpoint.id == endpoint for chosen in self.queues.in_dispatch.values()):
            return False
        return expected_tpot_misses(load, prefill_s) <= harmless


def _sure(route: Route) -> float:
    """The probability to make the deadline that waiting must leave."""
    return 1 - (1 - route.target) * RISK


def with_first(decision: Decision, candidate: Candidate) -> Decision:
    """The same decision, with this candidate chosen."""
    others = (other for other in decision.ranked if other is not candidate)
    return replace(decision, ranked=(candidate, *others), outcome=Placement.PLACE)
