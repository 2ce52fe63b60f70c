"""The gateway's own queue: dispatches requests to endpoints with room, and holds the others.

An engine serves its queue first come, first served, and every prefill stalls the answers beside it. So the engine's
queue is kept as short as keeps it busy, and the rest waits in the gateway, where it can be ordered and moved.

Rules:
- A request that finds an endpoint with room (`policies.queue.placement_round`) is dispatched at once, unless answers in
  progress would feel the prefill and it can wait.
- Any other is assigned to the endpoint of its decision, earliest deadline first, and counts there as work ahead of what
  is due later. It is decided again at the head of the queue. It spills to another tier when that promises more,
  and at the last moment at which that one still makes the deadline.
- Best effort: a request that cannot make its deadline any more, or has none, waits for an idle endpoint
  whose answers it does not harm, tenants by recent use (`policies.queue.fair_share`) and routes in turn. With
  `on_miss: best_effort` it is dispatched after FORCED_AFTER seconds whatever the load; with `on_miss: queue` it is
  refused once its wait exceeds what callers bear (`policies.queue.late_work`).
- While several tenants are active, requests of a tenant above its fair share are best effort too, and never forced.
- At most MAX_HELD requests are held; beyond, the latest of the tenant with most of them is refused.
- Baseline scorers are never held.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.fair_share import FairShare
from policies.queue.late_work import RefusedRequests
from policies.queue.placement_round import TICK, PlacementRound, with_first
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, NEVER, Candidate, Decision, Placement

FORCED_AFTER = 30.0  # s from arrival
MAX_HELD = 4096  # requests
MANY = 16  # best-effort queues, or requests at the last moment: with more, not each is decided at every event
RETRY_AFTER = 5.0  # s, for a request refused because the queue is full

Released = tuple[Hashable, Decision]  # a request key and its placement


class QueueScheduler:
    """All requests that are not decided, or decided and not dispatched. A caller drives it with a clock."""

    def __init__(self) -> None:
        self.queues = EndpointQueues()
        self.wake_at = FOREVER  # time of the next `release` without an event
        self._rate_limited_until: dict[str, float] = {}
        self._turns: dict[tuple[str, str], int] = {}  # best-effort turns had, by tenant and route
        self._shares = FairShare()
        self._refused = RefusedRequests()
        self._turn = 0  # of the latest one served: new tenants start here, with nothing to catch up on

    @property
    def held(self) -> int:
        return len(self.queues)

    def enter(self, queued: QueuedRequest) -> None:
        self.queues.new.append(queued)

    def pass_through(self, queued: QueuedRequest, fleet: Fleet, now: float) -> Decision | None:
        """`enter` and `release` in one, where no other request is held. None: this one is held now."""
        fleet.on_arrived(queued.route, now)
        decision = self._round(fleet, now).place(queued)
        if decision is None:
            self.wake_at = now + TICK
        elif decision.chosen is not None:
            self._dispatch(queued, decision.chosen, now)
        return decision

    def _round(self, fleet: Fleet, now: float) -> PlacementRound:
        return PlacementRound(self.queues, fleet, now, self._rate_limited_until, self._shares, self._refused)

    def _dispatch(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        self._shares.charge(queued, chosen, now)
        self.queues.in_dispatch[queued.request_key] = chosen

    def on_dispatched(self, request_key: Hashable) -> None:
        """The fleet counts the request's first attempt, or there will be none."""
        self.queues.in_dispatch.pop(request_key, None)

    def leave(self, request_key: Hashable, now: float = NEVER) -> float:
        """Removes a request whose caller is gone; for how many seconds a rate limit had held it."""
        queued = self.queues.remove(request_key)
        if not self.held:
            self.wake_at = FOREVER
        if queued is None:
            return 0.0
        queued.set_rate_limited(now)
        return queued.rate_limited_s

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        """Yield requests leaving the queue now; the caller dispatches each before the next is placed."""
        turn, queues = self._round(fleet, now), self.queues
        while queues.new:
            queued = queues.new.pop(0)
            fleet.on_arrived(queued.route, now)
            yield from self._released(queued, turn.place(queued))
            if self.held - len(queues.new) > MAX_HELD:
                yield self._refuse(turn)
        turn.demote()
        if queues.best_effort or queues.assigned or queues.limited:
            yield from self._advance(turn)
        self.wake_at = now + TICK if self.held else FOREVER

    def _advance(self, turn: PlacementRound) -> Iterator[Released]:
        """Every endpoint with room takes from its queue, then from the best-effort queue."""
        queues = self.queues
        for endpoint in tuple(queues.assigned):
            while (queue := queues.assigned.get(endpoint)) and turn.can_advance(endpoint):
                queued = queue[0]
                queues.unassign(queued)
                yield from self._released(queued, turn.revalidate(queued, endpoint))
            while queue := queues.assigned.get(endpoint):
                queued = queue[0]
                if (decision := turn.leave_closed(queued)) is None:
                    break
                yield from self._released(queued, decision)
            if queue and turn.begin_tier_comparison(queue[0]):
                yield from self._released(queue[0], turn.spill(queue[0]))
        yield from self._leave_own_limits(turn)
        for queued in _least(queues.due_to_spill(turn.now), "spill_at"):
            yield from self._released(queued, turn.spill(queued))
        turn.note_rate_limits()
        while queues.best_effort and (best_effort := self._next_best_effort(turn)) is not None:
            yield from self._released(*best_effort)
        for queued in _least(turn.overdue(), "checked_at"):
            if (refusal := turn.refuse_if_certain(queued)) is not None:
                queues.best_effort.remove(queued, turn.now)
                yield from self._released(queued, refusal)

    def _leave_own_limits(self, turn: PlacementRound) -> Iterator[Released]:
        """Requests whose caller's own limit is over are placed anew; others leave for an endpoint that is open."""
        for key in tuple(self.queues.limited):
            while (queue := self.queues.limited.get(key)) and not turn.is_closed(queue[0], key[0]):
                queued = queue[0]
                self.queues.unassign(queued)
                yield from self._released(queued, turn.place(queued))
                if queued.assigned is not None and queued.own_limit:
                    break
            if queue := self.queues.limited.get(key):
                yield from self._released(queue[0], turn.leave_closed(queue[0]))

    def _next_best_effort(self, turn: PlacementRound) -> tuple[QueuedRequest, Decision] | None:
        """The first able to go, of the tenant with the least recent use, of the route with the fewest turns."""
        for queued in sorted(self._best_effort_heads(turn), key=self._best_effort_order):
            if (decision := self._best_effort_decision(queued, turn)) is not None:
                waiting = self.queues.best_effort
                leave = waiting.remove if decision.chosen is None else waiting.begin
                leave(queued, turn.now)
                self._turn = self._turns_of(queued)
                self._turns[queued.tenant, queued.route.name] = self._turn + 1
                return queued, decision
        return None

    def _best_effort_heads(self, turn: PlacementRound) -> list[QueuedRequest]:
        """The next of each queue; of many, those that an idle engine may take, and those decided longest ago."""
        heads = self.queues.best_effort.heads(turn.now, self._shares.is_over)
        if len(heads) <= MANY:
            return heads
        due = {queued.request_key for queued in _least(heads, "checked_at")}
        return [queued for queued in heads if queued.request_key in due or turn.may_begin(queued)]

    def _best_effort_order(self, queued: QueuedRequest) -> tuple[float, int, bool, int]:
        return self._shares.use(queued.tenant), self._turns_of(queued), queued.deadline == FOREVER, queued.sequence

    def _turns_of(self, queued: QueuedRequest) -> int:
        return max(self._turns.get((queued.tenant, queued.route.name), 0), self._turn)

    def _best_effort_decision(self, queued: QueuedRequest, turn: PlacementRound) -> Decision | None:
        """A decision for an idle endpoint, or for the fastest if the request is overdue. None: stays queued."""
        decision, queued.checked_at = turn.decide(queued), turn.now
        if decision.chosen is None:
            return decision
        preferred = turn.best_effort_order(queued, decision)
        if (idle := turn.first_idle(queued, preferred)) is not None:
            return with_first(decision, idle)
        overdue = turn.now - queued.request.arrival > FORCED_AFTER and queued.deadline < FOREVER
        forced = overdue and queued.route.on_miss == "best_effort" and not self._shares.is_over(queued.tenant)
        if forced and not turn.is_closed(queued, preferred[0].endpoint.id):
            return with_first(decision, preferred[0])
        queued.set_rate_limited(turn.now, turn.waits_for_rate_limit(queued, decision, preferred))
        return None

    def _released(self, queued: QueuedRequest, decision: Decision | None) -> Iterator[Released]:
        """None: the request stays in the queue."""
        if decision is not None:
            if decision.chosen is not None:
                self._dispatch(queued, decision.chosen, decision.at)
            yield _with_rate_limited(queued, decision)

    def _refuse(self, turn: PlacementRound) -> Released:
        queued = self.queues.latest_of_largest_tenant()
        self.queues.remove(queued.request_key)
        decision = replace(
            turn.decide(queued),
            outcome=Placement.SHED,
            retry_after=RETRY_AFTER,
            reason=f"{MAX_HELD} requests wait already",
        )
        return _with_rate_limited(queued, decision)


def _least(requests: list[QueuedRequest], attribute: str) -> list[QueuedRequest]:
    """Of more than MANY requests those with the least value; MANY of them."""
    return requests if len(requests) <= MANY else nsmallest(MANY, requests, key=attrgetter(attribute))


def _with_rate_limited(queued: QueuedRequest, decision: Decision) -> Released:
    queued.set_rate_limited(decision.at)
    seconds = queued.rate_limited_s
    return queued.request_key, replace(decision, rate_limited=seconds) if seconds else decision
