"""The gateway's own queue: what is sent now, what is held back, and for which engine.

An engine takes what it is sent first come, first served, and every prefill stalls the answers beside
it. So its own queue is kept as short as keeps it busy, and the rest waits here, where it can still be
ordered, moved and put last.

Rules:
- A request that finds an endpoint with room (`policies.queue.placement_round`) is sent at once: nothing is held
  while there is room.
- What waits is bound to the endpoint that its decision chose, earliest deadline first, and counts there as
  work ahead of what is due later. It is decided again when its turn comes, and when another engine is idle. It leaves
  for another tier when that promises more, and at the last moment at which that one surely makes its deadline.
- Where a deadline can be made in another's place only, the one that needs the most engine time gives way
  (Moore and Hodgson 1968: the fewest late jobs on one machine); between tenants, one of the tenant whose
  requests here need the most.
- What can no longer make it, and what has no deadline, waits for an endpoint that is idle and whose answers
  it does not harm, the tenants in turn: it must not make others miss. It is owed a share SPARED of the engines'
  time whatever else waits: it must not starve. Where its route says `best_effort` it is sent after FORCED seconds.
- The room is bounded: beyond HELD, the latest of the tenant that holds most is refused.
- Yardsticks are not held: they must not inherit our brain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues, QueuedRequest
from policies.queue.placement_round import TICK, PlacementRound, first
from policies.routes.route import Route
from policies.types import FOREVER, NEVER, Candidate, Decision, Placement, PromptEstimate, RequestView

SPARED = 0.05  # of the engines' time, for what waits last
FORCED = 30.0  # s after which what must be sent anyway is
HELD = 4096  # requests
REFUSED = 5.0  # s after which whoever found the room full may try again

Going = tuple[Hashable, Decision]


class QueueScheduler:
    """All requests that are not decided, or decided and not sent. `release` says which go now."""

    def __init__(self) -> None:
        self.lanes = EndpointQueues()
        self.wake_at = FOREVER
        self._limited: dict[str, float] = {}
        self._rounds: dict[tuple[str, str], int] = {}  # by tenant and route: turns had, of those that wait last
        self._round = 0  # of the one that had the latest: who comes anew has missed none
        self._owed = 0.0  # s of engine time, to those that wait last

    @property
    def held(self) -> int:
        return len(self.lanes)

    def enter(
        self, ticket: Hashable, ask: RequestView, estimate: PromptEstimate, route: Route, now: float, seed: int
    ) -> None:
        """`ticket` names the request until it has departed or left; `seed` is its ordinal."""
        self.lanes.new.append(_held(ticket, ask, estimate, route, seed))

    def pass_through(
        self,
        ticket: Hashable,
        ask: RequestView,
        estimate: PromptEstimate,
        route: Route,
        fleet: Fleet,
        now: float,
        seed: int,
    ) -> Decision | None:
        """`enter` and `release` in one, for where nobody is held. None: it is held now."""
        held = _held(ticket, ask, estimate, route, seed)
        decision = PlacementRound(self.lanes, fleet, now, self._limited).place(held)
        if decision is None:
            self.wake_at = now + TICK
        elif (chosen := decision.chosen) is not None:
            self.lanes.send(ticket, chosen.endpoint, chosen.forecast.prefill)
        return decision

    def on_dispatched(self, ticket: Hashable) -> None:
        """What was released is known to the fleet."""
        self.lanes.leaving.pop(ticket, None)

    def leave(self, ticket: Hashable, now: float = NEVER) -> float:
        """Its caller is gone. For how many seconds a rate limit had kept it."""
        held = self.lanes.drop(ticket)
        if not len(self.lanes):
            self.wake_at = FOREVER
        if held is None:
            return 0.0
        held.wait_on(now)
        return held.rate_limited_s

    def release(self, fleet: Fleet, now: float) -> Iterator[Going]:
        """Who goes now, one at a time: the caller sends each before it asks for the next."""
        turn, lanes = PlacementRound(self.lanes, fleet, now, self._limited), self.lanes
        yield from self._serve_last(turn, owed=True)
        while lanes.new:
            held = lanes.new.pop(0)
            yield from self._let_go(held, turn.place(held))
            if len(lanes) - len(lanes.new) > HELD:
                yield self._refuse(turn)
        if lanes.best_effort_queue or lanes.assigned:
            yield from self._fill(turn)
        self.wake_at = now + TICK if len(lanes) else FOREVER

    def _fill(self, turn: PlacementRound) -> Iterator[Going]:
        """Every endpoint with room takes what waits for it, then what it can spare time for."""
        lanes = self.lanes
        for endpoint in tuple(lanes.assigned):
            while (lane := lanes.of(endpoint)) and turn.moves(endpoint):
                lanes.unbind(held := lane[0])
                yield from self._let_go(held, turn.revalidate(held, endpoint))
            if lane and turn.is_overdue(lane[0]):
                yield from self._move_on(lane[0], turn)
        for held in lanes.must_leave(turn.now):
            yield from self._move_on(held, turn)
        for endpoint in turn.idle():
            if (moved := turn.rebalance(endpoint)) is not None:
                yield from self._let_go(*moved)
        yield from self._serve_last(turn, owed=False)

    def _move_on(self, held: QueuedRequest, turn: PlacementRound) -> Iterator[Going]:
        if (left := turn.leave(held)) is not None:
            yield from self._let_go(held, left[0])

    def _serve_last(self, turn: PlacementRound, owed: bool) -> Iterator[Going]:
        while self.lanes.best_effort_queue and (late := self._first_last(turn, owed)) is not None:
            yield from self._let_go(*late)

    def _first_last(self, turn: PlacementRound, owed: bool) -> tuple[QueuedRequest, Decision] | None:
        """The first that may go, of the tenant and route that had the fewest turns: batch, too, gets its own."""
        heads = {(held.route.name, held.tenant): held for held in reversed(self.lanes.best_effort_queue)}
        for held in sorted(heads.values(), key=self._turn):
            if (decision := self._late(held, turn, owed)) is not None:
                self.lanes.best_effort_queue.remove(held)
                self._round = self._had(held)
                self._rounds[held.tenant, held.route.name] = self._round + 1
                return held, decision
        return None

    def _turn(self, held: QueuedRequest) -> tuple[int, bool, int]:
        return self._had(held), held.deadline == FOREVER, held.seed

    def _had(self, held: QueuedRequest) -> int:
        return max(self._rounds.get((held.tenant, held.route.name), 0), self._round)

    def _late(self, held: QueuedRequest, turn: PlacementRound, owed: bool) -> Decision | None:
        """Its decision, if an engine owes it time; or else is free for it, or has to take it."""
        if owed and self._owed < held.seconds:
            return None
        decision = turn.decide(held)
        if decision.chosen is None:
            return decision
        soonest = turn.soonest(held, decision)
        best = self._owing(soonest[0], turn) if owed else self._free(held, soonest, turn)
        if best is None:
            held.wait_on(turn.now, turn.is_kept(held, decision, soonest))
            return None
        self._owed = max(self._owed - best.forecast.prefill, 0.0)
        return first(decision, best)

    def _owing(self, soonest: Candidate, turn: PlacementRound) -> Candidate | None:
        endpoint = soonest.endpoint.id
        may = self._owed >= soonest.forecast.prefill and turn.has_room(endpoint) and not turn.is_limited(endpoint)
        return soonest if may else None

    def _free(self, held: QueuedRequest, soonest: list[Candidate], turn: PlacementRound) -> Candidate | None:
        return turn.free(soonest) or (soonest[0] if _forced(held, turn.now) else None)

    def _let_go(self, held: QueuedRequest, decision: Decision | None) -> Iterator[Going]:
        """None: it stays."""
        if decision is None:
            return
        if (chosen := decision.chosen) is not None:
            seconds = chosen.forecast.prefill
            self.lanes.send(held.request_key, chosen.endpoint, seconds)
            self._owed = self._owed + SPARED * seconds if self.lanes.best_effort_queue else 0.0
        yield held.request_key, _waited(held, decision)

    def _refuse(self, turn: PlacementRound) -> Going:
        held = self.lanes.most()
        self.lanes.drop(held.request_key)
        reason = f"{HELD} requests wait already"
        refused = replace(turn.decide(held), outcome=Placement.SHED, retry_after=REFUSED, reason=reason)
        return held.request_key, _waited(held, refused)


def _held(ticket: Hashable, ask: RequestView, estimate: PromptEstimate, route: Route, seed: int) -> QueuedRequest:
    return QueuedRequest(ticket, ask, estimate, route, seed, ask.arrival + route.ttft_budget(ask.ttft_budget))


def _waited(held: QueuedRequest, decision: Decision) -> Decision:
    held.wait_on(decision.at)
    return replace(decision, rate_limited=held.rate_limited_s) if held.rate_limited_s else decision


def _forced(held: QueuedRequest, now: float) -> bool:
    return held.route.on_miss == "best_effort" and held.deadline < FOREVER and now - held.ask.arrival > FORCED
