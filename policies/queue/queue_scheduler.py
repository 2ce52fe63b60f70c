"""The gateway's own queue: dispatches requests to endpoints with room, and holds all other requests.

An engine serves its queue first come, first served, and every prefill stalls concurrent answers. The engine's queue is
therefore kept just long enough to keep the engine busy; other requests wait in the gateway, to be ordered and moved.

Rules:
- A request is placed on arrival (`policies.queue.placement_round`). A held request in time waits for its decided
  endpoint, earliest deadline first, and counts there as work ahead of later deadlines. The request is decided again at
  the head of the queue.
- Best effort: a request that is late, has no deadline, or is put behind by a part (`policies.queue.queue_part`) waits
  for an idle endpoint with no answers to harm, in the order of the parts, with tenants and routes in turn.
- At most MAX_HELD requests are held; beyond, the latest request of the tenant with most held requests is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import chain
from operator import attrgetter

from policies.fleet.fleet import Fleet
from policies.queue.best_effort_queue import BestEffortQueue
from policies.queue.endpoint_queues import EndpointQueues, QueueKey, QueueView
from policies.queue.hold_rules import TICK, HoldRules, no_room
from policies.queue.late_work import RefusedRequests
from policies.queue.placement_round import PlacementRound
from policies.queue.queue_part import QueuePart, bound_hooks
from policies.queue.queued_request import Hold, QueuedRequest
from policies.scorers.scorers import SCORERS, Scorer
from policies.types import FOREVER, Candidate, Decision, Placement

MAX_HELD = 4096  # requests
MANY = 14  # best-effort queues, or assigned requests that may move: with more, not each is decided at every event
RETRY_AFTER = 5.0  # s, for a request refused because the queue is full

Released = tuple[Hashable, Decision]  # a request key and its placement


class QueueScheduler:
    """All requests not yet decided or not yet dispatched. The caller supplies the clock.

    `scorers`: by the name in a route.
    """

    def __init__(self, parts: Sequence[QueuePart] = (), scorers: Mapping[str, Scorer] = SCORERS) -> None:
        self.parts, self._hooks = parts, bound_hooks(parts)
        self._scorers = scorers
        self.queues = EndpointQueues(BestEffortQueue(self._hooks))
        self.wake_at = FOREVER  # time of the next `release` without an event
        self._served: dict[tuple[str, str], int] = {}  # number of the latest best-effort turn, by tenant and route
        self._turns = 0
        self._refused = RefusedRequests()

    @property
    def held(self) -> int:
        return len(self.queues)

    def enter(self, queued: QueuedRequest) -> None:
        """The request may have waited in another scheduler, which has failed."""
        queued.assigned, queued.late_since = None, FOREVER
        self.queues.new.append(queued)

    def pass_through(self, queued: QueuedRequest, fleet: Fleet, now: float) -> Decision | None:
        """Combine `enter` and `release` if no other request is held. None: the request is now held."""
        self._note_arrival(queued, fleet, now)
        view = QueueView(self.queues, fleet, now, self._scorers)
        decision: Decision | None = view.decide(queued)
        assert decision is not None
        if not self._is_placed_at_once(queued, decision, fleet):
            decision = self._round(fleet, now).place(queued, decision)
        if decision is None:
            self.wake_at = now + TICK
        elif decision.chosen is not None:
            self._dispatch(queued, decision.chosen, now)
        return decision

    def _place(self, queued: QueuedRequest, turn: PlacementRound) -> Decision | None:
        self._note_arrival(queued, turn.fleet, turn.now)
        return turn.place(queued, turn.view.decide(queued))

    def _note_arrival(self, queued: QueuedRequest, fleet: Fleet, now: float) -> None:
        if queued.route.new_meter is not None:
            fleet.on_arrived(queued.route, now)
        if self._refused.until:
            queued.returned |= self._refused.take(queued, now)

    def _is_placed_at_once(self, queued: QueuedRequest, decision: Decision, fleet: Fleet) -> bool:
        """Nothing is held, and no rule holds the request at the engine of its decision: it is in time, no limit counts
        anywhere, and the engine has room."""
        chosen = decision.chosen
        if chosen is None or not decision.in_time or queued.deadline == FOREVER:
            return False
        if fleet.closes or queued.route.scorer != "predicted" or no_room(chosen.load) is not None:
            return False
        queued.prefill_s = chosen.forecast.prefill
        return self._hooks.behind_rule(queued) is None

    def _round(self, fleet: Fleet, now: float) -> PlacementRound:
        view = QueueView(self.queues, fleet, now, self._scorers)
        rules = HoldRules(self.queues, fleet, now, self._hooks)
        return PlacementRound(self.queues, fleet, now, view, rules, self._refused)

    def _dispatch(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        for on_dispatched in self._hooks.on_dispatched:
            on_dispatched(queued, chosen, now)
        self.queues.in_dispatch[queued.request_key] = chosen

    def on_dispatched(self, request_key: Hashable) -> None:
        """The fleet counts the request's first attempt, or there will be none."""
        self.queues.in_dispatch.pop(request_key, None)

    def leave(self, request_key: Hashable, now: float) -> None:
        """Remove a request whose caller has disconnected, or whose route a reload has replaced."""
        if (queued := self.queues.remove(request_key, now)) is not None:
            queued.end_hold(now)
        if not self.held:
            self.wake_at = FOREVER

    def holds(self) -> Iterator[QueuedRequest]:
        """Requests held by a rule."""
        held = chain(self.queues.best_effort, *self.queues.assigned.values())
        return (queued for queued in held if queued.hold is not None)

    def would_place(self, queued: QueuedRequest, fleet: Fleet, now: float) -> tuple[Decision, Hold | None]:
        """The decision of a new request, which is not to be placed, and the rule that would hold it. Changes no
        queue."""
        return self._round(fleet, now).would_place(queued)

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        """Yield requests leaving the queue now; the caller dispatches each before the next is placed."""
        turn, queues = self._round(fleet, now), self.queues
        while queues.new:
            queued = queues.new.pop(0)
            yield from self._released(queued, self._place(queued, turn))
            if self.held - len(queues.new) > MAX_HELD:
                yield self._refuse(turn)
        turn.demote()
        for key in tuple(queues.assigned):
            yield from self._advance(key, turn)
        due = [queued for queued in chain(*queues.assigned.values()) if turn.is_due(queued)]
        for queued in _least(due, "checked_at"):
            if queued.assigned is not None:  # None: postponed for a request that moved before in this loop
                yield from self._released(queued, turn.move(queued))
        turn.recheck_late()
        yield from self._advance_late(turn)
        self.wake_at = now + TICK if self.held else FOREVER

    def _advance(self, key: QueueKey, turn: PlacementRound) -> Iterator[Released]:
        """An endpoint with room takes from its queue; each request is decided again."""
        for queued in self._in_order(key):
            if turn.note_hold(queued):
                break
            self.queues.unassign(queued)
            yield from self._released(queued, turn.place(queued, turn.view.decide(queued)))

    def _in_order(self, key: QueueKey) -> Iterator[QueuedRequest]:
        """Requests of a queue, each yielded at the head: a request that stays at the head ends the iteration."""
        assigned = self.queues.assigned
        for queued in tuple(assigned.get(key, ())):
            if key not in assigned or assigned[key][0] is not queued:
                break
            yield queued

    def _advance_late(self, turn: PlacementRound) -> Iterator[Released]:
        """Idle endpoints take from the best-effort queue: the first able to go, in the order of the parts, of the
        tenant and route served longest ago. Requests that have waited too long are refused."""
        waiting, goes_on = self.queues.best_effort, True
        while waiting and goes_on:
            goes_on = False
            for queued in sorted(self._late_heads(turn), key=self._late_order):
                if (decision := turn.place(queued, turn.view.decide(queued))) is None:
                    continue
                goes_on, begins = True, decision.chosen is not None
                (waiting.begin if begins else waiting.leave)(queued, turn.now)
                yield from self._released(queued, decision)
                if begins:
                    self._turns += 1
                    self._served[queued.tenant, queued.route.name] = self._turns
                    break

    def _late_heads(self, turn: PlacementRound) -> list[QueuedRequest]:
        """The head of each queue. Of many: heads that an idle engine may take, and heads decided longest ago."""
        heads = self.queues.best_effort.heads(turn.now)
        if len(heads) <= MANY:
            return heads
        chosen = (*_least(heads, "checked_at"), *turn.rules.able_to_begin(heads))
        return [*{queued.request_key: queued for queued in chosen}.values()]

    def _late_order(self, queued: QueuedRequest) -> tuple[tuple[float, ...], int, bool, int]:
        by_parts = tuple(chain.from_iterable(precedence(queued) for precedence in self._hooks.precedence))
        turn = self._served.get((queued.tenant, queued.route.name), 0)
        return by_parts, turn, queued.deadline == FOREVER, queued.sequence

    def _released(self, queued: QueuedRequest, decision: Decision | None) -> Iterator[Released]:
        """Release a request by its decision. None: the request stays in the queue."""
        if decision is not None:
            if decision.chosen is not None:
                self._dispatch(queued, decision.chosen, decision.at)
            queued.end_hold(decision.at)
            yield queued.request_key, decision

    def _refuse(self, turn: PlacementRound) -> Released:
        queued, reason = self.queues.latest_of_largest_tenant(), f"{MAX_HELD} requests wait already"
        self.leave(queued.request_key, turn.now)
        decision = turn.view.decide(queued)
        return queued.request_key, replace(decision, outcome=Placement.SHED, retry_after=RETRY_AFTER, reason=reason)


def _least(requests: list[QueuedRequest], attribute: str) -> list[QueuedRequest]:
    """The MANY requests with the smallest attribute values."""
    return requests if len(requests) <= MANY else nsmallest(MANY, requests, key=attrgetter(attribute))
