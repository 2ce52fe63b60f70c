"""Shared memory between workers: each worker writes its own part and reads the others."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.monitor import PollResult
from gateway.workers.shared_memory import (
    HEAD,
    MAX_BLOCKS,
    MERGE_INTERVAL,
    POLL,
    RING,
    VERSIONS,
    Memory,
    MemoryPart,
    WorkerMemory,
)
from policies.fleet.peers import NO_LOAD, PeerLoad
from policies.latency.tpot import STALL_GRID
from policies.types import EngineLoad

NAMES = ["small/a", "small/b"]
BUSY = PeerLoad(
    3, 1, 500, 70_000, 50, 900, 0, 1.5, 1.2, 1.4, prefill_s=2.5, decode_s=1.0, decode_tokens=20.0, tpot_limit=0.05
)


class Reader:
    """Stores received loads and prompts."""

    def __init__(self, member: WorkerMemory) -> None:
        self.member, self.now = member, 0.0
        self.loads: dict[str, PeerLoad] = {}
        self.hints: list[tuple[str, list[int]]] = []

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        self.loads[endpoint_id] = load

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.hints.append((endpoint_id, list(hashes)))

    def read(self) -> Reader:
        self.now += MERGE_INTERVAL
        self.loads.clear()
        self.hints.clear()
        self.member.merge(self, self.now)
        return self


def sharing(workers: int = 2) -> tuple[Memory, list[WorkerMemory], list[Reader]]:
    memory = Memory(NAMES, workers)
    members = [memory.member(number) for number in range(workers)]
    readers = [Reader(member).read() for member in members]
    return memory, members, readers


# --------------------------------------------------------------------------- loads


@given(st.sampled_from([(), tuple(float(i) for i in range(1, len(STALL_GRID) + 1))]))
def test_a_peer_load_arrives_unchanged_and_once(miss_curve: tuple[float, ...]) -> None:
    """Every field, infinities included; not at the sender."""
    _, members, readers = sharing()
    published = replace(BUSY, expected_tpot_misses=miss_curve)
    members[0].publish(NAMES[1], published)
    assert readers[1].read().loads == {NAMES[1]: published}
    assert readers[0].read().loads == {}
    assert readers[1].read().loads == {}


def test_loads_of_several_workers_are_summed() -> None:
    """From the latest load of each."""
    _, members, readers = sharing(3)
    members[0].publish(NAMES[0], BUSY)
    members[1].publish(NAMES[0], NO_LOAD)
    members[1].publish(NAMES[0], BUSY)
    (found,) = readers[2].read().loads.values()
    assert (found.in_flight, found.queued_tokens, found.prefill_s, found.queued_since) == (6, 1000, 5.0, 1.5)


def test_a_new_worker_counts_prefill_time_from_its_own_start() -> None:
    """Hours of past prefill, counted at once, would raise the utilization to 100%. A restarted sender counts anew."""
    memory, members, _ = sharing()
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=3600.0))
    late = Reader(memory.member(1))
    assert late.read().loads[NAMES[0]].prefill_s == 0
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=3601.5))
    assert late.read().loads[NAMES[0]].prefill_s == 1.5
    members[0].publish(NAMES[0], replace(BUSY, prefill_s=2.0))
    assert late.read().loads[NAMES[0]].prefill_s == 2.0


def test_changes_within_the_merge_interval_are_read_once() -> None:
    """Reading costs time."""
    _, members, readers = sharing()
    members[0].publish(NAMES[0], BUSY)
    readers[1].read()
    members[0].publish(NAMES[0], NO_LOAD)
    readers[1].member.merge(readers[1], readers[1].now + MERGE_INTERVAL / 2)
    assert readers[1].loads == {NAMES[0]: BUSY}
    assert readers[1].read().loads == {NAMES[0]: NO_LOAD}


def test_a_record_in_writing_is_read_later() -> None:
    """A reader never sees half of a record."""
    memory, _, readers = sharing()
    part = MemoryPart(memory, 0)
    part.write(0, BUSY)
    part.words[2] |= 1  # as in the middle of the next
    assert readers[1].read().loads == {}
    part.write(0, replace(BUSY, in_flight=4))
    assert readers[1].read().loads[NAMES[0]].in_flight == 4


def test_an_exited_worker_has_no_load() -> None:
    """The supervisor clears the part, even if the worker died while writing; the successor starts with no load."""
    memory, members, readers = sharing()
    members[0].publish(NAMES[0], BUSY)
    MemoryPart(memory, 0).words[2] |= 1
    memory.wipe(0)
    assert readers[1].read().loads[NAMES[0]] == NO_LOAD
    members[0].publish(NAMES[0], BUSY)
    memory.member(0)
    assert readers[1].read().loads[NAMES[0]] == NO_LOAD


def test_endpoints_can_be_replaced_while_memory_is_shared() -> None:
    """Records of a removed endpoint never count for another endpoint in the same slot; load at a remaining endpoint
    is read again after the change."""
    memory = Memory(NAMES, 2, spare=4)
    members = [memory.member(number) for number in range(2)]
    readers = [Reader(member).read() for member in members]
    for name in NAMES:
        members[0].publish(name, BUSY)
        members[0].publish_prompt(name, [1, 2, 3])
    readers[1].read()
    for turn in range(5):
        names = [NAMES[0], f"small/{turn}", f"small/{turn}-too"]
        for member in members:
            member.share(names)
        busy = {name for name, load in readers[1].read().loads.items() if load.in_flight}
        assert (busy, readers[1].hints) == ({NAMES[0]}, [])
        members[0].publish(names[1], BUSY)
        members[0].publish_prompt(names[1], [turn])
        assert readers[1].read().loads == {names[1]: BUSY}
        assert readers[1].hints == [(names[1], [turn])]


def test_an_endpoint_outside_the_shared_set_is_not_published() -> None:
    """Without an error."""
    _, members, readers = sharing()
    members[0].publish("other/a", BUSY)
    members[0].publish_prompt("other/a", [1])
    assert (readers[1].read().loads, readers[1].hints) == ({}, [])


def test_memory_is_shared_between_processes() -> None:
    """A forked process writes, this process reads."""
    memory, _, readers = sharing()
    if not (pid := os.fork()):
        memory.member(0).publish(NAMES[0], BUSY)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert readers[1].read().loads[NAMES[0]] == BUSY


# --------------------------------------------------------------------------- prefixes


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))))
def test_prompts_arrive_in_order(prompts: list[tuple[str, list[int]]]) -> None:
    """Each once, at every other worker."""
    _, members, readers = sharing(3)
    for name, hashes in prompts:
        members[0].publish_prompt(name, hashes)
    for each in readers[1:]:
        assert each.read().hints == prompts
        assert each.read().hints == []
    assert readers[0].read().hints == []


def test_a_reader_that_keeps_up_misses_nothing_when_the_ring_wraps() -> None:
    """For several rounds."""
    _, members, readers = sharing()
    size = 3001
    for number in range(4 * RING // (HEAD.size + 8 * size)):
        sent = list(range(number, number + size))
        members[0].publish_prompt(NAMES[0], array("Q", sent))
        assert readers[1].read().hints == [(NAMES[0], sent)]


def test_a_slow_reader_loses_only_overwritten_prompts() -> None:
    """The next prompt is read."""
    _, members, readers = sharing()
    for number in range(2 * RING // (8 * 5000)):
        members[0].publish_prompt(NAMES[0], array("Q", [number] * 5000))
    readers[1].read()
    members[0].publish_prompt(NAMES[1], [7])
    assert readers[1].read().hints == [(NAMES[1], [7])]


def test_a_prompt_is_published_up_to_max_blocks() -> None:
    """A longer prompt would take the ring from other prompts."""
    _, members, readers = sharing()
    members[0].publish_prompt(NAMES[0], array("Q", range(MAX_BLOCKS + 5)))
    assert readers[1].read().hints == [(NAMES[0], list(range(MAX_BLOCKS)))]


@pytest.mark.parametrize("successor", [0, 1])
def test_a_restarted_worker_reads_earlier_prompts(successor: int) -> None:
    """From other workers and from its own predecessor: the engines still hold the prefixes."""
    memory, members, _ = sharing()
    members[0].publish_prompt(NAMES[0], [1, 2])
    assert Reader(memory.member(successor)).read().hints == [(NAMES[0], [1, 2])]


# --------------------------------------------------------------------------- polls

POLLED = PollResult(12.5, True, EngineLoad(3, 2, 0.25, 16, 1000, 1.7e9, 10.0, None), "served", True)


def test_a_shared_poll_arrives_unchanged() -> None:
    """From the worker in charge, to the others; nothing before."""
    _, members, _ = sharing(3)
    in_charge = [[member.in_charge(name) for member in members] for name in NAMES]
    assert in_charge == [[True, False, False], [False, True, False]]  # spread by slot
    assert members[1].latest_poll(NAMES[0]) is None
    members[0].put_poll(NAMES[0], POLLED)
    assert [member.latest_poll(NAMES[0]) for member in members] == [POLLED] * 3
    assert members[0].latest_poll(NAMES[1]) is None


def test_the_next_worker_is_in_charge_once_one_is_dead() -> None:
    """Until there is a successor."""
    memory, members, _ = sharing(3)
    memory.wipe(0)
    assert [member.in_charge(NAMES[0]) for member in members[1:]] == [True, False]
    memory.wipe(1)
    assert members[2].in_charge(NAMES[0])
    memory.member(0)
    assert not members[2].in_charge(NAMES[0])


def test_a_shared_poll_of_another_endpoint_is_ignored() -> None:
    """Half written, of the endpoint that had the slot before, or too long."""
    memory, members, _ = sharing()
    members[0].put_poll(NAMES[0], POLLED)
    members[0].put_poll(NAMES[0], replace(POLLED, at=13.0, model="x" * POLL))
    assert members[1].latest_poll(NAMES[0]) == POLLED
    MemoryPart(memory, 0).words[VERSIONS + memory.slots] |= 1
    assert members[1].latest_poll(NAMES[0]) is None
    members[0].put_poll(NAMES[0], POLLED)
    for member in members:
        member.share(["other/a", NAMES[1]])
    assert members[1].latest_poll("other/a") is None


def test_an_endpoint_without_a_slot_is_polled_by_every_worker() -> None:
    _, members, _ = sharing()
    for member in members:
        member.share([*NAMES, "more/a"])
        assert member.in_charge("more/a")
        member.put_poll("more/a", POLLED)
