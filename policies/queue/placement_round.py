"""One look of the waiting room at the fleet: decisions that know who else waits, and which endpoint has room.

Rules:
- What waits at an endpoint and is due no later counts there as work ahead; so do the seconds until its answers can
  bear another prefill.
- An endpoint has room while what it has to prefill is done within ROOM seconds, and the answers it is
  writing can bear another stall (`policies.fleet.decode_interference`). An API always has room.
- A forecast of when an engine's answers will have caught up is not to be relied on, one of another tier is. So what
  waits leaves for another tier when that one is better by the forecasts, and whatever these say at the last moment at
  which the other makes its deadline at RISK of the usual risk.
- Late and idle go together: an endpoint is idle if a prefill there would keep nobody else from their deadline or pace.
  An API is, unless it was at its rate limit within QUOTA seconds: then each request taken is one that others lack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.fleet.circuit_breaker import RATE_LIMIT_WINDOW as QUOTA
from policies.fleet.decode_interference import TIME_CONSTANT, expected_tpot_misses
from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues, QueuedRequest
from policies.routing.tiers import decide
from policies.types import FOREVER, NEVER, Candidate, Decision, FleetSnapshot, Health, Load, Placement

ROOM = 0.1  # s of prefill that may wait inside an engine: its next step is never short of work
IDLE = 0.01  # s of prefill under which an engine is idle
HARMLESS = 0.3  # answers that may lose their pace for a request which is late anyway
SHORT = 0.2  # s of prefill
STILL = 0.9  # of the target, that is enough to keep to a plan
RISK = 0.5  # of what the target leaves: who waits to the last moment should not miss more for having waited
RELOOK = 0.1  # s between two questions whether what waits should go to another tier
TICK = 0.05  # s between two looks, where nothing happens


@dataclass(slots=True)
class PlacementRound:
    """Decisions, and who has room, as of `now`. `limited`: until when APIs were last at their rate limit."""

    lanes: EndpointQueues
    fleet: Fleet
    now: float
    limited: dict[str, float]

    # ---------------------------------------------------------------- decisions

    def decide(self, held: QueuedRequest, patient: bool = False) -> Decision:
        """With what goes before it. `patient`: as if engines whose answers must catch up first were open."""
        snapshot = self.fleet.snapshot(self.now)
        if held.route.scorer == "predicted":
            snapshot = self._shown(snapshot, held, patient)
        return decide(held.ask, held.estimate, held.route, snapshot, self.fleet, self.now, held.seed)

    def _shown(self, snapshot: FleetSnapshot, held: QueuedRequest, patient: bool) -> FleetSnapshot:
        """As it is to a request that waits here for others' prefill."""
        loads, quiet = snapshot.loads, self.lanes.quiet
        if quiet and (patient or not any(load.reopens_in for load in loads.values())):
            return snapshot
        ahead = {} if quiet else self.lanes.ahead(held)
        shown = {name: _waiting(load, ahead.get(name, 0.0), patient) for name, load in loads.items()}
        return FleetSnapshot(snapshot.at, snapshot.pools, shown)

    def place(self, held: QueuedRequest) -> Decision | None:
        """Its decision, if it goes now; else it is held."""
        decision = self.decide(held)
        chosen = decision.chosen
        if chosen is None or held.route.scorer != "predicted" or not self.fleet.is_local(chosen.endpoint.id):
            return decision
        if held.deadline == FOREVER:
            return self._last(held, decision)
        if chosen.probability < held.route.target:
            decision = self.decide(held, patient=True)
            chosen = decision.ranked[0]
            if chosen.probability < held.route.target:
                return None if self._displace(held, decision) else self._last(held, decision)
        return decision if self._goes(held, decision, chosen) else None

    def _goes(self, held: QueuedRequest, decision: Decision, chosen: Candidate) -> bool:
        """Now, if there is room and nobody waits there; else it is bound."""
        endpoint = chosen.endpoint.id
        if endpoint not in self.lanes.assigned and self.has_room(endpoint):
            return True
        self._bind(held, decision, chosen)
        return False

    def _bind(self, held: QueuedRequest, decision: Decision, chosen: Candidate) -> None:
        held.looked_at = self.now
        leave_by = self._later(self._leave_by(held, decision, chosen.endpoint.pool))
        held.wait_on(self.now, held.route.prefer == "quality" and self._refused(decision, chosen.tier))
        self.lanes.bind(held, chosen.endpoint, chosen.forecast.prefill, leave_by)

    def _leave_by(self, held: QueuedRequest, decision: Decision, pool: str) -> float:
        """When a tier other than `pool` could only just make its deadline."""
        if len(held.route.tiers) == 1:
            return FOREVER
        sure = 1 - (1 - held.route.target) * RISK
        others = [c.forecast.quantile(sure) for c in decision.ranked if c.endpoint.pool != pool]
        return held.deadline - min(others, default=FOREVER) - TICK

    def _last(self, held: QueuedRequest, decision: Decision) -> Decision | None:
        """It waits for an idle endpoint, behind those that do; and there may be one."""
        soonest = self.soonest(held, decision)
        if not self.lanes.best_effort_queue and (free := self.free(soonest)) is not None:
            return first(decision, free)
        held.seconds = soonest[0].forecast.prefill
        held.wait_on(self.now, self.is_kept(held, decision, soonest))
        self.lanes.put_last(held)
        return None

    def _displace(self, held: QueuedRequest, decision: Decision) -> bool:
        """Put one of those that wait last, if that lets this one make it."""
        need, victims = self.lanes.need(), []
        for candidate in decision.ranked:
            seconds = candidate.forecast.prefill
            excess = candidate.forecast.quantile(held.route.target) - (held.deadline - self.now)
            for other in self.lanes.of(candidate.endpoint.id):
                if other.deadline > held.deadline or other.seconds < excess:
                    continue
                own, its = need.get(held.tenant, 0.0) + seconds, need[other.tenant]
                if other.seconds > seconds if other.tenant == held.tenant else its > own:
                    victims.append((its, other.seconds, other, candidate))
        if not victims:
            return False
        _, _, other, candidate = max(victims, key=lambda victim: victim[:2])
        self.lanes.unbind(other)
        self.lanes.put_last(other)
        self._bind(held, decision, candidate)
        return True

    # ---------------------------------------------------------------- what is bound

    def revalidate(self, held: QueuedRequest, endpoint: str) -> Decision | None:
        """Its turn has come: it goes where it was bound if it still makes it there, else it is placed anew."""
        decision = self.decide(held)
        for candidate in decision.ranked:
            if candidate.endpoint.id == endpoint and candidate.probability >= STILL * held.route.target:
                return first(decision, candidate)
        return self.place(held)

    def leave(self, held: QueuedRequest) -> tuple[Decision | None] | None:
        """For another tier, if that should have it by now: its decision if it goes at once. None: it stays."""
        assert held.endpoint is not None
        decision, here, target = self.decide(held), held.endpoint.pool, held.route.target
        leave_by = self._leave_by(held, decision, here)
        self.lanes.leave_later(held, self._later(leave_by))
        if self.now >= leave_by:
            target *= STILL
        elif decision.ranked[0].endpoint.pool == here:
            return None
        for candidate in decision.ranked:
            if candidate.endpoint.pool != here and candidate.probability >= target:
                self.lanes.unbind(held)
                return (first(decision, candidate) if self._goes(held, decision, candidate) else None,)
        return None

    def _later(self, at: float) -> float:
        """What cannot be helped now is looked at again."""
        return at if at > self.now else self.now + RELOOK

    def is_overdue(self, held: QueuedRequest) -> bool:
        """For a look whether another tier should have it."""
        if held.spill_at == FOREVER or self.now - held.looked_at < RELOOK:
            return False
        held.looked_at = self.now
        return True

    def rebalance(self, endpoint: str) -> tuple[QueuedRequest, Decision] | None:
        """The first that waits for another endpoint of the pool, and would rather go to this one now."""
        pool = endpoint.partition("/")[0]
        for name, lane in self.lanes.assigned.items():
            if name.partition("/")[0] == pool:
                held, decision = lane[0], self.decide(lane[0])
                chosen = decision.chosen
                if chosen is not None and chosen.endpoint.id == endpoint and chosen.probability >= held.route.target:
                    self.lanes.unbind(held)
                    return held, decision
        return None

    # ---------------------------------------------------------------- endpoints

    def soonest(self, held: QueuedRequest, decision: Decision) -> list[Candidate]:
        """Where what is late would be least so, tier by tier; of the tier that was preferred, if it has no deadline.

        An API at its limit comes behind all others.
        """
        by_pool: dict[str, Candidate] = {}
        for candidate in decision.ranked:
            if held.deadline == FOREVER and candidate.tier != decision.ranked[0].tier:
                continue
            best = by_pool.setdefault(candidate.endpoint.pool, candidate)
            if candidate.forecast.p50 < best.forecast.p50:
                by_pool[candidate.endpoint.pool] = candidate
        return sorted(by_pool.values(), key=lambda c: (self.is_limited(c.endpoint.id), c.forecast.p50))

    def moves(self, endpoint: str) -> bool:
        """Whether a lane moves: there is room, or its endpoint is gone and another must be found."""
        load = self.fleet.snapshot(self.now).loads.get(endpoint)
        return load is None or load.health is Health.DOWN or self.has_room(endpoint)

    def has_room(self, endpoint: str) -> bool:
        load = self.fleet.snapshot(self.now).loads[endpoint]
        return (load.backlog_s <= ROOM and not load.reopens_in) or not self.fleet.is_local(endpoint)

    def is_limited(self, endpoint: str) -> bool:
        """An API that was at its rate limit lately."""
        blocked_until = self.fleet.snapshot(self.now).loads[endpoint].blocked_until
        if blocked_until > self.now:
            self.limited[endpoint] = blocked_until
        return self.now - self.limited.get(endpoint, NEVER) <= QUOTA

    def is_kept(self, held: QueuedRequest, decision: Decision, soonest: list[Candidate]) -> bool:
        """Whether an API would have what waits last, but for its rate limit."""
        if any(self.is_limited(c.endpoint.id) and not self.fleet.is_local(c.endpoint.id) for c in soonest):
            return True
        tier = decision.ranked[0].tier if held.deadline == FOREVER else len(held.route.tiers)
        return self._refused(decision, tier)

    def _refused(self, decision: Decision, tier: int) -> bool:
        """Whether an API of a tier before this one was left out because it refuses for a while."""
        loads = self.fleet.snapshot(self.now).loads
        return any(
            out.tier < tier
            and out.endpoint
            and not self.fleet.is_local(out.endpoint)
            and loads[out.endpoint].blocked_until > self.now
            for out in decision.rejected
        )

    def free(self, candidates: list[Candidate]) -> Candidate | None:
        """The first that is idle."""
        idle = (c for c in candidates if self.is_idle(c.endpoint.id, c.forecast.prefill))
        return next(idle, None)

    def idle(self) -> list[str]:
        return [name for name in self.fleet.snapshot(self.now).loads if self.is_idle(name)]

    def is_idle(self, endpoint: str, seconds: float = 0.0) -> bool:
        """Nothing to prefill, nothing waiting, and answers that can bear so many seconds of stall."""
        load = self.fleet.snapshot(self.now).loads[endpoint]
        if not self.fleet.is_local(endpoint):
            return not self.is_limited(endpoint) and load.health is not Health.DOWN
        enough = ROOM if 0.0 < seconds <= SHORT else IDLE  # a short one need not wait for the very end
        if (
            load.health is Health.DOWN
            or load.backlog_s > enough
            or load.tpot_pressure * (1 + seconds / TIME_CONSTANT) > 1
        ):
            return False
        if self.lanes.of(endpoint) or self.lanes.on_the_way(endpoint):
            return False
        return expected_tpot_misses(load, seconds) <= HARMLESS


def first(decision: Decision, candidate: Candidate) -> Decision:
    """The same, with this one chosen."""
    others = (other for other in decision.ranked if other is not candidate)
    return replace(decision, ranked=(candidate, *others), outcome=Placement.PLACE)


def _waiting(load: Load, ahead: float, patient: bool) -> Load:
    """As it is to a request that waits here for so many seconds of others' prefill."""
    wait = ahead if patient else ahead + max(load.reopens_in - load.backlog_s, 0.0)
    return replace(load, wait=wait) if wait else load
