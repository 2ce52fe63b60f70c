"""Placement of a request at one moment: at an endpoint, in a queue, or back to the caller.

Rules:
- A request is late where no endpoint makes the deadline with the target probability of the route, and the chance is
  below LATE, or SURE with a LONG prefill: what is doubtful must not take seconds from others. A request without a
  deadline, or that a part puts behind (`policies.queue.queue_part`), is treated as late.
- A request in time goes to the endpoint of its decision, or is assigned to it until no rule holds it any longer
  (`policies.queue.hold_rules`). At the head of the queue it is decided again.
- Where not all of a queue come in time, prefills much longer than one that would be late behind them are late in its
  place, the longest first (Moore and Hodgson, 1968): most requests are then in time.
- An assigned request is decided again every RECHECK seconds where the route has another tier or part of one, or its
  endpoint is closed. It moves to one of more value, or at the last moment at which that one makes the deadline; from a
  closed endpoint to one with room.
- A late request goes to an idle endpoint, the fastest of each pool, or queues behind all in time, or is refused where
  it would wait for too long (`policies.queue.late_work`), unless the forecast is not trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues, QueueView
from policies.queue.hold_rules import IDLE, TICK, HoldRules
from policies.queue.late_work import LONG, RefusedRequests, late_ttft, retry_after_of
from policies.queue.queue_part import BestEffortReach
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest
from policies.types import FOREVER, Candidate, Decision, Endpoint, Placement, RejectionKind

LATE, SURE = 0.5, 0.95  # chances of the deadline, below which a request with a short prefill, or a LONG one, is late
RECHECK = 0.1  # s between two decisions of an assigned request that may have a better place
POSTPONED = 8  # requests in one placement: each is looked for in all of the queue


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
        """The decision of a request that is sent or refused now, new or the first of a queue; None: held."""
        if (best := decision.chosen) is None:
            return decision
        late = self._is_late(queued, decision, best)
        candidate, rule = self._find(queued, decision, late)
        if rule is None:
            return with_first(decision, candidate)
        if late:
            return self._place_late(queued, decision, candidate, rule)
        return self._assign(queued, candidate, rule)

    def would_place(self, queued: QueuedRequest) -> tuple[Decision, Hold | None]:
        """The decision of a new request, which is not to be placed, and the rule that would hold it. Changes no
        queue."""
        decision = self.view.decide(queued)
        if (best := decision.chosen) is None:
            return decision, None
        late = self._is_late(queued, decision, best)
        candidate, rule = self._find(queued, decision, late)
        if late and rule is not None:
            queued.prefill_s = candidate.forecast.prefill
            if (refusal := self.refusal(queued, decision)) is not None:
                return refusal, None
        hold = None if rule is None else Hold(rule, candidate.endpoint.id, self.now)
        return with_first(decision, candidate), hold

    def _is_late(self, queued: QueuedRequest, decision: Decision, best: Candidate) -> bool:
        """Not where the queue of the endpoint is its own: of an API, and of all on a route with another scorer."""
        if queued.is_late:
            return True
        if queued.route.scorer != "predicted" or not self.fleet.view.is_local(best.endpoint.id):
            return False
        if queued.deadline == FOREVER or self.rules.hooks.behind_rule(queued) is not None:
            return True
        return not decision.in_time and best.probability < (SURE if best.forecast.prefill > LONG else LATE)

    def _find(
        self, queued: QueuedRequest, decision: Decision, late: bool, within: float = IDLE
    ) -> tuple[Candidate, HoldRule | None]:
        """The endpoint to which a request goes, and the rule that holds it there.

        Of a late one the fastest that is idle, or will be once it has prefilled for `within` seconds; else the fastest.
        """
        best = decision.chosen
        assert best is not None
        order = self._fastest(queued, decision) if late else [best]
        if not late:
            queued.prefill_s = best.forecast.prefill
        rules = list[HoldRule]()
        for each in order:
            if (rule := self.rules.held_by(queued, each, late, within)) is None:
                return each, None
            rules.append(rule)
        wanted = queued.route.prefer == "quality" or late  # would take a better tier that refuses now
        tier = len(queued.route.tiers) if late and queued.deadline < FOREVER else best.tier
        first = next((i for i, rule in enumerate(rules) if rule is not HoldRule.RATE_LIMIT), 0)
        is_limited = HoldRule.RATE_LIMIT in rules or (wanted and self._skipped_rate_limited(decision, tier))
        return order[first], HoldRule.RATE_LIMIT if is_limited else rules[first]

    def _fastest(self, queued: QueuedRequest, decision: Decision) -> list[Candidate]:
        """The fastest endpoint of each pool, fastest first; or as a part says. A request without a deadline goes to its
        preferred tier alone."""
        by_pool = dict[str, Candidate]()
        any_tier, each_endpoint = self._reach(queued)
        best, found = decision.ranked[0].endpoint, list[Candidate]()
        for candidate in sorted(decision.ranked, key=lambda each: each.forecast.p50):
            if any_tier or queued.route.is_same_part(candidate.endpoint, best):
                fastest = by_pool.setdefault(candidate.endpoint.pool, candidate)
                found += [candidate] if candidate is fastest or each_endpoint else []
        return found

    def _reach(self, queued: QueuedRequest) -> BestEffortReach:
        if queued.deadline < FOREVER:
            return BestEffortReach(any_tier=True, each_endpoint=False)
        reaches = (reach(queued, self.now) for reach in self.rules.hooks.reach)
        return next(filter(None, reaches), BestEffortReach(any_tier=False, each_endpoint=False))

    def _skipped_rate_limited(self, decision: Decision, tier: int) -> bool:
        """An API of a tier before `tier` was rejected for a rate limit."""
        limited = (each for each in decision.rejected if each.kind is RejectionKind.RATE_LIMITED)
        return any(each.tier < tier and not self.fleet.view.is_local(each.endpoint) for each in limited)

    # ---------------------------------------------------------------- requests in time

    def _assign(self, queued: QueuedRequest, chosen: Candidate, rule: HoldRule) -> Decision | None:
        own_limit = rule is HoldRule.RATE_LIMIT and chosen.load.limits.refused_until > self.now
        self.queues.assign(queued, chosen.endpoint, rule, self.now, own_limit=own_limit)
        longest = iter(partial(self.rules.longest_in_the_way, chosen.endpoint.id), None)
        for postponed in islice(longest, POSTPONED):
            self._hold_behind_all(postponed, HoldRule.TURN)
        return None

    def note_hold(self, queued: QueuedRequest) -> bool:
        """Note the rule that holds the head of the queue of an endpoint. False: none does."""
        assert queued.assigned is not None
        rule = self.rules.rule_in_time(queued, queued.assigned.id)
        if rule is not None:
            queued.hold_here(rule, queued.assigned.id, self.now)
        return rule is not None

    # ---------------------------------------------------------------- other tiers, and closed endpoints

    def is_due(self, queued: QueuedRequest) -> bool:
        """An assigned request may have a better place by now, and its last decision is RECHECK seconds old."""
        if queued.assigned is None or self.now - queued.checked_at < RECHECK:
            return False
        return queued.has_other_places or self.rules.closed(queued, queued.assigned.id) is not None

    def move(self, queued: QueuedRequest) -> Decision | None:
        """Moves an assigned request to another tier of more value by now, or at the last moment for that, and from a
        closed endpoint to one with room; the decision, if sent there or refused. None: it waits on."""
        assert queued.assigned is not None
        decision, here = self.view.decide(queued), queued.assigned
        is_closed = self.rules.closed(queued, here.id) is not None
        if decision.chosen is None:
            return self._leave(queued, decision) if is_closed else None
        if decision.in_time and (other := self._other_place(queued, decision, here)) is not None:
            return self._move_to(queued, decision, other)
        if is_closed:
            for each in decision.ranked:
                if each.endpoint != here and self.rules.rule_in_time(queued, each.endpoint.id) is None:
                    return self._move_to(queued, decision, each)
        return None

    def _other_place(self, queued: QueuedRequest, decision: Decision, here: Endpoint) -> Candidate | None:
        """The first candidate of another tier, or part of one, in time, if it is the best, or would be late after
        another RECHECK seconds: the forecast of when answers here have caught up may have been wrong all the time."""
        for each in decision.ranked:
            if not queued.route.is_same_part(each.endpoint, here) and queued.qualifies(each):
                ttft = each.forecast.quantile(queued.route.target) + queued.extra_unseen(each.endpoint.pool)
                is_last_moment = self.now + RECHECK + TICK + ttft > queued.deadline
                return each if is_last_moment or each is decision.chosen else None
        return None

    def _leave(self, queued: QueuedRequest, decision: Decision) -> Decision:
        self.queues.unassign(queued)
        return decision

    def _move_to(self, queued: QueuedRequest, decision: Decision, candidate: Candidate) -> Decision | None:
        self.queues.unassign(queued)
        queued.prefill_s = candidate.forecast.prefill
        rule, moved = self.rules.rule_in_time(queued, candidate.endpoint.id), with_first(decision, candidate)
        return moved if rule is None else self._assign(queued, candidate, rule)

    # ---------------------------------------------------------------- late requests

    def _place_late(
        self, queued: QueuedRequest, decision: Decision, candidate: Candidate, rule: HoldRule
    ) -> Decision | None:
        """Refuse a request with too long a predicted wait; hold any other behind all requests in time."""
        waiting = self.queues.best_effort
        if not queued.is_late:
            queued.plan_late(candidate)
        is_asked = not queued.is_late or waiting.is_overdue(queued, self.now)
        if is_asked and (refusal := self.refusal(queued, decision)) is not None:
            if refusal.outcome is Placement.OVERLOADED:
                self.refused.add(queued, refusal.retry_after, self.now)
            return refusal
        self._hold_late(queued, candidate, rule)
        return None

    def recheck_late(self) -> None:
        """Decide some late requests again, behind others: the prompt of one may have come into a cache, or left it."""
        for queued in self.queues.best_effort.longest_undecided():
            decision, hold = self.view.decide(queued), queued.hold
            if decision.chosen is not None and hold is not None:
                candidate, rule = self._find(queued, decision, late=True)
                self._hold_late(queued, candidate, rule or hold.rule)

    def _hold_late(self, queued: QueuedRequest, candidate: Candidate, rule: HoldRule) -> None:
        waiting, prefill_s = self.queues.best_effort, candidate.forecast.prefill
        if (prefill_s > LONG) != (queued.prefill_s > LONG):
            waiting.leave(queued, self.now)
            queued.plan_late(candidate)
        waiting.hold_late(queued, rule, candidate.endpoint.id, self.now)

    def demote(self) -> None:
        """Move requests that a part puts behind by now behind all in time."""
        for queued in [*chain(*self.queues.assigned.values())]:
            if (rule := self.rules.hooks.behind_rule(queued)) is not None:
                self._hold_behind_all(queued, rule)

    def _hold_behind_all(self, queued: QueuedRequest, rule: HoldRule) -> None:
        """Move a request from the queue of an endpoint behind all requests in time."""
        endpoint = self.queues.unassign(queued)
        self.queues.best_effort.hold_late(queued, rule, endpoint.id, self.now)

    def refusal(self, queued: QueuedRequest, decision: Decision) -> Decision | None:
        """A refusal of a late request whose wait is or would be too long, with Retry-After from the predicted wait.

        None: a new request may queue; another waits for a prefill in progress alone, or its wait is a guess. Changes
        nothing.
        """
        on_miss, rate = queued.route.on_miss, self.queues.best_effort.rate(queued)
        if on_miss == "best_effort" or queued.deadline == FOREVER or (queued.returned and not queued.is_late):
            return None
        ahead_s, wait, left = rate.late_forecast(queued, self.now)
        if on_miss == "shed":
            engines = sum(self.fleet.view.is_local(each.endpoint.id) for each in decision.ranked)
            shed = self.view.decide(queued, behind=ahead_s / max(engines, 1))
            return shed if shed.chosen is None else None
        if wait <= left or self._is_guess(queued, decision):
            return None
        is_next = left > 0 and decision.ranked and (queued.is_late or ahead_s < IDLE)
        if is_next and self._find(queued, decision, late=True, within=left)[1] is None:
            return None
        return replace(
            decision,
            outcome=Placement.OVERLOADED,
            retry_after=retry_after_of(wait),
            reason=f"it is late, and engines would have time for it in about {wait:.0f} s",
            expected=late_ttft(decision.ranked[0].forecast, wait),
        )

    def _is_guess(self, queued: QueuedRequest, decision: Decision) -> bool:
        """The wait of a late request is no more than a guess: too few first tokens of an engine have been seen."""
        engines = (each for each in self._fastest(queued, decision) if self.fleet.view.is_local(each.endpoint.id))
        return not all(each.forecast.trained for each in engines)


def with_first(decision: Decision, candidate: Candidate) -> Decision:
    """The same decision, with this candidate chosen."""
    if decision.chosen is candidate:
        return decision
    others = (other for other in decision.ranked if other is not candidate)
    return replace(decision, ranked=(candidate, *others), outcome=Placement.PLACE)
