"""Shared memory of the workers of one gateway: load of each worker at each endpoint, prompts sent there, and polls.

Rules:
- Every worker writes only its own part and reads the others'. No worker waits, and only the slot table has a lock.
- A load has a version, odd during a write. A reader keeps the old load until the next read.
- Prompts lie in a ring, newest over oldest. A late reader misses some; a half-overwritten prompt is noise, no error.
- Fields are 8 bytes and aligned: no reader sees half a field.
- One worker polls an endpoint, the first one alive in the order that begins at the endpoint's slot, and writes the
  results. When it dies the next one is in charge at once.
- The supervisor wipes the loads of a dead worker. The successor reads all rings, its own too, for cached prompts.

A merge without changes costs 0.1 us per worker; a load costs 4 us to write and 5 us to read.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import pickle
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from struct import Struct
from tempfile import TemporaryFile
from typing import Any

import msgspec

from gateway.fleet.monitor import PollResult
from policies.fleet.peers import NO_LOAD, PEER_LOAD_COUNTS, PEER_LOAD_FLOATS, PeerLoad, PeerReader, combined
from policies.latency.tpot import NO_MISSES, STALL_GRID
from policies.types import NEVER

log = logging.getLogger("firsttoken")

LOAD = Struct(f"<{PEER_LOAD_COUNTS}q{PEER_LOAD_FLOATS}d{len(STALL_GRID)}d")
HEAD = Struct("<QII")  # of a prompt in the ring: its position, tag of its endpoint, number of blocks
RING = 4 << 20  # bytes per worker
MERGE_INTERVAL = 0.005  # s: changes within are applied together
MAX_BLOCKS = 16_384  # of one prompt: half a million tokens in blocks of 32
_decode_poll = msgspec.msgpack.Decoder(tuple[str, PollResult]).decode
ZERO_MISSES = (0.0,) * len(STALL_GRID)
POLL = 1024  # bytes for the latest poll of an endpoint
# Words at the beginning of a part; a version per slot of the load and a version per slot of the poll; the last word.
CHANGES, RING_HEAD, VERSIONS = range(3)
ALIVE = -1  # 1: the worker runs


class SlotTable:
    """Gives each endpoint a slot, the same for workers with different versions of the configuration.

    Workers hold slots under a digest of the endpoint's id (64 bits: no collisions); a slot without a holder is free.
    The slot free for the longest time is taken first, so leftovers are old.
    """

    def __init__(self, slots: int, workers: int) -> None:
        self._slots, self._workers = slots, workers
        # By slot: its digest, then when last held; by worker and slot: 1 if held; at the end a clock.
        self._cells = memoryview(mmap.mmap(-1, 8 * max((workers + 2) * slots + 1, 1))).cast("Q")
        self._lock = TemporaryFile()  # noqa: SIM115 - open as long as the process lives

    def take(self, worker: int, names: Iterable[str]) -> dict[str, int]:
        """Makes the worker hold slots for `names` only. Names without a free slot are left out."""
        wanted = {_digest(name): name for name in names}
        cells, slots, first = self._cells, self._slots, (2 + worker) * self._slots
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            cells[first : first + slots] = memoryview(bytes(8 * slots)).cast("Q")
            known = {cells[at]: at for at in range(slots) if cells[at] in wanted}
            taken = {*known.values()}
            free = [at for at in range(slots) if at not in taken and not any(cells[2 * slots + at : -1 : slots])]
            free.sort(key=lambda at: cells[slots + at])
            new = [digest for digest in wanted if digest not in known]
            for at, digest in zip(free, new, strict=False):
                cells[at], known[digest] = digest, at
            for at in known.values():
                cells[-1] += 1
                cells[first + at] = 1
                cells[slots + at] = cells[-1]
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return {wanted[digest]: at for digest, at in known.items()}


def _digest(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def slot_tag(at: int, name: str) -> int:
    """32 bits, half from the name: the slot may have had another endpoint when a prompt was written."""
    return at & 0xFFFF | (_digest(name) & 0xFFFF) << 16


class Memory:
    """To be created before the workers are forked. `spare`: slots beyond those of `endpoints`."""

    def __init__(self, endpoints: Iterable[str], workers: int, spare: int = 0) -> None:
        self.endpoints, self.workers = list(endpoints), workers
        self.slots = len(self.endpoints) + spare
        self.loads_at = 8 * (VERSIONS + 2 * self.slots + 1)
        self.polls_at = self.loads_at + LOAD.size * self.slots
        self.ring_at = self.polls_at + POLL * self.slots
        self.part_size = self.ring_at + RING
        self.bytes = mmap.mmap(-1, self.part_size * workers)
        self.table = SlotTable(self.slots, workers)

    def member(self, number: int) -> WorkerMemory:
        member = WorkerMemory(self, number)
        member.share(self.endpoints)
        return member

    def wipe(self, number: int) -> None:
        """Clears the loads of a worker, which is not alive."""
        part = MemoryPart(self, number)
        part.words[ALIVE] = 0
        for at in range(self.slots):
            part.write(at, NO_LOAD)


class MemoryPart:
    """One worker's part. `words` is public because every decision reads the changes."""

    def __init__(self, memory: Memory, number: int) -> None:
        begin = number * memory.part_size
        self._bytes, self._slots = memory.bytes, memory.slots
        self._loads_at, self._ring_at = begin + memory.loads_at, begin + memory.ring_at
        self._polls_at = begin + memory.polls_at
        self.words = memoryview(memory.bytes)[begin : self._loads_at].cast("Q")

    # -- loads ------------------------------------------------------------------------------

    def write(self, at: int, load: PeerLoad) -> None:
        words, version = self.words, self.words[VERSIONS + at] | 1
        words[VERSIONS + at] = version
        fields = *load.numbers(), *(load.expected_tpot_misses or ZERO_MISSES)
        LOAD.pack_into(self._bytes, self._loads_at + LOAD.size * at, *fields)
        words[VERSIONS + at] = version + 1
        words[CHANGES] += 1

    def read(self, at: int) -> PeerLoad | None:
        """None during a write."""
        version = self.words[VERSIONS + at]
        fields = LOAD.unpack_from(self._bytes, self._loads_at + LOAD.size * at)
        if version & 1 or self.words[VERSIONS + at] != version:
            return None
        numbers, misses = fields[: -len(STALL_GRID)], fields[-len(STALL_GRID) :]
        return PeerLoad.from_numbers(numbers, NO_MISSES if misses == ZERO_MISSES else misses)

    # -- polls ------------------------------------------------------------------------------

    def write_poll(self, at: int, poll: bytes) -> None:
        words, word, begin = self.words, VERSIONS + self._slots + at, self._polls_at + POLL * at
        words[word] = version = words[word] | 1
        self._bytes[begin : begin + len(poll)] = poll
        words[word] = version + 1

    def read_poll(self, at: int) -> bytes:
        """Padded; empty during a write."""
        word, begin = VERSIONS + self._slots + at, self._polls_at + POLL * at
        version = self.words[word]
        poll = self._bytes[begin : begin + POLL]
        return b"" if version & 1 or self.words[word] != version else poll

    # -- prompts ----------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Bytes written since the start: position of the next prompt, modulo the size of the ring."""
        return self.words[RING_HEAD]

    def append(self, tag: int, hashes: Sequence[int]) -> None:
        """Skips to the next lap if the prompt would cross the end of the ring."""
        packed = array("Q", hashes[:MAX_BLOCKS]).tobytes()
        size, head = HEAD.size + len(packed), self.head
        if head % RING + size > RING:
            head += RING - head % RING
        begin = self._ring_at + head % RING
        HEAD.pack_into(self._bytes, begin, head, tag, len(packed) // 8)
        self._bytes[begin + HEAD.size : begin + size] = packed
        self.words[RING_HEAD] = head + size
        self.words[CHANGES] += 1

    def read_prompts(self, seen: int) -> tuple[int, list[tuple[int, array[int]]]]:
        """The new position of the reader, and tag and blocks of each prompt since position `seen`."""
        head = self.head
        found: list[tuple[int, array[int]]] = []
        while head - RING <= seen < head:
            prompt = self._read_prompt(seen)
            if prompt is None:
                seen += RING - seen % RING  # end of the lap, or overwritten
            else:
                found.append(prompt)
                seen += HEAD.size + 8 * len(prompt[1])
        overtaken = self.head - seen > RING
        return (self.head, []) if overtaken else (head, found)

    def _read_prompt(self, seen: int) -> tuple[int, array[int]] | None:
        begin, room = self._ring_at + seen % RING, RING - seen % RING
        if room < HEAD.size:
            return None
        position, tag, blocks = HEAD.unpack_from(self._bytes, begin)
        if position != seen or HEAD.size + 8 * blocks > room:
            return None
        return tag, array("Q", self._bytes[begin + HEAD.size : begin + HEAD.size + 8 * blocks])


class PeerPart(MemoryPart):
    """The part of another worker, or of the predecessor, and the state last read.

    Earlier prefill seconds are subtracted: all at once would look like an engine busy with nothing but prefill.
    """

    def __init__(self, memory: Memory, number: int) -> None:
        super().__init__(memory, number)
        self.seen_changes = -1
        self.loads: dict[int, PeerLoad] = {}
        self._versions = [0] * memory.slots
        self._position = self.head // RING * RING  # a prompt begins here
        first = {at: self.read(at) for at in range(memory.slots)}
        self._prefill_before = {at: load.prefill_s for at, load in first.items() if load and load.prefill_s}

    def forget(self) -> None:
        self.seen_changes = -1
        self.loads = {}
        self._versions = [0] * len(self._versions)

    def read_changed(self) -> list[int]:
        """Slots with changed loads. Loads during a write are read next time."""
        changes, changed = self.words[CHANGES], list[int]()
        for at, version in enumerate(self.words[VERSIONS : VERSIONS + self._slots].tolist()):
            if version != self._versions[at]:
                if (load := self.read(at)) is None:
                    changes = -1
                else:
                    self._versions[at] = version
                    self.loads[at] = self._since_first_read(at, load)
                    changed.append(at)
        self.seen_changes = changes
        return changed

    def _since_first_read(self, at: int, load: PeerLoad) -> PeerLoad:
        before = self._prefill_before.get(at, 0.0)
        if load.prefill_s < before:  # another process has this part now
            before = self._prefill_before[at] = 0.0
        return replace(load, prefill_s=load.prefill_s - before) if before else load

    def new_prompts(self) -> list[tuple[int, array[int]]]:
        """Tag and blocks."""
        self._position, prompts = self.read_prompts(self._position)
        return prompts


class WorkerMemory:
    """Implements `policies.fleet.peers.PeerLink` for one worker."""

    def __init__(self, memory: Memory, number: int) -> None:
        self._table, self._number = memory.table, number
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}  # by slot
        self._tags: dict[int, str] = {}  # by tag of a prompt
        self._own = MemoryPart(memory, number)
        self._peers = [PeerPart(memory, peer) for peer in range(memory.workers) if peer != number]
        self._parts = [MemoryPart(memory, each) for each in range(memory.workers)]
        self._predecessor: PeerPart | None = PeerPart(memory, number)
        self._merge_at = NEVER
        memory.wipe(number)
        self._own.words[ALIVE] = 1

    def share(self, endpoints: Iterable[str]) -> None:
        """Shares these endpoints from now on. Load at an endpoint without a slot stays private to each worker."""
        wanted = [*endpoints]
        for gone in self._slots.keys() - {*wanted}:
            self._own.write(self._slots[gone], NO_LOAD)
        self._slots = self._table.take(self._number, wanted)
        self._names = {at: name for name, at in self._slots.items()}
        self._tags = {slot_tag(at, name): name for name, at in self._slots.items()}
        for peer in self._peers:
            peer.forget()  # the loads just read may be another endpoint's
        if len(self._slots) < len(wanted):
            log.warning("%d endpoints are too many for workers to share", len(wanted) - len(self._slots))

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        if (at := self._slots.get(endpoint_id)) is not None:
            self._own.write(at, load)

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        if (at := self._slots.get(endpoint_id)) is not None:
            self._own.append(slot_tag(at, endpoint_id), hashes)

    def in_charge(self, endpoint_id: str) -> bool:
        at = self._slots.get(endpoint_id)
        return at is None or self._poller(at) == self._number

    def put_poll(self, endpoint_id: str, result: PollResult) -> None:
        if (at := self._slots.get(endpoint_id)) is not None:
            encoded = msgspec.msgpack.encode((endpoint_id, result))
            if len(encoded) + 4 <= POLL:
                self._own.write_poll(at, len(encoded).to_bytes(4, "little") + encoded)

    def latest_poll(self, endpoint_id: str) -> PollResult | None:
        at = self._slots[endpoint_id]
        found = self._parts[self._poller(at)].read_poll(at)
        if not (size := int.from_bytes(found[:4], "little")):
            return None
        name, result = _decode_poll(found[4 : 4 + size])
        return result if name == endpoint_id else None

    def _poller(self, at: int) -> int:
        """Number of the worker in charge of the slot."""
        count = len(self._parts)
        order = ((at + step) % count for step in range(count))
        return next((number for number in order if self._parts[number].words[ALIVE]), self._number)

    def merge(self, reader: PeerReader, now: float) -> None:
        if now < self._merge_at:
            return
        self._merge_at = now + MERGE_INTERVAL
        changed = set[int]()
        prompts: list[tuple[int, array[int]]] = []
        for peer in self._peers:
            if peer.words[CHANGES] != peer.seen_changes:
                changed.update(peer.read_changed())
                prompts += peer.new_prompts()
        for at in changed & self._names.keys():
            loads = [peer.loads[at] for peer in self._peers if at in peer.loads]
            reader.on_peer_load(self._names[at], combined(loads), now)
        if self._predecessor is not None:
            prompts += self._predecessor.new_prompts()
            self._predecessor = None
        for tag, hashes in prompts:
            if (name := self._tags.get(tag)) is not None:
                reader.on_peer_prompt(name, hashes)


# -- state of the supervisor ---------------------------------------------------------------


class SharedValue:
    """A pickled value in an unnamed memory file: a configuration holds keys, which do not go to disk.

    The reader is told through a control channel when there is a new value; nothing else is put until then.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("firsttoken")

    def put(self, value: object) -> None:
        pickled = pickle.dumps(value)
        os.pwrite(self._file, pickled, 0)
        os.ftruncate(self._file, len(pickled))

    def get(self) -> Any:
        """None before the first `put`."""
        size = os.fstat(self._file).st_size
        return pickle.loads(os.pread(self._file, size, 0)) if size else None


class WorkerState(Enum):
    STARTING = 0
    SERVING = 1
    DRAINING = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """`starts`: number of processes so far."""

    state: WorkerState
    starts: int


class SharedState:
    """State of the workers and of reloads, to be created before the fork: the supervisor writes, others read.

    `reloads`: as `gateway.reload.ReloadCounts` counts. `config`: the last reloaded configuration. `answer`: to a POST
    /reload. `retired`: counters of exited workers, written by the admin aggregator for a successor.
    """

    def __init__(self, workers: int) -> None:
        # 8 bytes per field, aligned: no reader sees half a field.
        self._workers = memoryview(mmap.mmap(-1, workers * 16)).cast("q")
        self.reloads = memoryview(mmap.mmap(-1, 24)).cast("d")
        self.config = SharedValue()
        self.answer = SharedValue()
        self.retired = SharedValue()

    def set_worker(self, worker: int, status: WorkerStatus) -> None:
        self._workers[2 * worker] = status.state.value
        self._workers[2 * worker + 1] = status.starts

    def workers(self) -> list[WorkerStatus]:
        fields = iter(self._workers.tolist())
        return [WorkerStatus(WorkerState(state), starts) for state, starts in zip(fields, fields, strict=True)]
