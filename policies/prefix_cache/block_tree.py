"""Radix tree of the blocks held by an engine, found by the hash of any block.

Rules:
- A block's hash covers all blocks before: equal hash, equal prefix. So the last block identifies a chain.
- A block counts while the block and all before are held, in the GPU or in a slower tier (CPU, disk, remote). A removed
  block keeps a place in the run while another block of the run is held, for chains through the run and for a return.
- The parent of a chain may have been stored before events were received: the root's depth is learned later.

Memory per block: two hashes (in the run, and in the table of runs) and a share of both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from policies.types import SLOWER_TIERS

NO_RUN = -1
MIN_SLOT_BITS = 4
SHARD_BITS = 6
SHARDS = 1 << SHARD_BITS
MAX_RUN = 256  # blocks: no search, cut or copy of a run is longer
_MASK = (1 << 64) - 1
_SHARD_SHIFT = 64 - SHARD_BITS
_MIX = hash("place of a block") & _MASK | 1  # another in each process
MAX_LOAD = 0.6  # share of slots in use
GPU = 1  # bit of a held block; that of the n-th slower tier is 2 << n
_NOT_GPU = range(2, 2 << len(SLOWER_TIERS), 2)  # bits of a block in slower tiers alone


class BlockTable:
    """Map from block hashes to run numbers in flat arrays: 12 bytes a slot, where a dict takes 70 to 100 an entry.

    Hashes are from 1 to 2**64 - 1, values are under 2**32. The engine chooses the hashes, so the place of one is told
    by its product with a random number: no choice of hashes puts them all behind one another. SHARDS tables grow one at
    a time: each for a part of the hashes, so that no growth takes long.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, block: int) -> int | None:
        mixed = block * _MIX & _MASK
        return self._shards[mixed >> _SHARD_SHIFT].get(block, mixed)

    def put(self, block: int, value: int) -> None:
        mixed = block * _MIX & _MASK
        self._shards[mixed >> _SHARD_SHIFT].put(block, value, mixed)

    def pop(self, block: int) -> int | None:
        mixed = block * _MIX & _MASK
        return self._shards[mixed >> _SHARD_SHIFT].pop(block, mixed)

    def clear(self) -> None:
        self._shards = [TableShard() for _ in range(SHARDS)]


class TableShard:
    """Open addressing with linear probing and backward-shift deletion (no tombstones). `mixed`: the product."""

    def __init__(self) -> None:
        self._allocate(MIN_SLOT_BITS)

    def __len__(self) -> int:
        return self._size

    def get(self, block: int, mixed: int) -> int | None:
        slot = self._slot(block, mixed)
        return self._values[slot] if self._hashes[slot] else None

    def put(self, block: int, value: int, mixed: int) -> None:
        slot = self._slot(block, mixed)
        self._values[slot] = value
        if not self._hashes[slot]:
            self._hashes[slot] = block
            self._size += 1
            if self._size > self._mask * MAX_LOAD:
                self._grow()

    def pop(self, block: int, mixed: int) -> int | None:
        slot = self._slot(block, mixed)
        if not self._hashes[slot]:
            return None
        value = self._values[slot]
        self._size -= 1
        self._close(slot)
        return value

    def _slot(self, block: int, mixed: int) -> int:
        """The slot of the block, or the free slot for it."""
        hashes, mask = self._hashes, self._mask
        slot = mixed >> self._shift & mask
        while (found := hashes[slot]) and found != block:
            slot = (slot + 1) & mask
        return slot

    def _close(self, hole: int) -> None:
        """Moves back the entries which a full slot had displaced."""
        hashes, values, mask, shift = self._hashes, self._values, self._mask, self._shift
        slot = hole
        while block := hashes[slot := (slot + 1) & mask]:
            home = (block * _MIX & _MASK) >> shift & mask
            if (slot - home) & mask >= (slot - hole) & mask:
                hashes[hole], values[hole] = block, values[slot]
                hole = slot
        hashes[hole] = 0

    def _grow(self) -> None:
        entries = zip(self._hashes, self._values, strict=True)
        self._allocate(self._mask.bit_length() + 1)
        for block, value in entries:
            if block:
                self.put(block, value, block * _MIX & _MASK)

    def _allocate(self, bits: int) -> None:
        slots = 1 << bits
        self._hashes, self._values = array("Q", bytes(8 * slots)), array("I", bytes(4 * slots))
        self._mask = slots - 1
        self._shift = _SHARD_SHIFT - bits  # the bits below those of the shard
        self._size = 0


@dataclass(slots=True, eq=False)
class BlockRun:
    """Node of the tree: consecutive blocks of a size. Only the end of a run can be continued."""

    parent: BlockRun | None
    start: int  # tokens from the root
    size: int  # tokens of a block
    base: int | None  # tokens before the root; None: not known yet
    number: int  # among the runs which hold a block; NO_RUN once none is held
    blocks: array[int] = field(default_factory=partial(array, "Q"))
    held: bytearray = field(default_factory=bytearray)  # by block: bits of tiers, or 0 once removed
    children: dict[int, BlockRun] = field(default_factory=dict)  # by first block
    gaps: int = 0  # blocks not in the GPU
    hint: int = 0  # one past the index at which the next event is expected: a prompt's blocks are freed last to first

    def position(self, block: int) -> int:
        if self.blocks[-1] == block:
            return len(self.blocks) - 1
        if 0 < self.hint <= len(self.blocks) and self.blocks[self.hint - 1] == block:
            return self.hint - 1
        return self.blocks.index(block)

    def depth(self, blocks: int) -> int:
        """Tokens from the root to the end of the first `blocks` blocks."""
        return self.start + blocks * self.size


@dataclass(slots=True)
class Chain:
    """The blocks of a prompt: `depth` tokens from the root, the last of them in the run `tip`."""

    tip: BlockRun
    depth: int

    def path(self) -> Iterator[BlockRun]:
        """Runs, last to first."""
        run: BlockRun | None = self.tip
        while run is not None:
            if run.start < self.depth:
                yield run
            run = run.parent

    @property
    def root(self) -> BlockRun:
        run = self.tip
        while run.parent is not None:
            run = run.parent
        return run

    @property
    def base(self) -> int | None:
        """Tokens before the root; None: not known yet."""
        return self.root.base

    def resident_tokens(self) -> int:
        """Leading tokens which are held."""
        tokens = self.depth
        for run in self.path():
            if run.gaps and run.start < tokens and (gap := run.held.find(0)) >= 0:
                tokens = min(tokens, run.start + gap * run.size)
        return tokens + (self.base or 0)

    def slower_tokens(self, tokens: int) -> tuple[int, ...]:
        """Of the leading `tokens` those that the engine has to load, by tier; empty: all are in the GPU."""
        found = [0] * len(SLOWER_TIERS)
        for run in self.path():
            if run.gaps:
                held = run.held[: max(tokens - (self.base or 0) - run.start, 0) // run.size]
                for bits in _NOT_GPU:
                    found[(bits & -bits).bit_length() - 2] += held.count(bits) * run.size
        return tuple(found) if any(found) else ()

    def last_block(self) -> int | None:
        for run in self.path():
            at = (self.depth - run.start) // run.size - 1
            return run.blocks[at] if at < len(run.blocks) else None
        return None

    def truncated(self, tokens: int) -> Chain | None:
        """Full blocks of a prompt of `tokens` tokens; None: the chain is shorter."""
        depth = tokens // self.tip.size * self.tip.size - (self.base or 0)
        return Chain(self.tip, depth) if depth <= self.depth else None


class BlockTree:
    def __init__(self) -> None:
        self.slower_tokens = 0  # held in slower tiers alone
        self._run_of = BlockTable()  # number of the run of each held block
        self._runs: dict[int, BlockRun] = {}  # by number
        self._free_numbers: list[int] = []
        self._roots: dict[int, BlockRun] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._run_of)

    @property
    def runs(self) -> int:
        return len(self._runs)

    def store(self, blocks: Sequence[int], parent: int | None, size: int) -> tuple[Chain, Chain]:
        """Holds consecutive blocks after `parent`. Returns the continued chain and the new chain."""
        run, at = (None, 0) if parent is None else self._end_of(parent, size)
        continued = None if run is None else Chain(run, run.depth(at))
        for block in blocks:
            run, at = self._step(run, at, block, size)
        assert run is not None
        return continued or Chain(run, 0), Chain(run, run.depth(at))

    def remove(self, block: int, tier: int = GPU) -> None:
        """The block is not held in the tier any more."""
        if (run := self._find(block)) is None:
            return
        at = run.hint = run.position(block)
        before = run.held[at]
        run.held[at] = left = before & ~tier
        if before & GPU > left & GPU:
            run.gaps += 1
            self.slower_tokens += run.size * (left > 0)
        elif before and not left:
            self.slower_tokens -= run.size
        if not left:
            self._run_of.pop(block)
            self._drop_empty(run)

    def hold(self, block: int, tier: int) -> None:
        """The block, if it is known, is held in the slower tier too."""
        if (run := self._find(block)) is not None:
            at = run.position(block)
            run.held[at] |= tier
            run.hint = at + 2

    def clear(self) -> None:
        self.slower_tokens = 0
        for run in self._runs.values():
            run.number = NO_RUN
        for container in (self._run_of, self._runs, self._free_numbers, self._roots):
            container.clear()

    def mark_held(self, chain: Chain, tokens: int) -> None:
        """Holds the leading tokens of the chain."""
        for run in chain.path():
            if run.number == NO_RUN:
                continue
            held = min(tokens - (chain.base or 0) - run.start, chain.depth - run.start) // run.size
            for at in range(min(held, len(run.blocks))):
                if not run.held[at]:
                    self._hold(run, at)

    def _end_of(self, block: int, size: int) -> tuple[BlockRun, int]:
        """Position after the block. An unknown block, stored before events were received, becomes a root."""
        run = self._find(block)
        if run is not None:
            return run, run.position(block) + 1
        run = self._new_run(None, 0, size, base=None)
        self._append(run, block)
        return run, 1

    def _step(self, run: BlockRun | None, at: int, block: int, size: int) -> tuple[BlockRun, int]:
        """Holds the block after position `at` of the run; returns the position after it."""
        known = self._find(block)
        if known is not None:
            at = known.position(block)
            if not known.held[at] & GPU:
                self._hold(known, at)
            return known, at + 1
        if run is not None and at < len(run.blocks):
            if run.blocks[at] == block:
                self._hold(run, at)
                return run, at + 1
            run = self._split(run, at)
        siblings = self._roots if run is None else run.children
        if (removed := siblings.get(block)) is not None:
            self._hold(removed, 0)
            return removed, 1
        if run is None or run.children or run.size != size or len(run.blocks) >= MAX_RUN:
            run = siblings[block] = self._new_run(run, 0 if run is None else run.depth(len(run.blocks)), size, base=0)
        self._append(run, block)
        return run, len(run.blocks)

    def _find(self, block: int) -> BlockRun | None:
        number = self._run_of.get(block)
        return None if number is None else self._runs[number]

    def _new_run(self, parent: BlockRun | None, start: int, size: int, base: int | None) -> BlockRun:
        number = self._free_numbers.pop() if self._free_numbers else len(self._runs)
        self._runs[number] = run = BlockRun(parent, start, size, base, number)
        return run

    def _append(self, run: BlockRun, block: int) -> None:
        run.blocks.append(block)
        run.held.append(1)
        self._run_of.put(block, run.number)

    def _hold(self, run: BlockRun, at: int) -> None:
        self.slower_tokens -= run.size * (run.held[at] > 0)
        run.held[at] |= GPU
        run.gaps -= 1
        self._run_of.put(run.blocks[at], run.number)

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        """Cuts a run in two; the lower part keeps identity and chains."""
        upper = self._new_run(run.parent, run.start, run.size, run.base)
        upper.blocks, upper.held = run.blocks[:at], run.held[:at]
        upper.gaps = sum(not held & GPU for held in upper.held) if run.gaps else 0
        siblings = self._roots if run.parent is None else run.parent.children
        if siblings.get(run.blocks[0]) is run:
            siblings[run.blocks[0]] = upper
        for held, block in zip(upper.held, upper.blocks, strict=True):
            if held:
                self._run_of.put(block, upper.number)
        run.start = run.depth(at)
        run.blocks, run.held = run.blocks[at:], run.held[at:]
        run.gaps -= upper.gaps
        run.hint = 0
        run.parent = upper
        upper.children[run.blocks[0]] = run
        self._drop_empty(run)
        return upper

    def _drop_empty(self, run: BlockRun | None) -> None:
        """Removes the run and empty ancestors without children."""
        while run is not None and run.gaps == len(run.blocks) and not run.children and not any(run.held):
            siblings = self._roots if run.parent is None else run.parent.children
            siblings.pop(run.blocks[0], None)
            del self._runs[run.number]
            self._free_numbers.append(run.number)
            run.number = NO_RUN
            run = run.parent
