"""The gateway's own queue: what is sent now, what is held back, and for which engine.

An engine takes what it is sent first come, first served, and every prefill stalls the answers beside
it. So its own queue is kept as short as keeps it busy, and the rest waits here, where it can still be
ordered, moved and put last.

Rules:
- A request that finds an endpoint with room is sent at once: nothing is held while there is room.
- An endpoint has room while what it has to prefill is done within ROOM seconds, and the answers it is
  writing can bear another stall (`policies.stall`). An API always has room.
- What waits is bound to the endpoint that its decision chose, earliest deadline first, and counts there as
  work ahead of what is due later. It is decided again when its turn comes, when another engine is idle, or when it
  would be late there and another tier can still make it.
- Where a deadline can be made in another's place only, the one that needs the most engine time gives way
  (Moore and Hodgson 1968: the fewest late jobs on one machine); between tenants, one of the tenant whose
  requests here need the most.
- What can no longer make it, and what has no deadline, waits for an engine that is idle and whose answers
  it does not harm, the tenants in turn: it must not make others miss. It is owed a share SPARED of the engines'
  time whatever else waits: it must not starve. Where its route says `best_effort` it is sent after FORCED seconds.
- The room is bounded: beyond HELD, the latest of the tenant that holds most is refused.
- Yardsticks are not held: they must not inherit our brain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from policies.facts import FOREVER, Ask, Candidate, Decision, FleetSnapshot, Health, Load, Outcome, PromptEstimate
from policies.fleet import Fleet
from policies.lanes import Held, Lanes
from policies.route import Route
from policies.stall import MEMORY, harm
from policies.tiers import decide

ROOM = 0.1  # s of prefill that may wait inside an engine: its next step is never short of work
IDLE = 0.01  # s of prefill under which an engine is idle
HARMLESS = 0.3  # answers that may lose their pace for a request which is late anyway
SHORT = 0.2  # s of prefill
SPARED = 0.05  # of the engines' time, for what waits last
FORCED = 30.0  # s after which what must be sent anyway is
STILL = 0.9  # of the target, that is enough to keep to a plan
RELOOK = 0.1  # s between two questions whether what waits should go to another tier
TICK = 0.05  # s between two looks, where nothing happens
HELD = 4096  # requests
REFUSED = 5.0  # s after which whoever found the room full may try again

Going = tuple[Hashable, Decision]


class WaitingRoom:
    """All requests that are not decided, or decided and not sent. `release` says which go now."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.wake_at = FOREVER
        self._rounds: dict[tuple[str, str], int] = {}  # by tenant and route: turns had, of those that wait last
        self._round = 0  # of the one that had the latest: who comes anew has missed none
        self._owed = 0.0  # s of engine time, to those that wait last

    @property
    def held(self) -> int:
        return len(self.lanes)

    def enter(self, ticket: Hashable, ask: Ask, estimate: PromptEstimate, route: Route, now: float, seed: int) -> None:
        """`ticket` names the request until it has departed or left; `seed` is its ordinal."""
        deadline = ask.arrival + route.ttft_budget(ask.ttft_budget)
        self.lanes.new.append(Held(ticket, ask, estimate, route, seed, deadline))

    def departed(self, ticket: Hashable) -> None:
        """What was released is known to the fleet."""
        self.lanes.leaving.pop(ticket, None)

    def leave(self, ticket: Hashable) -> None:
        """Its caller is gone."""
        self.lanes.drop(ticket)
        if not len(self.lanes):
            self.wake_at = FOREVER

    def release(self, fleet: Fleet, now: float) -> Iterator[Going]:
        """Who goes now, one at a time: the caller sends each before it asks for the next."""
        turn, lanes = Turn(self.lanes, fleet, now), self.lanes
        yield from self._serve_last(turn, owed=True)
        while lanes.new:
            held = lanes.new.pop(0)
            yield from self._let_go(held, turn.place(held), turn)
            if len(lanes) - len(lanes.new) > HELD:
                yield self._refuse(turn)
        if lanes.last or any(lanes.bound.values()):
            yield from self._fill(turn)
        self.wake_at = now + TICK if len(lanes) else FOREVER

    def _fill(self, turn: Turn) -> Iterator[Going]:
        """Every endpoint with room takes what waits for it, then what it can spare time for."""
        for endpoint, lane in tuple(self.lanes.bound.items()):
            while lane and turn.moves(endpoint):
                held = lane.pop(0)
                yield from self._let_go(held, turn.keep(held, endpoint), turn)
            if lane and turn.slips(lane[0]):
                held = lane.pop(0)
                yield from self._let_go(held, turn.place(held), turn)
        for endpoint in turn.idle():
            if (moved := turn.steal(endpoint)) is not None:
                yield from self._let_go(*moved, turn)
        yield from self._serve_last(turn, owed=False)

    def _serve_last(self, turn: Turn, owed: bool) -> Iterator[Going]:
        while self.lanes.last and (late := self._first_last(turn, owed)) is not None:
            yield from self._let_go(*late, turn)

    def _first_last(self, turn: Turn, owed: bool) -> tuple[Held, Decision] | None:
        """The first that may go, of the tenant and route that had the fewest turns: batch, too, gets its own."""
        heads = {(held.route.name, held.tenant): held for held in reversed(self.lanes.last)}
        for held in sorted(heads.values(), key=self._turn):
            if (decision := self._late(held, turn, owed)) is not None:
                self.lanes.last.remove(held)
                self._round = self._had(held)
                self._rounds[held.tenant, held.route.name] = self._round + 1
                return held, decision
        return None

    def _turn(self, held: Held) -> tuple[int, bool, int]:
        return self._had(held), held.deadline == FOREVER, held.seed

    def _had(self, held: Held) -> int:
        return max(self._rounds.get((held.tenant, held.route.name), 0), self._round)

    def _late(self, held: Held, turn: Turn, owed: bool) -> Decision | None:
        """Its decision, if an engine owes it time; or else is free for it, or has to take it."""
        if owed and self._owed < held.seconds:
            return None
        decision = turn.decide(held)
        if decision.chosen is None:
            return decision
        best = soonest(decision)
        seconds = turn.seconds(best)
        if owed:
            may = self._owed >= seconds and turn.has_room(best.endpoint.id)
        else:
            may = turn.is_idle(best.endpoint.id, seconds) or _forced(held, turn.now)
        if not may:
            return None
        self._owed = max(self._owed - seconds, 0.0)
        return first(decision, best)

    def _let_go(self, held: Held, decision: Decision | None, turn: Turn) -> Iterator[Going]:
        """None: it stays."""
        if decision is None:
            return
        if (chosen := decision.chosen) is not None:
            seconds = turn.seconds(chosen)
            self.lanes.send(held, chosen.endpoint, seconds)
            self._owed = self._owed + SPARED * seconds if self.lanes.last else 0.0
        yield held.ticket, decision

    def _refuse(self, turn: Turn) -> Going:
        held = self.lanes.most()
        self.lanes.drop(held.ticket)
        reason = f"{HELD} requests wait already"
        return held.ticket, replace(turn.decide(held), outcome=Outcome.SHED, retry_after=REFUSED, reason=reason)


@dataclass(slots=True)
class Turn:
    """One look at the fleet: decisions, and who has room, as of `now`."""

    lanes: Lanes
    fleet: Fleet
    now: float

    def decide(self, held: Held, patient: bool = False) -> Decision:
        """With what goes before it. `patient`: as if engines whose answers must catch up first were open."""
        snapshot = self.fleet.snapshot(self.now)
        loads = snapshot.loads
        if held.route.scorer != "predicted":
            return decide(held.ask, held.estimate, held.route, snapshot, self.fleet, self.now, held.seed)
        if not self.lanes.quiet or any(load.closed for load in loads.values()):
            ahead = self.lanes.ahead(held)
            loads = {name: _shown(load, ahead.get(name, 0.0), patient) for name, load in loads.items()}
        shown = FleetSnapshot(snapshot.at, snapshot.pools, loads)
        return decide(held.ask, held.estimate, held.route, shown, self.fleet, self.now, held.seed)

    def place(self, held: Held) -> Decision | None:
        """Its decision, if it goes now; else it is held."""
        decision = self.decide(held)
        chosen = decision.chosen
        if chosen is None or held.route.scorer != "predicted" or not self.fleet.is_local(chosen.endpoint.id):
            return decision
        if held.deadline == FOREVER:
            return self._last(held, decision)
        if chosen.chance < held.route.target:
            decision = self.decide(held, patient=True)
        return self._bind(held, decision)

    def _bind(self, held: Held, decision: Decision) -> Decision | None:
        chosen = decision.ranked[0]
        if chosen.chance < held.route.target:
            return None if self._displace(held, decision) else self._last(held, decision)
        if self.has_room(chosen.endpoint.id) and not self.lanes.of(chosen.endpoint.id):
            return decision
        self.lanes.bind(held, chosen.endpoint, self.seconds(chosen))
        return None

    def keep(self, held: Held, endpoint: str) -> Decision | None:
        """Its turn has come: it goes where it was bound if it still makes it there, else it is placed anew."""
        decision = self.decide(held)
        for candidate in decision.ranked:
            if candidate.endpoint.id == endpoint and candidate.chance >= STILL * held.route.target:
                return first(decision, candidate)
        return self.place(held)

    def steal(self, endpoint: str) -> tuple[Held, Decision] | None:
        """The first that waits for another endpoint of the pool, and would rather go to this one now."""
        pool = endpoint.partition("/")[0]
        for name, lane in self.lanes.bound.items():
            if lane and name.partition("/")[0] == pool:
                decision = self.decide(lane[0])
                chosen = decision.chosen
                if chosen is not None and chosen.endpoint.id == endpoint and chosen.chance >= lane[0].route.target:
                    return lane.pop(0), decision
        return None

    def slips(self, held: Held) -> bool:
        """Whether by now another tier would have it, that can still make its deadline."""
        if len(held.route.tiers) == 1 or self.now - held.looked_at < RELOOK:
            return False
        held.looked_at = self.now
        chosen = self.decide(held).chosen
        return (
            chosen is not None
            and held.endpoint is not None
            and chosen.endpoint.pool != held.endpoint.pool
            and chosen.chance >= held.route.target
        )

    def moves(self, endpoint: str) -> bool:
        """Whether a lane moves: there is room, or its endpoint is gone and another must be found."""
        load = self.fleet.snapshot(self.now).loads.get(endpoint)
        return load is None or load.health is Health.DOWN or self.has_room(endpoint)

    def has_room(self, endpoint: str) -> bool:
        load = self.fleet.snapshot(self.now).loads[endpoint]
        return not self.fleet.is_local(endpoint) or (load.busy <= ROOM and not load.closed)

    def idle(self) -> list[str]:
        return [name for name in self.fleet.snapshot(self.now).loads if self.is_idle(name)]

    def is_idle(self, endpoint: str, seconds: float = 0.0) -> bool:
        """Nothing to prefill, nothing waiting, and answers that can bear so many seconds of stall; an API always is."""
        load = self.fleet.snapshot(self.now).loads[endpoint]
        if not self.fleet.is_local(endpoint):
            return load.health is not Health.DOWN
        enough = ROOM if 0.0 < seconds <= SHORT else IDLE  # a short one need not wait for the very end
        if load.health is Health.DOWN or load.busy > enough or load.strain * (1 + seconds / MEMORY) > 1:
            return False
        if self.lanes.of(endpoint) or self.lanes.on_the_way(endpoint):
            return False
        return harm(load, seconds) <= HARMLESS

    def _last(self, held: Held, decision: Decision) -> Decision | None:
        """It waits for an idle engine, behind those that do; and there may be one."""
        best = soonest(decision)
        if not self.lanes.last and self.is_idle(best.endpoint.id, self.seconds(best)):
            return first(decision, best)
        held.seconds = self.seconds(best)
        self.lanes.put_last(held)
        return None

    def _displace(self, held: Held, decision: Decision) -> bool:
        """Put one of those that wait last, if that lets this one make it."""
        need, victims = self.lanes.need(), []
        for candidate in decision.ranked:
            seconds = self.seconds(candidate)
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
        self.lanes.of(candidate.endpoint.id).remove(other)
        self.lanes.put_last(other)
        self.lanes.bind(held, candidate.endpoint, self.seconds(candidate))
        return True

    def seconds(self, candidate: Candidate) -> float:
        return candidate.forecast.prefill


def first(decision: Decision, candidate: Candidate) -> Decision:
    """The same, with this one chosen."""
    others = (other for other in decision.ranked if other is not candidate)
    return replace(decision, ranked=(candidate, *others), outcome=Outcome.PLACE)


def soonest(decision: Decision) -> Candidate:
    """Where nothing is late, of the tier that was preferred."""
    tier = decision.ranked[0].tier if decision.deadline == FOREVER else None
    able = (candidate for candidate in decision.ranked if tier is None or candidate.tier == tier)
    return min(able, key=lambda candidate: candidate.forecast.p50)


def _forced(held: Held, now: float) -> bool:
    return held.route.on_miss == "best_effort" and held.deadline < FOREVER and now - held.ask.arrival > FORCED


def _shown(load: Load, ahead: float, patient: bool) -> Load:
    """As it is to a request that waits here for so many seconds of others' prefill."""
    wait = ahead if patient else ahead + max(load.closed - load.busy, 0.0)
    return replace(load, wait=wait) if wait else load
