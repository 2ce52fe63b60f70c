"""Memory that the workers of one gateway share: what each has under way at each endpoint, and what it sent where.

Rules:
- Every worker writes to its own part alone and reads the others'. Nobody waits for anybody, nothing is locked.
- A burden has a version before and after it is written: odd while it is. Who reads one that changes meanwhile keeps the
  old one until the next look.
- Prefixes lie in a ring, newest over oldest. Who comes too late has missed some. What a reader finds there that was
  half written over names no prompt: it is noise, not error.
- Fields are 8 bytes and aligned, so that no reader sees half of one.
- Which slot is whose endpoint's is agreed upon in a table (`gateway.workers.slot_table`): endpoints come and go.
- What a dead worker had under way is wiped by its supervisor. Its successor reads the ring, its own too, from the last
  time it began anew: it knows what is cached where.

A look without news costs 0.1 us per sibling; one burden 4 us to tell and 5 us to hear.
"""

from __future__ import annotations

import logging
import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from struct import Struct

from gateway.workers.slot_table import SlotTable, tag
from policies.fleet.decode_interference import NO_MISSES, STALL_GRID
from policies.fleet.peers import NO_LOAD, PEER_LOAD_COUNTS, PEER_LOAD_FLOATS, PeerLoad, PeerReader, combined
from policies.types import NEVER

log = logging.getLogger("firsttoken")

BURDEN = Struct(f"<{PEER_LOAD_COUNTS}q{PEER_LOAD_FLOATS}d{len(STALL_GRID)}d")
HEAD = Struct("<QII")  # of a prompt in the ring: where it lies, its endpoint's tag, its blocks
RING = 4 << 20  # bytes per worker
EVERY = 0.005  # s between two looks at the others: what they do meanwhile is one change, worked out once
LONGEST = 16_384  # blocks of one prompt: half a million tokens in blocks of 32
CALM = (0.0,) * len(STALL_GRID)


class Memory:
    """To be made before the processes are forked that share it. `endpoints`: ids, the same to all; so many more can
    come as are `spare`."""

    def __init__(self, endpoints: Iterable[str], workers: int, spare: int = 0) -> None:
        self.endpoints, self.workers = list(endpoints), workers
        self.slots = slots = len(self.endpoints) + spare
        self.burdens = 8 * (2 + slots)  # from here on; before: news, the ring's head, a version per slot
        self.ring = self.burdens + BURDEN.size * slots
        self.part = self.ring + RING
        self.bytes = mmap.mmap(-1, self.part * workers)
        self.table = SlotTable(slots, workers)

    def member(self, number: int) -> WorkerMemory:
        member = WorkerMemory(self, number)
        member.share(self.endpoints)
        return member

    def wipe(self, number: int) -> None:
        """That worker has nothing under way."""
        for at in range(self.slots):
            Part(self, number).write(at, NO_LOAD)


class Part:
    """One worker's, as it writes it and the others read it."""

    def __init__(self, memory: Memory, number: int) -> None:
        self._memory, self._bytes = memory, memory.bytes
        self._from = number * memory.part
        # Read before every decision, so without a property: news (another number whenever something was written), the
        # ring's head, versions.
        self.words = memoryview(memory.bytes)[self._from : self._from + memory.burdens].cast("Q")
        self._burdens, self._ring = self._from + memory.burdens, self._from + memory.ring

    # -- burdens --------------------------------------------------------------------------

    def versions(self) -> list[int]:
        return self.words[2:].tolist()

    def write(self, at: int, burden: PeerLoad) -> None:
        words, version = self.words, self.words[2 + at] | 1
        words[2 + at] = version
        BURDEN.pack_into(
            self._bytes, self._burdens + BURDEN.size * at, *burden.numbers(), *(burden.expected_tpot_misses or CALM)
        )
        words[2 + at] = version + 1
        words[0] += 1

    def read(self, at: int) -> tuple[int, PeerLoad] | None:
        """With its version; None while it is written."""
        version = self.words[2 + at]
        fields = BURDEN.unpack_from(self._bytes, self._burdens + BURDEN.size * at)
        if version & 1 or self.words[2 + at] != version:
            return None
        own, harm = fields[: -len(STALL_GRID)], fields[-len(STALL_GRID) :]
        return version, PeerLoad.from_numbers(own, NO_MISSES if harm == CALM else harm)

    # -- prefixes -------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Where the next prompt will lie, in bytes since the beginning; in the ring, it lies there modulo its size."""
        return self.words[1]

    def append(self, at: int, hashes: Sequence[int]) -> None:
        """None lies across the ring's end."""
        blocks = hashes[:LONGEST]
        packed = (blocks if isinstance(blocks, array) else array("Q", blocks)).tobytes()
        size, head = HEAD.size + len(packed), self.head
        if head % RING + size > RING:
            head += RING - head % RING
        place = self._ring + head % RING
        HEAD.pack_into(self._bytes, place, head, at, len(packed) // 8)
        self._bytes[place + HEAD.size : place + size] = packed
        self.words[1] = head + size
        self.words[0] += 1

    def since(self, seen: int) -> tuple[int, list[tuple[int, array[int]]]]:
        """Where the reader is now, and the prompts since `seen`: endpoint and blocks."""
        head = self.head
        found: list[tuple[int, array[int]]] = []
        if head - seen > RING:
            return head, found
        while seen < head:
            entry = self._prompt(seen)
            if entry is None:
                seen += RING - seen % RING  # the ring's end, or written over
                continue
            found.append(entry)
            seen += HEAD.size + 8 * len(entry[1])
        return (head, found) if self.head - seen <= RING else (self.head, [])

    def _prompt(self, seen: int) -> tuple[int, array[int]] | None:
        place, room = self._ring + seen % RING, RING - seen % RING
        if room < HEAD.size:
            return None
        where, at, blocks = HEAD.unpack_from(self._bytes, place)
        if where != seen or HEAD.size + 8 * blocks > room:
            return None
        hashes = array("Q")
        hashes.frombytes(self._bytes[place + HEAD.size : place + HEAD.size + 8 * blocks])
        return at, hashes


class WorkerMemory:
    """Implements `policies.fleet.peers.Siblings` for one worker."""

    def __init__(self, memory: Memory, number: int) -> None:
        self._table, self._number = memory.table, number
        self._names: dict[int, str] = {}  # by slot
        self._tags: dict[int, str] = {}  # by the tag of a prompt in a ring
        self._at: dict[str, int] = {}
        self._own = Part(memory, number)
        self._others = [_Sibling(Part(memory, other)) for other in range(memory.workers) if other != number]
        self._before: _Sibling | None = _Sibling(self._own)  # what our predecessor knew
        self._due = NEVER  # when to look again
        memory.wipe(number)

    def share(self, endpoints: Iterable[str]) -> None:
        """These from now on. One that finds no slot is known to each worker by itself alone."""
        wanted = [*endpoints]
        for gone in self._at.keys() - {*wanted}:
            self._own.write(self._at[gone], NO_LOAD)
        self._at = self._table.take(self._number, wanted)
        self._names = {at: name for name, at in self._at.items()}
        self._tags = {tag(at, name): name for name, at in self._at.items()}
        for sibling in self._others:  # what was read of another endpoint's slot says nothing of this one
            sibling.look_anew()
        if len(self._at) < len(wanted):
            log.warning("%d endpoints are too many for workers to share", len(wanted) - len(self._at))

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        if (at := self._at.get(endpoint_id)) is not None:
            self._own.write(at, burden)

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        if (at := self._at.get(endpoint_id)) is not None:
            self._own.append(tag(at, endpoint_id), hashes)

    def merge(self, reader: PeerReader, now: float) -> None:
        if now < self._due:
            return
        self._due = now + EVERY
        changed = set[int]()
        for sibling in self._others:
            if sibling.words[0] != sibling.news:
                changed.update(sibling.look())
                self._hint(sibling, reader)
        for at in changed & self._names.keys():
            burdens = [sibling.burdens[at] for sibling in self._others if at in sibling.burdens]
            reader.on_peer_load(self._names[at], combined(burdens), now)
        if self._before is not None:
            self._hint(self._before, reader)
            self._before = None

    def _hint(self, sibling: _Sibling, reader: PeerReader) -> None:
        for tagged, hashes in sibling.prompts():
            if (name := self._tags.get(tagged)) is not None:
                reader.on_peer_prompt(name, hashes)


class _Sibling:
    """What was read last of another worker's part. What it had spent before we came is nothing to us: heard of all at
    once, it would be an engine that does nothing but prefill."""

    def __init__(self, part: Part) -> None:
        self.part, self.words = part, part.words
        self.news = -1
        self.burdens: dict[int, PeerLoad] = {}
        self._versions = [0] * len(part.versions())
        self._seen = part.head // RING * RING  # here a prompt begins
        before = {at: part.read(at) for at in range(len(self._versions))}
        self._before = {
            at: found[1].prefill_s for at, found in before.items() if found is not None and found[1].prefill_s
        }

    def look_anew(self) -> None:
        self.news, self.burdens = -1, {}
        self._versions = [0] * len(self._versions)  # of a slot that was never written

    def look(self) -> list[int]:
        """Which of its burdens have changed. One that is just being written is looked at again."""
        news, changed = self.words[0], list[int]()
        for at, version in enumerate(self.part.versions()):
            if version != self._versions[at]:
                if (found := self.part.read(at)) is None:
                    news = -1
                else:
                    self._versions[at], burden = found
                    self.burdens[at] = self._since(at, burden) if at in self._before else burden
                    changed.append(at)
        self.news = news
        return changed

    def _since(self, at: int, burden: PeerLoad) -> PeerLoad:
        """Less: it has begun anew."""
        if burden.prefill_s < self._before[at]:
            del self._before[at]
            return burden
        return replace(burden, prefill_s=burden.prefill_s - self._before[at])

    def prompts(self) -> list[tuple[int, array[int]]]:
        """Those that it has sent since."""
        self._seen, found = self.part.since(self._seen)
        return found
