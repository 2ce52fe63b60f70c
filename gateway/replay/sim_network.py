"""How replicas of a replay hear of each other: the same messages as over Redis, each so long on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.cluster.peer_view import Peers
from gateway.cluster.pending_updates import EVERY_FULL, TELL, PendingUpdates
from gateway.replay.virtual_clock import Clock
from policies.fleet.peers import PeerLoad, PeerReader


class Network:
    """`delay`: s from telling to hearing; None: nobody hears anybody."""

    def __init__(self, clock: Clock, delay: float | None) -> None:
        self.clock, self.delay = clock, delay
        self.stations: list[Node] = []

    def join(self, knows: Callable[[str], bool]) -> Node:
        station = Node(self, len(self.stations).to_bytes(8, "little"), knows)
        self.stations.append(station)
        return station

    def carry(self, raw: bytes) -> None:
        if self.delay is not None:
            self.clock.at(self.clock.now + self.delay, self._deliver, raw)

    def _deliver(self, raw: bytes) -> None:
        for station in self.stations:  # the teller too, which knows its own
            station.peers.hear(raw, self.clock.now)


class Node:
    """Implements `policies.fleet.peers.Siblings` for one replica."""

    def __init__(self, wire: Network, name: bytes, knows: Callable[[str], bool]) -> None:
        self.outbox, self.peers = PendingUpdates(name, name), Peers(name, knows)
        self._wire, self._due = wire, False
        wire.clock.at(0.0, self._tell_all, None)

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        self.outbox.publish(endpoint_id, burden)
        self._tell_soon()

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.outbox.sent(endpoint_id, hashes)
        self._tell_soon()

    def merge(self, reader: PeerReader, now: float) -> None:
        self.peers.merge(reader, now)

    def _tell_soon(self) -> None:
        if not self._due:
            self._due = True
            self._wire.clock.at(self._wire.clock.now + TELL, self._tell, None)

    def _tell(self, _: None) -> None:
        self._due = False
        if (message := self.outbox.message(self._wire.clock.now)) is not None:
            self._wire.carry(message)

    def _tell_all(self, _: None) -> None:
        self._tell(None)
        self._wire.clock.at(self._wire.clock.now + EVERY_FULL, self._tell_all, None)
