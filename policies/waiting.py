"""The gateway's own queue: what is sent now, what is held back, and for which engine.

An engine takes what it is sent first come, first served, and every prefill stalls the answers beside
it. So its own queue is kept as short as keeps it busy, and the rest waits here, where it can still be
ordered, moved and put last.

Rules:
- A request that finds an endpoint with room is sent at once; nothing is held while there is room.
- An endpoint has room while what it must prefill is done within ROOM seconds, and the answers it is
  writing can bear another stall (`Load.debt`).
- What waits is bound to the endpoint that its decision chose, earliest deadline first, and counts there as
  work ahead. It is decided again when its turn comes, or when another endpoint runs out of work.
- Where a deadline can only be made in another's place, the one that needs the most engine time gives way
  (Moore and Hodgson 1968: fewest late jobs on one machine), of the tenant with the most work waiting.
- What can no longer make it is sent only where nothing hopeful waits and the engine has nothing to prefill, or
  from the small share of time that is kept for it: it must not make others miss, and must not starve.
- Work without a deadline waits in the same lane, behind what had one.
- The room is bounded: beyond, the last of the tenant that holds most is refused.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from policies.facts import FOREVER, Ask, Candidate, Decision, Endpoint, FleetSnapshot, Health, Load, Outcome, PromptEstimate
from policies.fleet import Fleet
from policies.route import Route
from policies.stall import lost
from policies.tiers import decide
import os

ROOM = float(os.environ.get("ROOM", "0.1"))  # s of prefill that may wait inside an engine: its next step is never short of work
ALLOW = float(os.environ.get("ALLOW", "1.0"))
SPARED = float(os.environ.get('SPARED','0.8'))
SPARE = float(os.environ.get("SPARE", "0.3"))  # s of it that the hopeless may use
MARGIN = float(os.environ.get("MARGIN", "1.0"))
TICK = 0.05  # s between two looks, where nothing happens
HELD = 4096  # requests


@dataclass(slots=True, eq=False)
class Held:
    """A request that waits."""

    ticket: Hashable
    ask: Ask
    estimate: PromptEstimate
    route: Route
    seed: int
    deadline: float
    endpoint: Endpoint | None = None  # the one it is bound to
    tokens: int = 0  # uncached, there
    seconds: float = 0.0  # of its engine time, there

    def __lt__(self, other: Held) -> bool:
        return (self.deadline, self.seed) < (other.deadline, other.seed)


class WaitingRoom:
    """All requests that are decided and not sent. `release` says which go now."""

    def __init__(self) -> None:
        self.wake_at = FOREVER
        self._bound: dict[str, list[Held]] = {}  # by endpoint, earliest deadline first
        self._last: list[Held] = []  # what waits for spare time, in order of arrival
        self._new: list[Held] = []
        self._leaving: dict[Hashable, Held] = {}  # released, and not yet known to the fleet

    @property
    def held(self) -> int:
        return len(self._new) + len(self._last) + sum(map(len, self._bound.values()))

    def enter(self, ticket: Hashable, ask: Ask, estimate: PromptEstimate, route: Route, now: float, seed: int) -> None:
        deadline = ask.arrival + route.ttft_budget(ask.ttft_budget)
        self._new.append(Held(ticket, ask, estimate, route, seed, deadline))

    def departed(self, ticket: Hashable) -> None:
        """Its attempt is known to the fleet, or its caller is gone."""
        self._leaving.pop(ticket, None)

    def leave(self, ticket: Hashable) -> None:
        """Its caller is gone."""
        self._leaving.pop(ticket, None)
        for lane in (self._new, self._last, *self._bound.values()):
            for held in lane:
                if held.ticket == ticket:
                    lane.remove(held)
                    return

    def release(self, fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        """Who goes now, one at a time: the caller sends each before it asks for the next."""
        while self._new:
            held = self._new.pop(0)
            if (decision := self._place(held, fleet, now)) is not None:
                yield self._go(held, decision, fleet)
        if self._last or any(self._bound.values()):
            yield from self._fill(fleet, now)
        self.wake_at = now + TICK if self.held else FOREVER

    # ---------------------------------------------------------------- one request

    def _place(self, held: Held, fleet: Fleet, now: float) -> Decision | None:
        """Its decision, if it goes now; else it is held."""
        decision = self._decide(held, fleet, now)
        chosen = decision.chosen
        if chosen is None or held.route.scorer != "predicted" or not self._local(chosen, fleet):
            return decision
        load = self._loads(fleet, now)[chosen.endpoint.id]
        if held.deadline == FOREVER or chosen.chance < held.route.target:
            if held.deadline != FOREVER and self._displace(held, decision, fleet, now):
                return None
            if self._idle(load, chosen.endpoint.id, fleet):
                return decision
            self._last.append(held)
            return None
        if self._has_room(load, fleet, now) and not self._bound.get(chosen.endpoint.id):
            return decision
        self._bind(held, chosen, fleet)
        return None

    def _local(self, chosen: Candidate, fleet: Fleet) -> bool:
        return fleet.pool(chosen.endpoint.pool).local

    def _decide(self, held: Held, fleet: Fleet, now: float) -> Decision:
        snapshot = fleet.snapshot(now)
        shown = FleetSnapshot(snapshot.at, snapshot.pools, self._loads(fleet, now))
        return decide(held.ask, held.estimate, held.route, shown, fleet, now, held.seed)

    def _loads(self, fleet: Fleet, now: float) -> dict[str, Load]:
        """With what waits here, and what just left."""
        loads = fleet.snapshot(now).loads
        ahead: dict[str, int] = {}
        for held in chain(chain.from_iterable(self._bound.values()), self._leaving.values()):
            if held.endpoint is not None:
                ahead[held.endpoint.id] = ahead.get(held.endpoint.id, 0) + held.tokens
        if not ahead:
            return loads  # type: ignore[return-value]
        shown = dict(loads)
        for endpoint, tokens in ahead.items():
            if endpoint in shown:
                shown[endpoint] = replace(shown[endpoint], held=float(tokens))
        return shown

    def _bind(self, held: Held, chosen: Candidate, fleet: Fleet) -> None:
        held.endpoint, held.tokens = chosen.endpoint, chosen.uncached
        held.seconds = fleet.prefill(chosen.endpoint, chosen.prompt_tokens, chosen.hit)
        insort(self._bound.setdefault(chosen.endpoint.id, []), held)

    def _displace(self, held: Held, decision: Decision, fleet: Fleet, now: float) -> bool:
        """Put the largest of those that wait last, if that lets this one make it."""
        best: tuple[float, Held, Candidate] | None = None
        for candidate in decision.ranked:
            seconds = fleet.prefill(candidate.endpoint, candidate.prompt_tokens, candidate.hit)
            for other in self._bound.get(candidate.endpoint.id, ()):
                late = candidate.forecast.quantile(held.route.target) - other.seconds - (held.deadline - now)
                if other.seconds > seconds and late <= 0 and (best is None or other.seconds > best[0]):
                    best = other.seconds, other, candidate
        if best is None:
            return False
        _, other, candidate = best
        self._bound[candidate.endpoint.id].remove(other)
        other.endpoint = None
        self._last.append(other)
        self._bind(held, candidate, fleet)
        return True

    def _go(self, held: Held, decision: Decision, fleet: Fleet) -> tuple[Hashable, Decision]:
        chosen = decision.chosen
        if chosen is not None:
            held.endpoint, held.tokens = chosen.endpoint, chosen.uncached
            self._leaving[held.ticket] = held
        return held.ticket, decision

    # ---------------------------------------------------------------- when there is room

    def _fill(self, fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        for endpoint in [*self._bound]:
            while self._bound[endpoint]:
                load = fleet.snapshot(now).loads.get(endpoint)
                if load is not None and load.health is not Health.DOWN and not self._has_room(load, fleet, now, endpoint):
                    break
                held = self._bound[endpoint].pop(0)
                held.endpoint = None
                if (decision := self._place_bound(held, endpoint, fleet, now)) is not None:
                    yield self._go(held, decision, fleet)
        yield from self._spare(fleet, now)

    def _place_bound(self, held: Held, endpoint: str, fleet: Fleet, now: float) -> Decision | None:
        """Its turn has come: it goes to its endpoint if it still makes it there, or wherever it is decided now."""
        decision = self._decide(held, fleet, now)
        for candidate in decision.ranked:
            if candidate.endpoint.id == endpoint and candidate.chance >= held.route.target * 0.9:
                ranked = (candidate, *(c for c in decision.ranked if c is not candidate))
                return replace(decision, ranked=ranked, outcome=Outcome.PLACE)
        return self._place(held, fleet, now)

    def _spare(self, fleet: Fleet, now: float) -> Iterator[tuple[Hashable, Decision]]:
        """Idle engines: first what waits for another, then what waits for spare time."""
        for endpoint, load in fleet.snapshot(now).loads.items():
            if load.health is Health.DOWN or self._bound.get(endpoint) or not fleet.is_local(endpoint):
                continue
            if not self._idle(load, endpoint, fleet) or any(h.endpoint and h.endpoint.id == endpoint for h in self._leaving.values()):
                continue
            stolen = self._steal(endpoint, fleet, now)
            if stolen is not None:
                yield self._go(*stolen, fleet)
            elif self._last:
                for held in self._last:
                    decision = self._decide(held, fleet, now)
                    mine = [c for c in decision.ranked if c.endpoint.id == endpoint]
                    if mine:
                        self._last.remove(held)
                        ranked = (mine[0], *(c for c in decision.ranked if c is not mine[0]))
                        yield self._go(held, replace(decision, ranked=ranked, outcome=Outcome.PLACE), fleet)
                        break

    def _steal(self, endpoint: str, fleet: Fleet, now: float) -> tuple[Held, Decision] | None:
        for other, waiting in self._bound.items():
            for held in waiting:
                if held.endpoint is None or held.endpoint.pool != endpoint.partition("/")[0]:
                    continue
                decision = self._decide(held, fleet, now)
                chosen = decision.chosen
                if chosen is not None and chosen.endpoint.id == endpoint and chosen.chance >= held.route.target:
                    waiting.remove(held)
                    return held, decision
                break
        return None

    def _harm(self, load, seconds):
        return lost(load.harm, seconds + load.stalled) - lost(load.harm, load.stalled) if load.harm else 0.0

    def _has_room(self, load: Load, fleet: Fleet, now: float, endpoint: str = "") -> bool:
        return load.busy <= ROOM and load.duty <= load.bearable and self._harm(load, 0.35) <= ALLOW

    def _idle(self, load: Load, endpoint: str, fleet: Fleet) -> bool:
        return load.busy <= 0.01 and load.duty <= SPARED * load.bearable and self._harm(load, 1.0) <= SPARE and not self._bound.get(endpoint)
