"""A trace through the gateway's own decision code, in virtual time, against simulated engines.

What is pure here is what serves: `policies.routing.tiers`, `policies.queue.queue_scheduler`,
`policies.attempts.attempt_machine`, `policies.fleet.fleet`
and the budgets for trying again. The player stands in for the sockets and for the clock alone, and is
deterministic: one seed, one outcome. Of several workers each is a brain of its own; requests are spread over them
at random, as the kernel does with connections, and they share what workers share, through the same memory. Of several
replicas too, which share it by the same messages as over Redis.

Time goes from one moment at which something could be decided to the next. While nobody waits and nobody
races those are the arrivals and the timers; else any event could be one, and the machines are run no further
than `World.overhead` ahead, which is what a request, or the end of one, takes to reach an engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

from gateway.replay.results import RequestResult, Results
from gateway.replay.scenario import Scenario
from gateway.replay.sim_dispatcher import ATTEMPTS, Live
from gateway.replay.sim_fleet import Fault, SimFleet
from gateway.replay.sim_gateway import SimGateway
from gateway.replay.sim_network import Network
from gateway.replay.traces import BLOCK, Arrival
from gateway.replay.virtual_clock import Clock
from gateway.workers.shared_memory import Memory
from policies.fleet.peers import PeerLink
from policies.routes.route import Route
from policies.types import FOREVER, PoolEstimate, PrefixBlocks, PromptEstimate

PROGRESS = 0.2  # s between two counts of the tokens that answers have
SCRAPE = 0.5  # s between two looks at an engine
DRAIN = 300.0  # s that answers may take after the last arrival


class Player:
    """One replay. `play` may be called once."""

    def __init__(self, setting: Scenario, arrivals: Sequence[Arrival], seed: int = 0, keep: int = 0) -> None:
        self.setting, self.arrivals, self.clock = setting, arrivals, Clock()
        self.world = SimFleet(setting.profiles, seed, 0.0 if setting.clairvoyant else setting.hung)
        self.tally = Results(setting.routes, max(arrivals[-1].at, 1e-9) if arrivals else 1.0, keep)
        ways, random = self._ways(), Random(seed)
        self.brains = [SimGateway(setting, self.clock, self.world, self.tally, arrivals, way) for way in ways]
        self._whose = [self.brains[random.randrange(len(ways))] for _ in range(len(arrivals) + 1)]  # by number
        self._local = {endpoint.id for pool in setting.pools if pool.local for endpoint in pool.endpoints}
        self._born = dict.fromkeys(setting.profiles, 0.0)
        self._next = 0  # of the arrivals

    def _ways(self) -> list[PeerLink | None]:
        """One for each process of the gateway, to the others."""
        setting = self.setting
        if setting.clairvoyant or max(setting.workers, setting.replicas) == 1:
            return [None]
        if setting.replicas > 1:
            wire = Network(self.clock, setting.news)
            return [wire.join(setting.profiles.__contains__) for _ in range(setting.replicas)]
        memory = Memory(setting.profiles, setting.workers)
        return [memory.member(number) for number in range(setting.workers)]

    def play(self) -> Results:
        """Everything until the last answer, or DRAIN seconds after the last arrival."""
        for fault in self.setting.faults:
            self.clock.at(fault.at, self._befall, fault)
        looks = [(brain, endpoint) for endpoint in self.setting.profiles for brain in self.brains]
        for i, look in enumerate(looks):
            self.clock.at(SCRAPE * i / len(looks), self._scrape, look)
            self.clock.at(PROGRESS * i / len(looks), self._progress, look)
        end = self.tally.seconds + DRAIN
        while (self._next < len(self.arrivals) or any(b.sender.live for b in self.brains)) and self.clock.now < end:
            self._advance(min(self._horizon(), end))
        return self.tally

    # ---------------------------------------------------------------- time

    def _horizon(self) -> float:
        upcoming, now = self.clock.upcoming, self.clock.now
        if self._next < len(self.arrivals):
            upcoming = min(upcoming, self.arrivals[self._next].at)
        upcoming = min(upcoming, max(min(brain.room.wake_at for brain in self.brains), now))
        busy = any(brain.room.held or brain.sender.racing for brain in self.brains)
        return min(upcoming, now + self.world.overhead) if busy else upcoming

    def _advance(self, until: float) -> None:
        for happened in self.world.run_until(until):
            self.clock.now = max(self.clock.now, happened.at)
            brain = self._whose[int(happened.event.id) // ATTEMPTS]
            brain.sender.hear(happened)
            brain.release_held()
        self.clock.now = until
        self.clock.run()
        while self._next < len(self.arrivals) and self.arrivals[self._next].at <= until:
            self._next += 1
            self._arrive(self._next, self.arrivals[self._next - 1])
        for brain in self.brains:
            if brain.room.wake_at <= until:
                brain.release_held()

    # ---------------------------------------------------------------- arrivals and decisions

    def _arrive(self, number: int, arrival: Arrival) -> None:
        route, now = self.setting.routes[arrival.route], self.clock.now
        brain = self._whose[number]
        estimate = estimate_of(arrival, route, brain.fleet.expected_output(route.name))
        fate = RequestResult(number, route.name, now, arrival.prompt_tokens, arrival.output_tokens)
        self.tally.enter(fate)
        live = brain.sender.live[number] = Live(number, arrival, route, estimate, fate)
        brain.enter(live)
        if live.decision is None and route.ttft and self.setting.patience < FOREVER:
            self.clock.at(now + self.setting.patience, brain.expire, number)

    # ---------------------------------------------------------------- timers

    def _scrape(self, look: tuple[SimGateway, str]) -> None:
        brain, endpoint = look
        load = self.world.load_of(endpoint, self._born[endpoint])
        if load is not None:
            brain.fleet.on_scrape(endpoint, load, self.clock.now)
        elif endpoint in self._local:
            brain.fleet.on_probe_failed(endpoint, self.clock.now)
        self.clock.at(self.clock.now + SCRAPE, self._scrape, look)
        brain.release_held()

    def _progress(self, look: tuple[SimGateway, str]) -> None:
        brain, endpoint = look
        brain.fleet.on_progress(self.world.progress(endpoint), self.clock.now)
        self.clock.at(self.clock.now + PROGRESS, self._progress, look)

    def _befall(self, fault: Fault) -> None:
        if fault.what == "restart":
            self._born[fault.endpoint] = self.clock.now
        for key in self.world.befall(fault, self.clock.now):
            self._whose[int(key) // ATTEMPTS].sender.died(int(key))


def estimate_of(arrival: Arrival, route: Route, expected: int) -> PromptEstimate:
    """As the gateway's estimator would have it, had it counted well."""
    hashes = arrival.hashes if isinstance(arrival.hashes, array) else array("Q", arrival.hashes)
    one = PoolEstimate(arrival.prompt_tokens, PrefixBlocks(hashes, BLOCK), arrival.prompt_tokens)
    return PromptEstimate({tier.pool: one for tier in route.tiers}, expected)


def play(setting: Scenario, arrivals: Sequence[Arrival], seed: int = 0, keep: int = 0) -> Results:
    """One replay. `keep`: decisions of the most regret that the tally keeps."""
    return Player(setting, arrivals, seed, keep).play()
