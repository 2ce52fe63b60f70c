"""Load and prompts of other replicas: merging, expiry, clocks and bounds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from gateway.cluster.gossip import (
    BLOCK_RATE,
    FULL_INTERVAL,
    MAX_PEERS,
    MAX_PENDING_BLOCKS,
    MERGE_INTERVAL,
    MESSAGE_BLOCKS,
    PEER_TIMEOUT,
    Peers,
    PeerUpdate,
    PendingUpdates,
)
from policies.fleet.peers import NO_LOAD, CombinedPeers, PeerLoad
from policies.types import NEVER

NAMES = ("small/a", "small/b")
OURS, THEIRS, THIRDS = b"ours....", b"theirs..", b"thirds.."
BUSY = replace(NO_LOAD, in_flight=2, prefilling=1, queued_tokens=500, queued_since=0.5, last_used_at=0.5, prefill_s=2.0)


class Reader:
    """Stores received loads and prompts."""

    def __init__(self) -> None:
        self.loads: dict[str, PeerLoad] = {}
        self.hints: list[tuple[str, list[int]]] = []

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        self.loads[endpoint_id] = load

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int], now: float) -> None:
        self.hints.append((endpoint_id, list(hashes)))


class Receiver(Reader):
    """A reader with its view of peers."""

    def __init__(self, group: bytes = OURS) -> None:
        super().__init__()
        self.peers = Peers(group, NAMES.__contains__)

    def receive(self, raw: bytes | None, now: float) -> Receiver:
        assert raw is not None
        self.peers.on_message(raw, now)
        return self.merge(now)

    def merge(self, now: float) -> Receiver:
        self.peers.merge(self, now)
        return self


def message(pending: PendingUpdates, now: float = 1.0, **loads: PeerLoad) -> bytes:
    """An update with loads of the endpoints `a` and `b`."""
    for name, load in loads.items():
        pending.publish(f"small/{name}", load)
    raw = pending.message(now)
    assert raw is not None
    return raw


# --------------------------------------------------------------------------- load


def test_loads_of_peers_are_summed() -> None:
    """From the latest update of each."""
    receiver, theirs, thirds = Receiver(), PendingUpdates(THEIRS), PendingUpdates(THIRDS)
    receiver.receive(message(theirs, a=BUSY), 1.0).receive(message(thirds, a=BUSY, b=BUSY), 1.01)
    assert [receiver.loads[name].in_flight for name in NAMES] == [4, 2]
    receiver.receive(message(theirs, 1.02, a=replace(BUSY, in_flight=1)), 1.02)
    assert receiver.loads[NAMES[0]].in_flight == 3
    assert receiver.peers.replicas(1.02) == 3


def test_updates_of_the_own_group_are_ignored() -> None:
    """Workers of one gateway share memory, and Redis returns a sender's own messages."""
    receiver, sibling = Receiver(), PendingUpdates(OURS)
    sibling.publish_prompt(NAMES[0], [1, 2])
    receiver.receive(message(sibling, a=BUSY), 1.0)
    assert (receiver.loads, receiver.hints, receiver.peers.replicas(1.0)) == ({}, [], 1)


def test_workers_of_one_gateway_are_one_replica() -> None:
    """Their loads are summed all the same."""
    receiver = Receiver()
    for now in (1.0, 1.1):
        receiver.receive(message(PendingUpdates(THEIRS), now, a=BUSY), now)
    assert (receiver.loads[NAMES[0]].in_flight, receiver.peers.replicas(1.1)) == (4, 2)


def test_a_silent_peer_expires() -> None:
    """Load and failure reports of the peer are dropped after PEER_TIMEOUT seconds. Other peers stay."""
    receiver, theirs, thirds = Receiver(), PendingUpdates(THEIRS), PendingUpdates(THIRDS)
    receiver.receive(message(theirs, a=replace(BUSY, down_since=0.9)), 1.0).receive(message(thirds, a=BUSY), 1.5)
    assert receiver.merge(0.99 + PEER_TIMEOUT).loads[NAMES[0]].in_flight == 4
    assert receiver.merge(1.0 + PEER_TIMEOUT).loads[NAMES[0]].in_flight == 2
    assert receiver.loads[NAMES[0]].down_since == NEVER
    assert receiver.peers.replicas(1.0 + PEER_TIMEOUT) == 2
    assert receiver.merge(1.5 + PEER_TIMEOUT).loads[NAMES[0]].in_flight == 0


def test_a_farewell_removes_a_peer_at_once() -> None:
    """A drained replica."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    receiver.receive(message(theirs, a=BUSY), 1.0).receive(theirs.farewell(1.1), 1.1)
    assert (receiver.loads[NAMES[0]].in_flight, receiver.peers.replicas(1.1)) == (0, 1)


def test_a_full_update_repairs_a_lost_message() -> None:
    """Ended load included."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    receiver.receive(message(theirs, 1.0, a=BUSY), 1.0)
    message(theirs, 1.1, a=NO_LOAD, b=BUSY)  # lost
    assert theirs.message(1.2) is None
    receiver.receive(message(theirs, 1.0 + FULL_INTERVAL), 1.0 + FULL_INTERVAL)
    assert [receiver.loads[name].in_flight for name in NAMES] == [0, 2]


def test_unknown_endpoints_are_ignored() -> None:
    """A peer may have another fleet, or another version of this fleet."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    theirs.publish("large/x", BUSY)
    theirs.publish_prompt("large/x", [1])
    receiver.receive(message(theirs, b=BUSY), 1.0)
    assert (list(receiver.loads), receiver.hints) == ([NAMES[1]], [])


def test_prefill_time_of_peers_never_jumps() -> None:
    """Each second of prefill counts as a stall of answers now, so the first update of a peer, an expiry, a return
    and a restart add nothing."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)

    def spent(at: float, amount: float, pending: PendingUpdates = theirs) -> float:
        raw = message(pending, at, a=replace(BUSY, prefill_s=amount))
        return receiver.receive(raw, at).loads[NAMES[0]].prefill_s

    assert spent(1.0, 5000.0) == 0.0
    assert spent(1.1, 5000.5) == pytest.approx(0.5)
    assert receiver.merge(1.1 + PEER_TIMEOUT).loads[NAMES[0]].prefill_s == pytest.approx(0.5)
    assert spent(9.0, 5004.0) == pytest.approx(0.5)
    assert spent(9.1, 5004.25) == pytest.approx(0.75)
    assert spent(9.2, 1.0, PendingUpdates(THEIRS)) == pytest.approx(0.75)
    assert spent(9.3, 0.0) == pytest.approx(0.75)


def test_combined_peers_sum_loads_and_merge_prompts() -> None:
    """From workers of this gateway and from replicas. Own updates go to both links."""
    near, far, reader = ReplicaLink(OURS), ReplicaLink(OURS), Reader()
    both = CombinedPeers(near, far)
    both.publish(NAMES[0], BUSY)
    both.publish_prompt(NAMES[0], [7])
    assert [link.pending.message(1.0) is not None for link in (near, far)] == [True, True]
    near.peers.on_message(message(PendingUpdates(THEIRS), a=BUSY), 1.0)
    both.merge(reader, 1.0)
    assert reader.loads[NAMES[0]].in_flight == 2
    thirds = PendingUpdates(THIRDS)
    thirds.publish_prompt(NAMES[1], [8])
    far.peers.on_message(message(thirds, 1.1, a=BUSY), 1.1)
    both.merge(reader, 1.1)
    assert (reader.loads[NAMES[0]].in_flight, reader.hints) == (4, [(NAMES[1], [8])])


class ReplicaLink:
    """Like `gateway.cluster.replicas`, without Redis."""

    def __init__(self, group: bytes) -> None:
        self.pending, self.peers = PendingUpdates(group), Peers(group, NAMES.__contains__)
        self.publish, self.publish_prompt, self.merge = (
            self.pending.publish,
            self.pending.publish_prompt,
            self.peers.merge,
        )


# --------------------------------------------------------------------------- time


def test_times_are_converted_by_age() -> None:
    """At any offset of the sender's clock."""
    receiver = Receiver()
    receiver.receive(
        message(PendingUpdates(THEIRS), 90_000.0, a=replace(BUSY, last_used_at=89_999.0, queued_since=89_999.5)), 7.0
    )
    assert (receiver.loads[NAMES[0]].last_used_at, receiver.loads[NAMES[0]].queued_since) == (6.0, 6.5)


def test_a_delayed_message_is_older() -> None:
    """By the delay beyond the fastest message."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    receiver.receive(message(theirs, 100.0, a=BUSY), 7.0)
    receiver.receive(message(theirs, 101.0, a=replace(BUSY, last_used_at=101.0)), 8.4)  # 0.4 s late
    assert receiver.loads[NAMES[0]].last_used_at == pytest.approx(8.0, abs=0.001)


def test_clock_drift_is_tracked() -> None:
    """For hours: times of a peer with a slow clock do not age."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    for i in range(3600):
        now, clock = 2.0 * i, 2.0 * i * (1 - 1e-4)
        receiver.receive(message(theirs, clock, a=replace(BUSY, last_used_at=clock)), now)
    assert receiver.loads[NAMES[0]].last_used_at == pytest.approx(now, abs=0.01)


def test_late_and_repeated_messages_are_ignored() -> None:
    """A peer without newer messages expires."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    first = message(theirs, 100.0, a=BUSY)
    receiver.receive(first, 1.0).receive(message(theirs, 100.5, a=NO_LOAD), 1.5).receive(first, 1.6)
    assert receiver.loads[NAMES[0]].in_flight == 0
    receiver.receive(message(theirs, 101.0, a=replace(BUSY, in_flight=8)), 2.0 + PEER_TIMEOUT - 0.6)
    assert receiver.loads[NAMES[0]].in_flight == 8
    receiver.receive(message(theirs, 101.5, a=replace(BUSY, in_flight=9)), 2.6 + PEER_TIMEOUT)
    assert receiver.loads[NAMES[0]].in_flight == 8
    assert receiver.merge(2.0 + 2 * PEER_TIMEOUT - 0.6).loads[NAMES[0]].in_flight == 0


def test_a_peer_resumed_from_suspension_is_accepted_again() -> None:
    """The clock offset is measured anew; by the old offset the machine would be late for ever."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    receiver.receive(message(theirs, 100.0, a=BUSY), 1.0)
    for second in range(3):
        receiver.receive(message(theirs, 101.0 + second, a=replace(BUSY, in_flight=7)), 61.0 + second)
    assert receiver.loads[NAMES[0]].in_flight == 7


# --------------------------------------------------------------------------- prompts


def test_prompts_arrive_in_order_and_once() -> None:
    """With loads, or alone."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    prompts = [(NAMES[0], [1, 2, 3]), (NAMES[1], [1]), (NAMES[0], [2**64 - 1])]
    for name, hashes in prompts:
        theirs.publish_prompt(name, hashes)
    receiver.receive(message(theirs), 1.0)
    assert receiver.hints == prompts
    receiver.receive(message(theirs, 1.0 + FULL_INTERVAL), 2.0)
    assert receiver.hints == prompts


def test_prompts_are_bounded_in_a_message_and_in_a_second() -> None:
    """A prompt is cut at its end."""
    theirs, receiver = PendingUpdates(THEIRS), Receiver()
    theirs.publish_prompt(NAMES[0], range(MESSAGE_BLOCKS - 5))
    theirs.publish_prompt(NAMES[1], range(10))
    theirs.publish_prompt(NAMES[1], range(10))
    receiver.receive(message(theirs), 1.0)
    assert [len(hashes) for _, hashes in receiver.hints] == [MESSAGE_BLOCKS - 5, 5]
    blocks = 0
    for i in range(1000):
        theirs.publish_prompt(NAMES[0], range(MESSAGE_BLOCKS))
        now = 1.0 + i / 1000
        receiver.receive(message(theirs, now, a=BUSY), now)
        blocks += sum(len(hashes) for _, hashes in receiver.hints)
        receiver.hints.clear()
    assert blocks <= 2 * BLOCK_RATE + MESSAGE_BLOCKS


def test_unmerged_prompts_are_bounded() -> None:
    """The oldest are dropped."""
    receiver, theirs = Receiver(), PendingUpdates(THEIRS)
    for i in range(3 * MAX_PENDING_BLOCKS // MESSAGE_BLOCKS):
        now = 1.0 + i
        theirs.publish_prompt(NAMES[0], array("Q", [i]) * MESSAGE_BLOCKS)
        receiver.peers.on_message(message(theirs, now), now)
    receiver.merge(now)
    assert sum(len(hashes) for _, hashes in receiver.hints) == MAX_PENDING_BLOCKS
    assert receiver.hints[-1][1][0] == i


def test_without_a_connection_pending_prompts_are_dropped_and_loads_kept() -> None:
    """The first message afterwards contains all loads."""
    theirs, receiver = PendingUpdates(THEIRS), Receiver()
    message(theirs, 1.0, a=BUSY)
    theirs.publish_prompt(NAMES[0], [1])
    theirs.forget()
    receiver.receive(message(theirs, 1.1, b=BUSY), 1.1)
    assert (sorted(receiver.loads), receiver.hints) == (sorted(NAMES), [])


# --------------------------------------------------------------------------- malformed messages


def test_malformed_messages_are_counted_and_change_nothing() -> None:
    """Between valid messages."""
    random, receiver, theirs = Random(1), Receiver(), PendingUpdates(THEIRS)
    for i in range(200):
        raw, now = message(theirs, 1.0 + i / 50, a=replace(BUSY, in_flight=i + 1)), 1.0 + i / 50
        noise = bytearray(raw[: random.randrange(len(raw))] if i % 2 else raw)
        if not i % 2:
            noise[random.randrange(len(noise))] ^= 1 << random.randrange(8)
        receiver.receive(bytes(noise), now)
        receiver.receive(raw, now)
        receiver.merge(now + MERGE_INTERVAL)
        assert receiver.loads[NAMES[0]].in_flight == i + 1
    assert receiver.peers.malformed == 200
    assert receiver.peers.replicas(now) == 2


def test_peers_are_bounded() -> None:
    """Made-up sender names take no memory."""
    receiver = Receiver()
    for number in range(2 * MAX_PEERS):
        sender = number.to_bytes(8, "little")
        receiver.peers.on_message(PeerUpdate(sender, sender, 1.0, {NAMES[0]: BUSY}).encode(), 1.0)
    assert receiver.merge(1.0).loads[NAMES[0]].in_flight == 2 * MAX_PEERS
