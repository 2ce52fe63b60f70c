"""Memory between workers: what one writes and the others read."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.shared_memory import HEAD, MAX_BLOCKS, MERGE_INTERVAL, RING, Memory, MemoryPart, WorkerMemory
from policies.fleet.peers import NO_LOAD, PeerLoad
from policies.latency.tpot import STALL_GRID

NAMES = ["small/a", "small/b"]
BUSY = PeerLoad(
    3, 1, 500, 70_000, 50, 900, 0, 1.5, 1.2, 1.4, prefill_s=2.5, decode_s=1.0, decode_tokens=20.0, tpot_budget=0.05
)


class Heard:
    """A reader that remembers."""

    def __init__(self, member: WorkerMemory) -> None:
        self.member, self.now = member, 0.0
        self.loads: dict[str, PeerLoad] = {}
        self.hints: list[tuple[str, list[int]]] = []

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        self.loads[endpoint_id] = load

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.hints.append((endpoint_id, list(hashes)))

    def look(self) -> Heard:
        self.now += MERGE_INTERVAL
        self.loads.clear()
        self.hints.clear()
        self.member.merge(self, self.now)
        return self


def sharing(workers: int = 2) -> tuple[Memory, list[WorkerMemory], list[Heard]]:
    memory = Memory(NAMES, workers)
    members = [memory.member(number) for number in range(workers)]
    heard = [Heard(member).look() for member in members]
    return memory, members, heard


# --------------------------------------------------------------------------- loads


@given(st.sampled_from([(), tuple(float(i) for i in range(1, len(STALL_GRID) + 1))]))
def test_a_burden_arrives_as_it_was_told(harm: tuple[float, ...]) -> None:
    """Every field, infinities too; not to the one who told it; once."""
    _, members, heard = sharing()
    told = replace(BUSY, expected_tpot_misses=harm)
    members[0].publish(NAMES[1], told)
    assert heard[1].look().loads == {NAMES[1]: told}
    assert heard[0].look().loads == {}
    assert heard[1].look().loads == {}


def test_burdens_of_several_are_heard_as_one() -> None:
    """The latest of each, added up."""
    _, members, heard = sharing(3)
    members[0].publish(NAMES[0], BUSY)
    members[1].publish(NAMES[0], NO_LOAD)
    members[1].publish(NAMES[0], BUSY)
    (found,) = heard[2].look().loads.values()
    assert (found.in_flight, found.queued_tokens, found.prefill_s, found.queued_since) == (6, 1000, 5.0, 1.5)


def test_what_others_had_spent_before_a_worker_came_is_nothing_to_it() -> None:
    """Hours of prefill, heard of at once, would leave an engine no moment for answers. Who begins anew counts anew."""
    memory, members, _ = sharing()
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=3600.0))
    late = Heard(memory.member(1))
    assert late.look().loads[NAMES[0]].prefill_s == 0
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=3601.5))
    assert late.look().loads[NAMES[0]].prefill_s == 1.5
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=2.0))
    assert late.look().loads[NAMES[0]].prefill_s == 2.0


def test_many_changes_in_little_time_are_heard_as_the_last() -> None:
    """Looking is not free: what siblings did within MERGE_INTERVAL seconds is worked out once."""
    _, members, heard = sharing()
    members[0].publish(NAMES[0], BUSY)
    heard[1].look()
    members[0].publish(NAMES[0], NO_LOAD)
    heard[1].member.merge(heard[1], heard[1].now + MERGE_INTERVAL / 2)
    assert heard[1].loads == {NAMES[0]: BUSY}
    assert heard[1].look().loads == {NAMES[0]: NO_LOAD}


def test_what_is_being_written_is_looked_at_again() -> None:
    """Never half of one and half of another."""
    memory, _, heard = sharing()
    part = MemoryPart(memory, 0)
    part.write(0, BUSY)
    part.words[2] |= 1  # as in the middle of the next
    assert heard[1].look().loads == {}
    part.write(0, replace(BUSY, in_flight=4))
    assert heard[1].look().loads[NAMES[0]].in_flight == 4


def test_the_dead_have_nothing_under_way() -> None:
    """Their supervisor wipes it, even where they died while they wrote; their successor begins with nothing."""
    memory, members, heard = sharing()
    members[0].publish(NAMES[0], BUSY)
    MemoryPart(memory, 0).words[2] |= 1
    memory.wipe(0)
    assert heard[1].look().loads[NAMES[0]] == NO_LOAD
    members[0].publish(NAMES[0], BUSY)
    memory.member(0)
    assert heard[1].look().loads[NAMES[0]] == NO_LOAD


def test_endpoints_come_and_go_while_it_is_shared() -> None:
    """What was told of one that is gone is no other's, wherever that one lies; what is under way at one that stays is
    heard again by who has begun anew to look."""
    memory = Memory(NAMES, 2, spare=4)
    members = [memory.member(number) for number in range(2)]
    heard = [Heard(member).look() for member in members]
    for name in NAMES:
        members[0].publish(name, BUSY)
        members[0].publish_prompt(name, [1, 2, 3])
    heard[1].look()
    for turn in range(5):
        names = [NAMES[0], f"small/{turn}", f"small/{turn}-too"]
        for member in members:
            member.share(names)
        busy = {name for name, load in heard[1].look().loads.items() if load.in_flight}
        assert (busy, heard[1].hints) == ({NAMES[0]}, [])
        members[0].publish(names[1], BUSY)
        members[0].publish_prompt(names[1], [turn])
        assert heard[1].look().loads == {names[1]: BUSY}
        assert heard[1].hints == [(names[1], [turn])]


def test_an_endpoint_that_is_not_shared_is_kept_to_oneself() -> None:
    """Nothing to tell, nothing to fail."""
    _, members, heard = sharing()
    members[0].publish("other/a", BUSY)
    members[0].publish_prompt("other/a", [1])
    assert (heard[1].look().loads, heard[1].hints) == ({}, [])


def test_it_is_shared_between_processes() -> None:
    """What a forked process writes is read here."""
    memory, _, heard = sharing()
    if not (pid := os.fork()):
        memory.member(0).publish(NAMES[0], BUSY)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert heard[1].look().loads[NAMES[0]] == BUSY


# --------------------------------------------------------------------------- prefixes


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))))
def test_prompts_arrive_in_order(prompts: list[tuple[str, list[int]]]) -> None:
    """Each once, to every other one."""
    _, members, heard = sharing(3)
    for name, hashes in prompts:
        members[0].publish_prompt(name, hashes)
    for each in heard[1:]:
        assert each.look().hints == prompts
        assert each.look().hints == []
    assert heard[0].look().hints == []


def test_the_ring_goes_round() -> None:
    """For ever, and a reader that keeps up misses nothing."""
    _, members, heard = sharing()
    size = 3001
    for number in range(4 * RING // (HEAD.size + 8 * size)):
        sent = list(range(number, number + size))
        members[0].publish_prompt(NAMES[0], array("Q", sent))
        assert heard[1].look().hints == [(NAMES[0], sent)]


def test_who_comes_too_late_has_missed_some() -> None:
    """No more than that: what comes next is heard."""
    _, members, heard = sharing()
    for number in range(2 * RING // (8 * 5000)):
        members[0].publish_prompt(NAMES[0], array("Q", [number] * 5000))
    heard[1].look()
    members[0].publish_prompt(NAMES[1], [7])
    assert heard[1].look().hints == [(NAMES[1], [7])]


def test_the_end_of_a_prompt_that_is_too_long_is_not_told() -> None:
    """It would take the ring from all others."""
    _, members, heard = sharing()
    members[0].publish_prompt(NAMES[0], array("Q", range(MAX_BLOCKS + 5)))
    assert heard[1].look().hints == [(NAMES[0], list(range(MAX_BLOCKS)))]


@pytest.mark.parametrize("successor", [0, 1])
def test_a_successor_hears_what_was_sent_before_it(successor: int) -> None:
    """By others and by the one whose place it takes: engines still hold it."""
    memory, members, _ = sharing()
    members[0].publish_prompt(NAMES[0], [1, 2])
    assert Heard(memory.member(successor)).look().hints == [(NAMES[0], [1, 2])]
