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

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from heapq import nsmallest
from itertools import chain
from operator import attrgetter

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.fair_share import FairShare
from policies.queue.hold_rules import TICK, HoldRules
from policies.queue.late_work import RefusedRequests
from policies.queue.placement_round import PlacementRound
from policies.queue.queue_view import QueueView
from policies.queue.queued_request import Hold, QueuedRequest
from policies.scorers.scorers import SCORERS, Scorer
from policies.types import FOREVER, NEVER, Candidate, Decision, Placement

MAX_HELD = 4096  # requests
MANY = 16  # best-effort queues, or requests at the last moment: with more, not each is decided at every event
RETRY_AFTER = 5.0  # s, for a request refused because the queue is full

Released = tuple[Hashable, Decision]  # a request key and its placement


class QueueScheduler:
    """All requests that are not decided, or decided and not dispatched. A caller drives it with a clock.

    `scorers`: by the name in a route.
    """

    def __init__(self, scorers: Mapping[str, Scorer] = SCORERS) -> None:
        self._scorers = scorers
        self.queues = EndpointQueues()
        self.wake_at = FOREVER  # time of the next `release` without an event
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
        turn = self._round(fleet, now)
        decision = turn.place(queued, turn.view.decide(queued))
        if decision is None:
            self.wake_at = now + TICK
        elif decision.chosen is not None:
            self._dispatch(queued, decision.chosen, now)
        return decision

    def _round(self, fleet: Fleet, now: float) -> PlacementRound:
        view = QueueView(self.queues, fleet, now, self._scorers)
        rules = HoldRules(self.queues, fleet, now, self._shares)
        return PlacementRound(self.queues, fleet, now, view, rules, self._refused)

    def _dispatch(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        self._shares.charge(queued, chosen, now)
        self.queues.in_dispatch[queued.request_key] = chosen

    def on_dispatched(self, request_key: Hashable) -> None:
        """The fleet counts the request's first attempt, or there will be none."""
        self.queues.in_dispatch.pop(request_key, None)

    def leave(self, request_key: Hashable, now: float = NEVER) -> Mapping[str, float]:
        """Removes a request whose caller is gone; seconds for which each rule had held it."""
        queued = self.queues.remove(request_key)
        if not self.held:
            self.wake_at = FOREVER
        if queued is None:
            return {}
        queued.end_hold(now)
        return queued.held_s

    def holds(self) -> Iterator[QueuedRequest]:
        """Requests that a rule holds now."""
        held = chain(self.queues.best_effort, *self.queues.waiting())
        return (queued for queued in held if queued.hold is not None)

    def would_hold(self, queued: QueuedRequest, decision: Decision, fleet: Fleet) -> Hold | None:
        """The rule that would hold a new request with this decision. Changes nothing."""
        return self._round(fleet, decision.at).would_hold(queued, decision)

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        """Yield requests leaving the queue now; the caller dispatches each before the next is placed."""
        turn, queues = self._round(fleet, now), self.queues
        while queues.new:
            queued = queues.new.pop(0)
            fleet.on_arrived(queued.route, now)
            yield from self._released(queued, turn.place(queued, turn.view.decide(queued)))
            if self.held - len(queues.new) > MAX_HELD:
                yield self._refuse(turn)
        turn.demote()
        if queues.best_effort or queues.assigned or queues.limited:
            yield from self._advance(turn)
        self.wake_at = now + TICK if self.held else FOREVER

    def _advance(self, turn: PlacementRound) -> Iterator[Released]:
        """Every endpoint with room takes from its queue, then from the best-effort queue."""
        for endpoint in tuple(self.queues.assigned):
            yield from self._advance_endpoint(endpoint, turn)
        yield from self._leave_own_limits(turn)
        for queued in _least(self.queues.due_to_spill(turn.now), "spill_at"):
            yield from self._released(queued, turn.spill(queued))
        waiting = self.queues.best_effort
        while waiting and (best_effort := self._next_late(turn)) is not None:
            yield from self._released(*best_effort)
        for queued in _least(waiting.overdue(turn.now), "checked_at"):
            if (refusal := turn.refuse_if_certain(queued)) is not None:
                waiting.remove(queued, turn.now)
                yield from self._released(queued, refusal)

    def _advance_endpoint(self, endpoint: str, turn: PlacementRound) -> Iterator[Released]:
        queues = self.queues
        while (queue := queues.assigned.get(endpoint)) and not turn.note_hold(endpoint):
            queued = queue[0]
            queues.unassign(queued)
            yield from self._released(queued, turn.revalidate(queued, endpoint))
        while queue := queues.assigned.get(endpoint):
            if (decision := turn.leave_closed(queued := queue[0])) is None:
                break
            yield from self._released(queued, decision)
        if queue and queue[0].spill_at < FOREVER and turn.is_due(queue[0]):
            yield from self._released(queue[0], turn.spill(queue[0]))

    def _leave_own_limits(self, turn: PlacementRound) -> Iterator[Released]:
        """Requests whose caller's own limit is over are placed anew; others leave for an endpoint that is open."""
        for key in tuple(self.queues.limited):
            while (queue := self.queues.limited.get(key)) and turn.rules.closed(queue[0], key[0]) is None:
                queued = queue[0]
                self.queues.unassign(queued)
                yield from self._released(queued, turn.place(queued, turn.view.decide(queued)))
                if queued.assigned is not None and queued.own_limit:
                    break
            if queue := self.queues.limited.get(key):
                yield from self._released(queue[0], turn.leave_closed(queue[0]))

    def _next_late(self, turn: PlacementRound) -> tuple[QueuedRequest, Decision] | None:
        """The first able to go, of the tenant with the least recent use, of the route with the fewest turns."""
        for queued in sorted(self._late_heads(turn), key=self._late_order):
            if (decision := turn.next_late(queued)) is not None:
                waiting = self.queues.best_effort
                leave = waiting.remove if decision.chosen is None else waiting.begin
                leave(queued, turn.now)
                self._turn = self._turns_of(queued)
                self._turns[queued.tenant, queued.route.name] = self._turn + 1
                return queued, decision
        return None

    def _late_heads(self, turn: PlacementRound) -> list[QueuedRequest]:
        """The next of each queue; of many, those that an idle engine may take, and those decided longest ago."""
        heads = self.queues.best_effort.heads(turn.now, self._shares.is_over)
        if len(heads) <= MANY:
            return heads
        due = {queued.request_key: queued for queued in _least(heads, "checked_at")}
        able = {queued.request_key: queued for queued in turn.able_to_begin(heads)}
        return [*(due | able).values()]

    def _late_order(self, queued: QueuedRequest) -> tuple[float, int, bool, int]:
        return self._shares.use(queued.tenant), self._turns_of(queued), queued.deadline == FOREVER, queued.sequence

    def _turns_of(self, queued: QueuedRequest) -> int:
        return max(self._turns.get((queued.tenant, queued.route.name), 0), self._turn)

    def _released(self, queued: QueuedRequest, decision: Decision | None) -> Iterator[Released]:
        """None: the request stays in the queue."""
        if decision is not None:
            if decision.chosen is not None:
                self._dispatch(queued, decision.chosen, decision.at)
            yield _with_holds(queued, decision)

    def _refuse(self, turn: PlacementRound) -> Released:
        queued = self.queues.latest_of_largest_tenant()
        self.queues.remove(queued.request_key)
        decision = replace(
            turn.view.decide(queued),
            outcome=Placement.SHED,
            retry_after=RETRY_AFTER,
            reason=f"{MAX_HELD} requests wait already",
        )
        return _with_holds(queued, decision)


def _least(requests: list[QueuedRequest], attribute: str) -> list[QueuedRequest]:
    """Of more than MANY requests those with the least value; MANY of them."""
    return requests if len(requests) <= MANY else nsmallest(MANY, requests, key=attrgetter(attribute))


def _with_holds(queued: QueuedRequest, decision: Decision) -> Released:
    queued.end_hold(decision.at)
    return queued.request_key, replace(decision, held=queued.held_s) if queued.held_s else decision
