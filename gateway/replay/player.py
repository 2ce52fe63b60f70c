"""A trace through the gateway's own decision code, in virtual time, against simulated engines.

What is pure here is what serves: `policies.tiers`, `policies.waiting`, `policies.attempts`, `policies.fleet`
and the budgets for trying again. The player stands in for the sockets and for the clock alone, and is
deterministic: one seed, one outcome.

Time goes from one moment at which something could be decided to the next. While nobody waits and nobody
races those are the arrivals and the timers; else any event could be one, and the machines are run no further
than `World.overhead` ahead, which is what a request, or the end of one, takes to reach an engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gateway.replay.clairvoyant import Clairvoyant
from gateway.replay.clock import Clock
from gateway.replay.sender import Live, Sender
from gateway.replay.setting import Setting
from gateway.replay.tally import Fate, Tally
from gateway.replay.traces import BLOCK, Arrival
from gateway.replay.world import Fault, World
from policies.facts import FOREVER, Ask, PoolEstimate, PrefixBlocks, PromptEstimate
from policies.fleet import Fleet
from policies.route import Route
from policies.waiting import WaitingRoom

PROGRESS = 0.2  # s between two counts of the tokens that answers have
SCRAPE = 0.5  # s between two looks at an engine
DRAIN = 300.0  # s that answers may take after the last arrival


class Player:
    """One replay. `play` may be called once."""

    def __init__(self, setting: Setting, arrivals: Sequence[Arrival], seed: int = 0, keep: int = 0) -> None:
        self.setting, self.arrivals, self.clock = setting, arrivals, Clock()
        self.world = World(setting.profiles, seed, 0.0 if setting.clairvoyant else setting.hung)
        self.fleet = Fleet(setting.pools)
        self.room = Clairvoyant(self.world, setting, arrivals) if setting.clairvoyant else WaitingRoom()
        self.tally = Tally(setting.routes, max(arrivals[-1].at, 1e-9) if arrivals else 1.0, keep)
        self.sender = Sender(setting, self.clock, self.world, self.fleet, self.room, self.tally, self._enter)
        self._local = {endpoint.id for pool in setting.pools if pool.local for endpoint in pool.endpoints}
        self._born = dict.fromkeys(setting.profiles, 0.0)
        self._next = 0  # of the arrivals

    def play(self) -> Tally:
        """Everything until the last answer, or DRAIN seconds after the last arrival."""
        for fault in self.setting.faults:
            self.clock.at(fault.at, self._befall, fault)
        for i, endpoint in enumerate(self.setting.profiles):
            self.clock.at(SCRAPE * i / len(self.setting.profiles), self._scrape, endpoint)
            self.clock.at(PROGRESS * i / len(self.setting.profiles), self._progress, endpoint)
        end = self.tally.seconds + DRAIN
        while (self._next < len(self.arrivals) or self.sender.live) and self.clock.now < end:
            self._advance(min(self._horizon(), end))
        return self.tally

    # ---------------------------------------------------------------- time

    def _horizon(self) -> float:
        upcoming, now = self.clock.upcoming, self.clock.now
        if self._next < len(self.arrivals):
            upcoming = min(upcoming, self.arrivals[self._next].at)
        upcoming = min(upcoming, max(self.room.wake_at, now))
        return min(upcoming, now + self.world.overhead) if self.room.held or self.sender.racing else upcoming

    def _advance(self, until: float) -> None:
        for happened in self.world.run_until(until):
            self.clock.now = max(self.clock.now, happened.at)
            self.sender.hear(happened)
            if self.room.held:
                self._release()
        self.clock.now = until
        self.clock.run()
        while self._next < len(self.arrivals) and self.arrivals[self._next].at <= until:
            self._next += 1
            self._arrive(self._next, self.arrivals[self._next - 1])
        if self.room.held and self.room.wake_at <= until:
            self._release()

    # ---------------------------------------------------------------- arrivals and decisions

    def _arrive(self, number: int, arrival: Arrival) -> None:
        route, now = self.setting.routes[arrival.route], self.clock.now
        estimate = estimate_of(arrival, route, self.fleet.expected_output(route.name))
        fate = Fate(number, route.name, now, arrival.prompt_tokens, arrival.output_tokens)
        self.tally.enter(fate)
        live = self.sender.live[number] = Live(number, arrival, route, estimate, fate)
        self._enter(live)
        if live.decision is None and route.ttft and self.setting.patience < FOREVER:
            self.clock.at(now + self.setting.patience, self._expire, number)

    def _enter(self, live: Live) -> None:
        ask = Ask(live.route.name, live.fate.arrived, True)
        self.room.enter(live.number, ask, live.estimate, live.route, self.clock.now, live.number)
        self._release()

    def _release(self) -> None:
        for number, decision in self.room.release(self.fleet, self.clock.now):
            assert isinstance(number, int)
            self.sender.decided(self.sender.live[number], decision)

    def _expire(self, number: int) -> None:
        """Held for too long."""
        live = self.sender.live.get(number)
        if live is not None and live.decision is None and live.machine is None:
            self.room.leave(number)
            self.sender.refuse(live)

    # ---------------------------------------------------------------- timers

    def _scrape(self, endpoint: str) -> None:
        load = self.world.load_of(endpoint, self._born[endpoint])
        if load is not None:
            self.fleet.scraped(endpoint, load, self.clock.now)
        elif endpoint in self._local:
            self.fleet.unreachable(endpoint, self.clock.now)
        self.clock.at(self.clock.now + SCRAPE, self._scrape, endpoint)
        if self.room.held:
            self._release()

    def _progress(self, endpoint: str) -> None:
        self.fleet.progress(self.world.progress(endpoint), self.clock.now)
        self.clock.at(self.clock.now + PROGRESS, self._progress, endpoint)

    def _befall(self, fault: Fault) -> None:
        if fault.what == "restart":
            self._born[fault.endpoint] = self.clock.now
        for key in self.world.befall(fault, self.clock.now):
            self.sender.died(int(key))


def estimate_of(arrival: Arrival, route: Route, expected: int) -> PromptEstimate:
    """As the gateway's estimator would have it, had it counted well."""
    hashes = arrival.hashes if isinstance(arrival.hashes, array) else array("Q", arrival.hashes)
    one = PoolEstimate(arrival.prompt_tokens, PrefixBlocks(hashes, BLOCK), arrival.prompt_tokens)
    return PromptEstimate({tier.pool: one for tier in route.tiers}, expected)


def play(setting: Setting, arrivals: Sequence[Arrival], seed: int = 0, keep: int = 0) -> Tally:
    """One replay. `keep`: decisions of the most regret that the tally keeps."""
    return Player(setting, arrivals, seed, keep).play()
