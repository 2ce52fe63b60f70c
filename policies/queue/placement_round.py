"""Placement of a request at one moment: at an endpoint, in a queue, or back to the caller.

Rules:
- A request is late where it would miss the deadline more likely than not (LATE). The target of the route is another
  question: it chooses the tier.
- A request of a tenant above its share (`policies.queue.fair_share`), or without a deadline, is treated as late.
- A request in time goes to the endpoint of its decision, or is assigned to it until no rule holds it any longer
  (`policies.queue.hold_rules`). At the head of the queue it is decided again.
- The forecast of another tier is reliable, so a queued request spills to another tier when better by the forecasts, and
  at the latest when the other tier can only just make the deadline, at RISK of the usual risk.
- A late request goes to an idle endpoint, the fastest of each pool, or queues behind all in time, or is refused where
  it would wait for too long (`policies.queue.late_work`), unless the forecast is not trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.hold_rules import IDLE, TICK, HoldRules
from policies.queue.late_work import (
    PATIENCE,
    RefusedRequests,
    may_be_refused,
    patience_left,
    retry_after_of,
)
from policies.queue.queue_view import QueueView
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest
from policies.routes.route import Route
from policies.types import FOREVER, NEVER, Candidate, Decision, Health, Placement, RejectionKind

LATE = 0.5  # chance of the deadline, below which a request is late
STILL = 0.9  # share of the target with which a request keeps the assigned endpoint
RISK = 0.5  # of 1 - target: waiting until the last moment must not add misses
RECHECK_TIERS = 0.1  # s between two comparisons of a queued request with other tiers
FORCED_AFTER = 30.0  # s from arrival, where a route says `on_miss: best_effort`


@dataclass(slots=True)
class PlacementRound:
    """Placements as of `now`. `refused`: requests that may come back."""

    queues: EndpointQueues
    fleet: Fleet
    now: float
    view: QueueView
    rules: HoldRules
    refused: RefusedRequests

    def place(self, queued: QueuedRequest, decision: Decision) -> Decision | None:
        """The decision of a request dispatched now; None: queued."""
        chosen = decision.chosen
        if chosen is None:
            return decision
        if (rule := self.rules.must_wait(queued, chosen)) is not None:
            self._assign(queued, decision, chosen, rule)
            return None
        if self._is_sent_on(queued, chosen):
            return decision
        queued.returned |= self.refused.take(queued, self.now)
        if self._is_late(queued, decision):
            return self._place_late(queued, decision)
        return self._dispatch_or_assign(queued, decision, decision.ranked[0])

    def would_hold(self, queued: QueuedRequest, decision: Decision) -> Hold | None:
        """The rule that would hold the request if placed now; None: none, or it would be refused. Changes no queue."""
        chosen = decision.chosen
        if chosen is None:
            return None
        rule = self.rules.must_wait(queued, chosen)
        if rule is None and not self._is_sent_on(queued, chosen):
            if self._is_late(queued, decision):
                chosen = (order := self.fastest(queued, decision))[0]
                others = HoldRule.TURN if self.queues.best_effort else None
                rule = others if self._first_idle(queued, order) else self._late_rule(queued, chosen)
            else:
                chosen = decision.ranked[0]
                self._plan(queued, chosen)
                rule = self.rules.hold(queued, chosen)
        return None if rule is None else Hold(rule, chosen.endpoint.id, self.now)

    # ---------------------------------------------------------------- requests in time

    def _is_best_effort(self, queued: QueuedRequest) -> bool:
        return queued.deadline == FOREVER or self.rules.shares.is_over(queued.tenant)

    def _is_sent_on(self, queued: QueuedRequest, chosen: Candidate) -> bool:
        """The queue of the endpoint is its own: of an API, and of every endpoint on a route with another scorer."""
        return queued.route.scorer != "predicted" or not self.fleet.is_local(chosen.endpoint.id)

    def _is_late(self, queued: QueuedRequest, decision: Decision) -> bool:
        return self._is_best_effort(queued) or decision.ranked[0].probability < LATE

    def _dispatch_or_assign(self, queued: QueuedRequest, decision: Decision, chosen: Candidate) -> Decision | None:
        """Dispatched now, where the endpoint has room and no queue; else assigned."""
        self._plan(queued, chosen)
        rule = self.rules.hold(queued, chosen)
        if rule is None:
            return decision
        self._assign(queued, decision, chosen, rule)
        return None

    def _plan(self, queued: QueuedRequest, chosen: Candidate) -> None:
        forecast, load = chosen.forecast, chosen.load
        alone = max(forecast.point_estimate - load.wait - load.backlog_s, 0.0)
        queued.prefill_s = forecast.prefill
        is_sure = chosen.probability >= queued.route.target
        queued.send_by = queued.deadline - alone * forecast.ratio(_sure(queued.route)) if is_sure else NEVER

    def _assign(self, queued: QueuedRequest, decision: Decision, chosen: Candidate, rule: HoldRule) -> None:
        self._plan(queued, chosen)
        spill_at = self._or_next_check(self._spill_at(queued, decision, chosen.endpoint.pool))
        if queued.route.prefer == "quality" and self._skipped_rate_limited(decision, chosen.tier):
            rule = HoldRule.RATE_LIMIT
        queued.hold_by(rule, chosen.endpoint.id, self.now)
        self.queues.assign(queued, chosen.endpoint, spill_at, chosen.load.limits.refused_until > self.now)

    def revalidate(self, queued: QueuedRequest, endpoint: str) -> Decision | None:
        """Decides again at the head of the queue: the assigned endpoint if still in time, or still the best."""
        decision = self.view.decide(queued)
        for candidate in decision.ranked:
            if candidate.endpoint.id == endpoint and candidate.probability >= STILL * queued.route.target:
                return with_first(decision, candidate)
        chosen = decision.chosen
        if chosen is not None and chosen.endpoint.id == endpoint and chosen.probability >= LATE:
            return decision
        return self.place(queued, decision)

    def note_hold(self, endpoint: str) -> bool:
        """Note the rule that holds the head of the queue of an endpoint. False: none does.

        A request that waits here because an API of a better tier refuses is held by that rate limit.
        """
        rule, head = self.rules.hold_next(endpoint), self.queues.assigned[endpoint][0]
        if rule is not None and (head.hold is None or head.hold.rule is not HoldRule.RATE_LIMIT):
            head.hold_by(rule, endpoint, self.now)
        return rule is not None

    # ---------------------------------------------------------------- other tiers, and closed endpoints

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

    def is_due(self, queued: QueuedRequest) -> bool:
        """The last decision of the request is RECHECK_TIERS seconds old."""
        return self.now - queued.checked_at >= RECHECK_TIERS

    def spill(self, queued: QueuedRequest) -> Decision | None:
        """Moves a request to another tier where better by now; the decision, if dispatched there."""
        assert queued.assigned is not None
        decision, pool, target = self.view.decide(queued), queued.assigned.pool, queued.route.target
        spill_at = self._spill_at(queued, decision, pool)
        queued.spill_at = self._or_next_check(spill_at)
        if self.now >= spill_at:
            target *= STILL
        elif decision.ranked[0].endpoint.pool == pool:
            return None
        for candidate in decision.ranked:
            if candidate.endpoint.pool != pool and candidate.probability >= target:
                self.queues.unassign(queued)
                return self._dispatch_or_assign(queued, with_first(decision, candidate), candidate)
        return None

    def leave_closed(self, queued: QueuedRequest) -> Decision | None:
        """Moves a request held at a closed endpoint to one that is open by now; a refusal where the wait has become too
        long. None: stays."""
        assert queued.assigned is not None
        endpoint, rules = queued.assigned.id, self.rules
        if rules.closed(queued, endpoint) is None or not (self._another_is_open(queued) or self.is_due(queued)):
            return None
        decision = self.view.decide(queued)
        if (chosen := decision.chosen) is not None:
            stays = chosen.endpoint.id == endpoint or rules.must_wait(queued, chosen)
            if stays or not rules.has_room(chosen):
                return None
        self.queues.unassign(queued)
        return decision

    def _another_is_open(self, queued: QueuedRequest) -> bool:
        snapshot = self.fleet.snapshot_for(queued.request.caller, self.now)
        pools = [snapshot.pools[name] for name in queued.route.pools if name in snapshot.pools]
        return any(
            snapshot.loads[each.id].health is Health.UP and self.rules.closed(queued, each.id) is None
            for pool in pools
            for each in pool.endpoints
            if each.id in snapshot.loads
        )

    # ---------------------------------------------------------------- late requests

    def _place_late(self, queued: QueuedRequest, decision: Decision) -> Decision | None:
        """Dispatches to an idle endpoint if no other late request is queued; else queues at the end, or refuses where
        the route sheds and those ahead leave no time."""
        order, waiting = self.fastest(queued, decision), self.queues.best_effort
        queued.prefill_s = min(candidate.forecast.prefill for candidate in order)
        if not waiting and (idle := self._first_idle(queued, order)) is not None:
            return with_first(decision, idle)
        if queued.route.on_miss == "shed" and queued.deadline < FOREVER:
            engines = sum(self.fleet.is_local(candidate.endpoint.id) for candidate in decision.ranked)
            shed = self.view.decide(queued, behind=waiting.prefill_ahead(queued) / max(engines, 1))
            if shed.chosen is None:
                return shed
        if (refusal := self._refuse_new(queued, decision, order)) is not None:
            return refusal
        self._hold_late(queued, decision, order)
        waiting.add(queued, self.now)
        return None

    def next_late(self, queued: QueuedRequest) -> Decision | None:
        """A decision for an idle endpoint, or for the fastest where the wait must end. None: stays queued."""
        decision = self.view.decide(queued)
        if decision.chosen is None:
            return decision
        order = self.fastest(queued, decision)
        if (idle := self._first_idle(queued, order)) is not None:
            return with_first(decision, idle)
        overdue = self.now - queued.request.arrival > FORCED_AFTER and queued.deadline < FOREVER
        forced = overdue and queued.route.on_miss == "best_effort" and not self.rules.shares.is_over(queued.tenant)
        if forced and self.rules.closed(queued, order[0].endpoint.id) is None:
            return with_first(decision, order[0])
        self._hold_late(queued, decision, order)
        return None

    def fastest(self, queued: QueuedRequest, decision: Decision) -> list[Candidate]:
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
        return sorted(by_pool.values(), key=lambda c: (self.rules.is_rate_limited(c.endpoint.id), c.forecast.p50))

    def _first_idle(self, queued: QueuedRequest, order: list[Candidate], within: float = IDLE) -> Candidate | None:
        """The first candidate that is idle, or is once its engine has prefilled for `within` seconds."""
        return next((each for each in order if self._late_rule(queued, each, within) is None), None)

    def _late_rule(self, queued: QueuedRequest, candidate: Candidate, within: float = IDLE) -> HoldRule | None:
        return self.rules.hold_late(queued, candidate.endpoint.id, candidate.forecast.prefill, within)

    def _hold_late(self, queued: QueuedRequest, decision: Decision, order: list[Candidate]) -> None:
        """Note the rule that holds a late request at the fastest endpoint; of an API, its rate limit comes first."""
        first = order[0]
        rule = self._late_rule(queued, first) or HoldRule.TURN
        tier = decision.ranked[0].tier if queued.deadline == FOREVER else len(queued.route.tiers)
        limited = (c for c in order if self.rules.is_rate_limited(c.endpoint.id))
        if any(not self.fleet.is_local(c.endpoint.id) for c in limited) or self._skipped_rate_limited(decision, tier):
            rule = HoldRule.RATE_LIMIT
        queued.hold_by(rule, first.endpoint.id, self.now)

    def able_to_begin(self, heads: list[QueuedRequest]) -> list[QueuedRequest]:
        """Heads of which some endpoint may take the prefill now, if it is as long as at their placement."""
        idle = self.rules.idle_endpoints()
        return [each for each in heads if each.route.on_miss == "shed" or self._takes_any(idle, each)]

    def _takes_any(self, idle: list[str], queued: QueuedRequest) -> bool:
        pools = queued.route.pools
        return any(
            self.fleet.pool_of(endpoint) in pools and self.rules.hold_late(queued, endpoint, queued.prefill_s) is None
            for endpoint in idle
        )

    def demote(self) -> None:
        """Move requests of tenants above the fair share behind all other requests."""
        shares = self.rules.shares
        for queue in tuple(self.queues.waiting()):
            for queued in [queued for queued in queue if shares.is_over(queued.tenant)]:
                assert queued.assigned is not None
                queued.hold_by(HoldRule.SHARE, queued.assigned.id, self.now)
                self.queues.unassign(queued)
                self.queues.best_effort.add(queued, self.now)

    def _skipped_rate_limited(self, decision: Decision, tier: int) -> bool:
        """An API of a tier before `tier` was rejected for a rate limit."""
        return any(
            rejected.tier < tier
            and rejected.kind is RejectionKind.RATE_LIMITED
            and not self.fleet.is_local(rejected.endpoint)
            for rejected in decision.rejected
        )

    # ---------------------------------------------------------------- refusals of late requests

    def _refuse_new(self, queued: QueuedRequest, decision: Decision, order: list[Candidate]) -> Decision | None:
        """A refusal of a late request whose wait would be too long. None: may queue."""
        if queued.returned or not may_be_refused(queued) or self._is_guess(order):
            return None
        ahead_s = self.queues.best_effort.work_ahead(queued)
        if not ahead_s and self._first_idle(queued, order, PATIENCE) is not None:  # a prefill in progress is all
            return None
        wait = self.queues.best_effort.wait(queued, ahead_s, self.now)
        return self._refuse(queued, decision, ahead_s, wait) if wait > PATIENCE else None

    def refuse_if_certain(self, queued: QueuedRequest) -> Decision | None:
        """A refusal of an overdue request; None: it waits for a prefill in progress alone, or its wait is a guess."""
        decision, waiting, left = self.view.decide(queued), self.queues.best_effort, patience_left(queued, self.now)
        order = self.fastest(queued, decision) if decision.ranked else []
        if self._is_guess(order) or (left > 0 and self._first_idle(queued, order, left) is not None):
            return None
        ahead_s = waiting.work_ahead(queued) - queued.prefill_s
        return self._refuse(queued, decision, ahead_s, waiting.wait(queued, ahead_s, self.now))

    def _is_guess(self, order: list[Candidate]) -> bool:
        """The wait of a late request is no more than a guess: too few first tokens of an engine have been seen."""
        return any(not each.forecast.trained and self.fleet.is_local(each.endpoint.id) for each in order)

    def _refuse(self, queued: QueuedRequest, decision: Decision, ahead_s: float, wait: float) -> Decision:
        """503, with Retry-After from the predicted wait."""
        retry_after = retry_after_of(wait)
        self.queues.best_effort.on_refused(queued, ahead_s, wait, self.now)
        self.refused.add(queued, retry_after, self.now)
        reason = f"it is late, and engines would have time for it in about {wait:.0f} s"
        return replace(decision, outcome=Placement.OVERLOADED, retry_after=retry_after, reason=reason)


def _sure(route: Route) -> float:
    """The probability to make the deadline that waiting must leave."""
    return 1 - (1 - route.target) * RISK


def with_first(decision: Decision, candidate: Candidate) -> Decision:
    """The same decision, with this candidate chosen."""
    others = (other for other in decision.ranked if other is not candidate)
    return replace(decision, ranked=(candidate, *others), outcome=Placement.PLACE)
