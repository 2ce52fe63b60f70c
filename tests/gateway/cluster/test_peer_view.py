"""Replicas that tell each other of their load and of prompts: who is believed, for how long, and at what cost."""

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


class Heard:
    """A reader that remembers."""

    def __init__(self) -> None:
        self.burdens: dict[str, PeerLoad] = {}
        self.hints: list[tuple[str, list[int]]] = []

    def on_peer_load(self, endpoint_id: str, burden: PeerLoad, now: float) -> None:
        self.burdens[endpoint_id] = burden

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.hints.append((endpoint_id, list(hashes)))


class Listening(Heard):
    """With what it listens to."""

    def __init__(self, group: bytes = OURS) -> None:
        super().__init__()
        self.peers = Peers(group, NAMES.__contains__)

    def hear(self, raw: bytes | None, now: float) -> Listening:
        assert raw is not None
        self.peers.on_message(raw, now)
        return self.look(now)

    def look(self, now: float) -> Listening:
        self.peers.merge(self, now)
        return self


def told(pending: PendingUpdates, now: float = 1.0, **burdens: PeerLoad) -> bytes:
    """`a` and `b` are the endpoints."""
    for name, burden in burdens.items():
        pending.publish(f"small/{name}", burden)
    raw = pending.message(now)
    assert raw is not None
    return raw


# --------------------------------------------------------------------------- load


def test_what_others_have_under_way_adds_up() -> None:
    """Each by its latest word."""
    listening, theirs, thirds = Listening(), PendingUpdates(THEIRS), PendingUpdates(THIRDS)
    listening.hear(told(theirs, a=BUSY), 1.0).hear(told(thirds, a=BUSY, b=BUSY), 1.01)
    assert [listening.burdens[name].in_flight for name in NAMES] == [4, 2]
    listening.hear(told(theirs, 1.02, a=replace(BUSY, in_flight=1)), 1.02)
    assert listening.burdens[NAMES[0]].in_flight == 3
    assert listening.peers.replicas(1.02) == 3


def test_ones_own_group_is_not_heard() -> None:
    """Its workers know of each other through memory; and everybody hears himself."""
    listening, sibling = Listening(), PendingUpdates(OURS)
    sibling.publish_prompt(NAMES[0], [1, 2])
    listening.hear(told(sibling, a=BUSY), 1.0)
    assert (listening.burdens, listening.hints, listening.peers.replicas(1.0)) == ({}, [], 1)


def test_workers_of_one_gateway_are_one_replica() -> None:
    """Whose load adds up all the same."""
    listening = Listening()
    for now in (1.0, 1.1):
        listening.hear(told(PendingUpdates(THEIRS), now, a=BUSY), now)
    assert (listening.burdens[NAMES[0]].in_flight, listening.peers.replicas(1.1)) == (4, 2)


def test_who_falls_silent_has_nothing_under_way() -> None:
    """Nobody takes what is said once for true for ever. The others stay."""
    listening, theirs, thirds = Listening(), PendingUpdates(THEIRS), PendingUpdates(THIRDS)
    listening.hear(told(theirs, a=replace(BUSY, down_since=0.9)), 1.0).hear(told(thirds, a=BUSY), 1.5)
    assert listening.look(0.99 + PEER_TIMEOUT).burdens[NAMES[0]].in_flight == 4
    assert listening.look(1.0 + PEER_TIMEOUT).burdens[NAMES[0]].in_flight == 2
    assert listening.burdens[NAMES[0]].down_since == NEVER
    assert listening.peers.replicas(1.0 + PEER_TIMEOUT) == 2
    assert listening.look(1.5 + PEER_TIMEOUT).burdens[NAMES[0]].in_flight == 0


def test_who_says_farewell_is_gone_at_once() -> None:
    """A drained replica is not waited for."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    listening.hear(told(theirs, a=BUSY), 1.0).hear(theirs.farewell(1.1), 1.1)
    assert (listening.burdens[NAMES[0]].in_flight, listening.peers.replicas(1.1)) == (0, 1)


def test_a_lost_message_is_made_up_for_within_a_second() -> None:
    """Everything is told again, also that something has ended."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    listening.hear(told(theirs, 1.0, a=BUSY), 1.0)
    told(theirs, 1.1, a=NO_LOAD, b=BUSY)  # is lost
    assert theirs.message(1.2) is None
    listening.hear(told(theirs, 1.0 + FULL_INTERVAL), 1.0 + FULL_INTERVAL)
    assert [listening.burdens[name].in_flight for name in NAMES] == [0, 2]


def test_an_endpoint_that_is_not_ours_is_nobodys() -> None:
    """Another fleet, or another version of this one."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    theirs.publish("large/x", BUSY)
    theirs.publish_prompt("large/x", [1])
    listening.hear(told(theirs, b=BUSY), 1.0)
    assert (list(listening.burdens), listening.hints) == ([NAMES[1]], [])


def test_what_others_have_spent_never_leaps() -> None:
    """It stands for a prefill that stalls our answers now: not when one is heard first, goes, comes or begins anew."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)

    def spent(at: float, amount: float, pending: PendingUpdates = theirs) -> float:
        raw = told(pending, at, a=replace(BUSY, prefill_s=amount))
        return listening.hear(raw, at).burdens[NAMES[0]].prefill_s

    assert spent(1.0, 5000.0) == 0.0
    assert spent(1.1, 5000.5) == pytest.approx(0.5)
    assert listening.look(1.1 + PEER_TIMEOUT).burdens[NAMES[0]].prefill_s == pytest.approx(0.5)
    assert spent(9.0, 5004.0) == pytest.approx(0.5)
    assert spent(9.1, 5004.25) == pytest.approx(0.75)
    assert spent(9.2, 1.0, PendingUpdates(THEIRS)) == pytest.approx(0.75)
    assert spent(9.3, 0.0) == pytest.approx(0.75)


def test_two_ways_add_up_and_pass_prompts_on() -> None:
    """Workers beside us and replicas elsewhere. What is published goes both ways."""
    near, far, reader = Far(OURS), Far(OURS), Heard()
    both = CombinedPeers(near, far)
    both.publish(NAMES[0], BUSY)
    both.publish_prompt(NAMES[0], [7])
    assert [way.pending.message(1.0) is not None for way in (near, far)] == [True, True]
    near.peers.on_message(told(PendingUpdates(THEIRS), a=BUSY), 1.0)
    both.merge(reader, 1.0)
    assert reader.burdens[NAMES[0]].in_flight == 2
    thirds = PendingUpdates(THIRDS)
    thirds.publish_prompt(NAMES[1], [8])
    far.peers.on_message(told(thirds, 1.1, a=BUSY), 1.1)
    both.merge(reader, 1.1)
    assert (reader.burdens[NAMES[0]].in_flight, reader.hints) == (4, [(NAMES[1], [8])])


class Far:
    """As `gateway.cluster.replicas`, without Redis."""

    def __init__(self, group: bytes) -> None:
        self.pending, self.peers = PendingUpdates(group), Peers(group, NAMES.__contains__)
        self.publish, self.publish_prompt, self.merge = (
            self.pending.publish,
            self.pending.publish_prompt,
            self.peers.merge,
        )


# --------------------------------------------------------------------------- time


def test_times_are_as_old_here_as_there() -> None:
    """Whatever the other machine's clock says."""
    listening = Listening()
    listening.hear(
        told(PendingUpdates(THEIRS), 90_000.0, a=replace(BUSY, last_used_at=89_999.0, queued_since=89_999.5)), 7.0
    )
    assert (listening.burdens[NAMES[0]].last_used_at, listening.burdens[NAMES[0]].queued_since) == (6.0, 6.5)


def test_a_message_that_was_long_on_its_way_is_older() -> None:
    """By as much as it came later than the quickest."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    listening.hear(told(theirs, 100.0, a=BUSY), 7.0)
    listening.hear(told(theirs, 101.0, a=replace(BUSY, last_used_at=101.0)), 8.4)  # 0.4 s late
    assert listening.burdens[NAMES[0]].last_used_at == pytest.approx(8.0, abs=0.001)


def test_clocks_may_drift() -> None:
    """A slow one for hours: what it tells does not grow old."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    for i in range(3600):
        now, clock = 2.0 * i, 2.0 * i * (1 - 1e-4)
        listening.hear(told(theirs, clock, a=replace(BUSY, last_used_at=clock)), now)
    assert listening.burdens[NAMES[0]].last_used_at == pytest.approx(now, abs=0.01)


def test_what_is_very_late_or_comes_twice_is_no_news() -> None:
    """Who tells nothing newer in time is silent."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    first = told(theirs, 100.0, a=BUSY)
    listening.hear(first, 1.0).hear(told(theirs, 100.5, a=NO_LOAD), 1.5).hear(first, 1.6)
    assert listening.burdens[NAMES[0]].in_flight == 0
    listening.hear(told(theirs, 101.0, a=replace(BUSY, in_flight=8)), 2.0 + PEER_TIMEOUT - 0.6)
    assert listening.burdens[NAMES[0]].in_flight == 8
    listening.hear(told(theirs, 101.5, a=replace(BUSY, in_flight=9)), 2.6 + PEER_TIMEOUT)
    assert listening.burdens[NAMES[0]].in_flight == 8
    assert listening.look(2.0 + 2 * PEER_TIMEOUT - 0.6).burdens[NAMES[0]].in_flight == 0


def test_one_whose_clock_stood_still_is_heard_again() -> None:
    """A machine that was suspended is late for ever, by its old clock; it is taken for another one then."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    listening.hear(told(theirs, 100.0, a=BUSY), 1.0)
    for second in range(3):
        listening.hear(told(theirs, 101.0 + second, a=replace(BUSY, in_flight=7)), 61.0 + second)
    assert listening.burdens[NAMES[0]].in_flight == 7


# --------------------------------------------------------------------------- prompts


def test_prompts_arrive_in_order_and_once() -> None:
    """With the burdens, or alone."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    prompts = [(NAMES[0], [1, 2, 3]), (NAMES[1], [1]), (NAMES[0], [2**64 - 1])]
    for name, hashes in prompts:
        theirs.publish_prompt(name, hashes)
    listening.hear(told(theirs), 1.0)
    assert listening.hints == prompts
    listening.hear(told(theirs, 1.0 + FULL_INTERVAL), 2.0)
    assert listening.hints == prompts


def test_prompts_are_bounded_in_a_message_and_in_a_second() -> None:
    """The beginning of a prompt is a prompt: the end is left out."""
    theirs, listening = PendingUpdates(THEIRS), Listening()
    theirs.publish_prompt(NAMES[0], range(MESSAGE_BLOCKS - 5))
    theirs.publish_prompt(NAMES[1], range(10))
    theirs.publish_prompt(NAMES[1], range(10))
    listening.hear(told(theirs), 1.0)
    assert [len(hashes) for _, hashes in listening.hints] == [MESSAGE_BLOCKS - 5, 5]
    blocks = 0
    for i in range(1000):
        theirs.publish_prompt(NAMES[0], range(MESSAGE_BLOCKS))
        now = 1.0 + i / 1000
        listening.hear(told(theirs, now, a=BUSY), now)
        blocks += sum(len(hashes) for _, hashes in listening.hints)
        listening.hints.clear()
    assert blocks <= 2 * BLOCK_RATE + MESSAGE_BLOCKS


def test_what_nobody_takes_in_is_bounded() -> None:
    """The oldest goes."""
    listening, theirs = Listening(), PendingUpdates(THEIRS)
    for i in range(3 * MAX_PENDING_BLOCKS // MESSAGE_BLOCKS):
        now = 1.0 + i
        theirs.publish_prompt(NAMES[0], array("Q", [i]) * MESSAGE_BLOCKS)
        listening.peers.on_message(told(theirs, now), now)
    listening.look(now)
    assert sum(len(hashes) for _, hashes in listening.hints) == MAX_PENDING_BLOCKS
    assert listening.hints[-1][1][0] == i


def test_while_nobody_can_be_told_prompts_are_forgotten_and_load_is_not() -> None:
    """The first message afterwards says all that is under way."""
    theirs, listening = PendingUpdates(THEIRS), Listening()
    told(theirs, 1.0, a=BUSY)
    theirs.publish_prompt(NAMES[0], [1])
    theirs.forget()
    listening.hear(told(theirs, 1.1, b=BUSY), 1.1)
    assert (sorted(listening.burdens), listening.hints) == (sorted(NAMES), [])


# --------------------------------------------------------------------------- noise


def test_noise_is_counted_and_changes_nothing() -> None:
    """Of any kind, between messages that are ours."""
    random, listening, theirs = Random(1), Listening(), PendingUpdates(THEIRS)
    for i in range(200):
        raw, now = told(theirs, 1.0 + i / 50, a=replace(BUSY, in_flight=i + 1)), 1.0 + i / 50
        noise = bytearray(raw[: random.randrange(len(raw))] if i % 2 else raw)
        if not i % 2:
            noise[random.randrange(len(noise))] ^= 1 << random.randrange(8)
        listening.hear(bytes(noise), now)
        listening.hear(raw, now)
        listening.look(now + MERGE_INTERVAL)
        assert listening.burdens[NAMES[0]].in_flight == i + 1
    assert listening.peers.malformed == 200
    assert listening.peers.replicas(now) == 2


def test_peers_are_bounded() -> None:
    """Who makes up names for himself takes no memory."""
    listening = Listening()
    for number in range(2 * MAX_PEERS):
        teller = number.to_bytes(8, "little")
        listening.peers.on_message(PeerUpdate(teller, teller, 1.0, {NAMES[0]: BUSY}).encode(), 1.0)
    assert listening.look(1.0).burdens[NAMES[0]].in_flight == 2 * MAX_PEERS
