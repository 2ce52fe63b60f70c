"""One gateway process of a replay: what it knows, who waits in it, and what it has under way."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.replay.clairvoyant import Clairvoyant
from gateway.replay.results import Results
from gateway.replay.scenario import Scenario
from gateway.replay.sim_dispatcher import Live, SimDispatcher
from gateway.replay.sim_fleet import SimFleet
from gateway.replay.traces import Arrival
from gateway.replay.virtual_clock import Clock
from policies.fleet.fleet import Fleet
from policies.fleet.peers import PeerLink
from policies.queue.queue_scheduler import QueueScheduler
from policies.types import RequestView


class SimGateway:
    """`siblings`: the way to the others, where there are several."""

    def __init__(
        self,
        setting: Scenario,
        clock: Clock,
        world: SimFleet,
        tally: Results,
        arrivals: Sequence[Arrival],
        siblings: PeerLink | None = None,
    ) -> None:
        self.clock = clock
        self.fleet = Fleet(setting.pools)
        self.fleet.peers = siblings
        self.room = Clairvoyant(world, setting, arrivals) if setting.clairvoyant else QueueScheduler()
        self.sender = SimDispatcher(setting, clock, world, self.fleet, self.room, tally, self.enter)

    def enter(self, live: Live) -> None:
        ask = RequestView(live.route.name, live.fate.arrived, True)
        self.room.enter(live.number, ask, live.estimate, live.route, self.clock.now, live.number)
        self.release()

    def release(self) -> None:
        for number, decision in self.room.release(self.fleet, self.clock.now):
            assert isinstance(number, int)
            self.sender.decided(self.sender.live[number], decision)

    def release_held(self) -> None:
        if self.room.held:
            self.release()

    def expire(self, number: int) -> None:
        """Held for too long."""
        live = self.sender.live.get(number)
        if live is not None and live.decision is None and live.machine is None:
            self.room.leave(number)
            self.sender.refuse(live)
