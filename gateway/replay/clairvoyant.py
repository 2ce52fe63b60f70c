"""What was possible: a scheduler that sees the machines themselves, and knows how long every answer will be.

It stands in for the waiting room of a replay, so that every result can be told as a share of what was
reachable. Relaxed, in its favour, against what any gateway can know or do:
- Service times are exact: the machine's own profile, its present slowness, the chunks of a prefill and what
  decodes beside them. Only the noise of single steps (5 %) is unknown to it.
- Caches are perfect: a prefix that one engine of a pool ever computed is at hand on all of them.
- Lengths of answers are known, so the credit that each answer has before it loses its pace is exact.
- What will come within the next seconds is known (gateway.replay.demand).
- Dead machines are known as such at once, nothing hangs, and what dies before its first token starts anew.

Rules:
- Earliest deadline first, from one queue per pool, bound late: an engine is given its next prompt when the
  last chunk of the one before is under way, so that nothing ever waits inside an engine.
- Where not all can be in time the one that needs the most engine time gives way (Moore and Hodgson 1968): to the
  route's next tier and, behind the last one, to whoever has time left.
- Where more will come than can be good, what costs the most engine time is not begun.
- No prefill begins that takes the pace from an answer that would keep it otherwise.
- What is late, or in no hurry, goes where most engines are idle, and will not be needed.

Why it bounds what is reachable, in practice: every relaxation only removes work or doubt, and for one machine without
a pace to keep the first two rules are optimal for the number of requests in time. It is no proof: with
several machines and with a pace this is a greedy answer to a problem that is NP-hard. A policy that beats it shows
where it is no bound; on the scenarios of benchmarks/ROUTING.md none does.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence

from backends.simulated.hosted import HostedApi
from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.clairvoyant_plan import EngineGroup, PlannedRequest
from gateway.replay.demand import AHEAD
from gateway.replay.exact_engine import ExactAnswer, Machine
from gateway.replay.scenario import Scenario
from gateway.replay.sim_fleet import SimFleet
from gateway.replay.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.routes.route import Route, Tier
from policies.types import FOREVER, Candidate, Decision, Endpoint, Forecast, Placement, PromptEstimate, RequestView

TICK, IDLE_TICK = 0.015, 0.25  # s between two looks; the latter where only what is late or in no hurry waits
SURE, LUCKY = 1.6, 0.5  # times an API's median TTFT: nine of ten make the one, one of forty the other

Placed = tuple[Hashable, Decision]


class Clairvoyant:
    """Has the methods of `policies.queue.queue_scheduler.WaitingRoom`, and is told of first tokens and endings."""

    def __init__(self, world: SimFleet, setting: Scenario, arrivals: Sequence[Arrival]) -> None:
        self.wake_at = FOREVER
        self._world, self._arrivals = world, arrivals
        self._pools = {pool.name: pool for pool in setting.pools}
        engines = (p for p in self._pools.values() if isinstance(world.machines[p.endpoints[0].id], VirtualEngine))
        self._groups = {pool.name: EngineGroup(pool, world, arrivals, setting.routes) for pool in engines}
        self._new: list[PlannedRequest] = []  # to be offered to their tier
        self._spare: list[PlannedRequest] = []
        self._sent: dict[int, tuple[PlannedRequest, Machine]] = {}  # by ticket, until the first token
        self._answers: dict[int, tuple[Machine, int]] = {}
        self._barren: dict[str, tuple[int, int]] = {}  # what was seen when an engine could take none of the spare

    @property
    def held(self) -> int:
        return len(self._new) + len(self._spare) + sum(len(group.queue) for group in self._groups.values())

    def enter(
        self, ticket: int, ask: RequestView, estimate: PromptEstimate, route: Route, now: float, seed: int
    ) -> None:
        """`ticket`: the number of its arrival."""
        deadline = ask.arrival + route.ttft_budget(ask.ttft_budget)
        arrival = self._arrivals[ticket - 1]
        job = PlannedRequest(ticket, arrival, route, deadline, self._tiers(ask, route, arrival))
        if deadline == FOREVER and job.tiers:
            insort(self._spare, job)
        else:
            self._new.append(job)

    def _tiers(self, ask: RequestView, route: Route, arrival: Arrival) -> tuple[int, ...]:
        """Those that can ever take it, in the order of preference."""
        fit = [i for i, tier in enumerate(route.tiers) if self._fits(ask, tier, arrival)]
        if route.prefer == "cost":
            fit.sort(key=lambda i: self._pools[route.tiers[i].pool].price.of(1000, 300))
        return tuple(fit)

    def _fits(self, ask: RequestView, tier: Tier, arrival: Arrival) -> bool:
        window = self._pools[tier.pool].context_window or FOREVER
        fits = arrival.prompt_tokens + arrival.output_tokens <= window
        return fits and (tier.when is None or not tier.when.refuses(ask, arrival.prompt_tokens))

    def on_dispatched(self, ticket: Hashable) -> None:
        """It was sent."""

    def leave(self, ticket: Hashable) -> float:
        """In a replay no caller leaves."""
        return 0.0

    def began(self, ticket: int, key: int, now: float) -> None:
        """Its first token is here; the engine calls it `key`."""
        if (sent := self._sent.pop(ticket, None)) is not None:
            (job, machine), tokens = sent, self._arrivals[ticket - 1].output_tokens
            machine.answers[key] = ExactAnswer(tokens, job.arrival.prompt_tokens, now + job.pace * max(tokens - 1, 1))
            machine.touch()
            self._answers[ticket] = machine, key

    def ended(self, ticket: int) -> None:
        """Its answer is over, or its engine is."""
        self._sent.pop(ticket, None)
        if (found := self._answers.pop(ticket, None)) is not None:
            machine, key = found
            del machine.answers[key]
            machine.touch()

    # ---------------------------------------------------------------- decisions

    def release(self, fleet: Fleet, now: float) -> Iterator[Placed]:
        """Who goes now, one at a time: the caller sends each before it asks for the next."""
        pending = {name: group for name, group in self._groups.items() if group.queue}
        while self._new or pending:
            while self._new:
                if (placed := self._offer(self._new.pop(0), pending, now)) is not None:
                    yield placed
            if pending:
                group = pending.pop(next(iter(pending)))
                go, late = group.plan(now)
                for job, machine in go:
                    yield self._send(job, machine, now)
                for job in late:
                    job.at += 1
                self._new += late
        yield from self._fill(now)
        hurried = any(group.queue for group in self._groups.values())
        self.wake_at = now + TICK if hurried else now + IDLE_TICK if self._spare else FOREVER

    def _offer(self, job: PlannedRequest, pending: dict[str, EngineGroup], now: float) -> Placed | None:
        """To the queue of its tier's engines, or to its tier's API; behind the last tier to any API at all."""
        if not job.tiers:
            return job.ticket, Decision(Placement.UNFIT, now, job.deadline, scorer="reference")
        while (pool := job.pool) is not None:
            if (group := self._groups.get(pool)) is not None:
                group.add(job)
                pending[pool] = group
                return None
            if (placed := self._to_api(job, pool, now, SURE)) is not None:
                return placed
            job.at += 1
        for pool in (job.route.tiers[tier].pool for tier in job.tiers):
            if pool not in self._groups and (placed := self._to_api(job, pool, now, LUCKY)) is not None:
                return placed
        insort(self._spare, job)
        return None

    def _fill(self, now: float) -> Iterator[Placed]:
        """Engines that will not be needed take what is late, or in no hurry."""
        for group in self._groups.values():
            if group.queue or not self._spare or group.demand.limit(now) < FOREVER:
                continue
            ready = [machine for machine in group.machines if machine.wants(now)]
            kept = max(len(group.machines) // 2, 1) if group.demand.comes(now, now + AHEAD) else 0  # for those
            for machine in sorted(ready, key=lambda machine: machine.context)[: max(len(ready) - kept, 0)]:
                if (job := self._filling(group, machine, now)) is not None:
                    self._spare.remove(job)
                    yield self._send(job, machine, now)

    def _filling(self, group: EngineGroup, machine: Machine, now: float) -> PlannedRequest | None:
        machine.look()
        seen = machine.version, len(self._spare)
        if self._barren.get(machine.endpoint.id) == seen:
            return None
        for job in self._spare:
            if self._wants(job, group.pool.name) and group.first_token(job, machine, now) is not None:
                return job
        self._barren[machine.endpoint.id] = seen
        return None

    def _wants(self, job: PlannedRequest, pool: str) -> bool:
        """What is in no hurry can wait for the tier that it wants most."""
        tiers = job.tiers if job.deadline < FOREVER else job.tiers[:1]
        return any(job.route.tiers[tier].pool == pool for tier in tiers)

    # ---------------------------------------------------------------- sending

    def _send(self, job: PlannedRequest, machine: Machine, now: float) -> Placed:
        group = self._groups[machine.endpoint.pool]
        hit = group.hit(job)
        group.forget(job)
        machine.clear_at = machine.free_at(now) + machine.prefill(job.arrival.prompt_tokens, hit)[0]
        self._sent[job.ticket] = job, machine
        return job.ticket, _decision(job, machine.endpoint, hit, machine.clear_at - now, now)

    def _to_api(self, job: PlannedRequest, pool: str, now: float, times: float) -> Placed | None:
        """If it is in time there at `times` the median."""
        for endpoint in self._pools[pool].endpoints:
            machine = self._world.machines[endpoint.id]
            if isinstance(machine, HostedApi) and machine.alive and machine.remaining(now) > 0:
                median = machine.profile.ttft + machine.profile.ttft_per_token * job.arrival.prompt_tokens
                if now + times * median <= job.deadline:
                    return job.ticket, _decision(job, endpoint, 0, median, now)
        return None


def _decision(job: PlannedRequest, endpoint: Endpoint, hit: int, ttft: float, now: float) -> Decision:
    tier = next(i for i, tier in enumerate(job.route.tiers) if tier.pool == endpoint.pool)
    candidate = Candidate(endpoint, tier, job.arrival.prompt_tokens, hit, Forecast(ttft), 1.0, 0.0)
    return Decision(Placement.PLACE, now, job.deadline, (candidate,), scorer="reference")
