"""The blocks that an engine holds, as a tree of runs, found by any block's name.

Rules:
- A block's name covers all that precedes it: equal name, equal beginning. So a chain of blocks is known by its end.
- A block counts as long as it and all before it are held. One that was removed keeps its place in its run while
  something of the run is held, for chains that go through it and for its return.
- What a chain continues may have been stored before we listened: its root's depth is then learned later.

A block costs its name twice, in its run and in the table that finds the run, and its share of both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.prefix_cache.block_table import BlockTable

GONE = -1


class BlockRun:
    """Consecutive blocks of one size. Depths are tokens from the root; `base` is what precedes the root."""

    __slots__ = ("base", "blocks", "children", "gaps", "held", "hint", "number", "parent", "size", "start")

    def __init__(self, parent: BlockRun | None, start: int, size: int, base: int | None) -> None:
        self.blocks: array[int] = array("Q")
        self.held = bytearray()  # by block: 1, or 0 once it was removed
        self.gaps = 0  # blocks not held
        self.children: dict[int, BlockRun] = {}  # by first block: only a run's end can be continued
        self.parent, self.start, self.size, self.base = parent, start, size, base
        self.hint = 0  # the block removed last: the engine frees a prompt's blocks last to first
        self.number = GONE  # among the runs that hold something

    def position(self, block: int) -> int:
        blocks, hint = self.blocks, self.hint - 1
        if blocks[-1] == block:
            return len(blocks) - 1
        if hint >= 0 and blocks[hint] == block:
            return hint
        return blocks.index(block)

    def depth(self, blocks: int) -> int:
        """Tokens up to the end of so many of its blocks."""
        return self.start + blocks * self.size


@dataclass(slots=True)
class Chain:
    """The blocks of one prompt: `depth` tokens from the root, of which `tip` holds the last."""

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
        """Leading tokens that are held."""
        run, tokens = self.tip, self.depth
        while True:
            if run.gaps and run.start < tokens:
                tokens = min(tokens, run.start + run.held.find(0) * run.size)
            if run.parent is None:
                return tokens + (run.base or 0)
            run = run.parent

    def last_block(self) -> int | None:
        """Its last block."""
        for run in self.path():
            at = (self.depth - run.start) // run.size - 1
            return run.blocks[at] if at < len(run.blocks) else None
        return None

    def truncated(self, tokens: int) -> Chain | None:
        """Its full blocks of a prompt of so many tokens; None: it does not reach so far."""
        depth = tokens // self.tip.size * self.tip.size - (self.base or 0)
        return Chain(self.tip, depth) if depth <= self.depth else None


class BlockTree:
    """Of one engine."""

    def __init__(self) -> None:
        self._where = BlockTable()  # the run of each block that is held
        self._runs: list[BlockRun | None] = []
        self._free: list[int] = []  # numbers
        self._roots: dict[int, BlockRun] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._where)

    @property
    def runs(self) -> int:
        return len(self._runs) - len(self._free)

    def store(self, blocks: Sequence[int], parent: int | None, size: int) -> tuple[Chain, Chain]:
        """These follow `parent` and one another, and are held. The chain that they continue, and the chain they end."""
        run, at = (None, 0) if parent is None else self._end_of(parent, size)
        first = None if run is None else Chain(run, run.depth(at))
        for block in blocks:
            run, at = self._step(run, at, block, size)
        assert run is not None
        return first or Chain(run, 0), Chain(run, run.depth(at))

    def remove(self, block: int) -> None:
        number = self._where.pop(block)
        run = None if number is None else self._runs[number]
        if run is None:
            return
        at = run.hint = run.position(block)
        run.held[at] = 0
        run.gaps += 1
        self._drop(run)

    def clear(self) -> None:
        for run in self._runs:
            if run is not None:
                run.number = GONE
        for known in (self._where, self._runs, self._free, self._roots):
            known.clear()

    def mark_held(self, chain: Chain, tokens: int) -> None:
        """So many leading tokens are held."""
        for run in chain.path():
            if run.number == GONE:
                continue
            upto = min(tokens - (chain.base or 0) - run.start, chain.depth - run.start) // run.size
            for at in range(min(upto, len(run.blocks))):
                if not run.held[at]:
                    self._hold(run, at)

    def _end_of(self, block: int, size: int) -> tuple[BlockRun, int]:
        """Where the block is; one that was stored before we listened is the root of a tree of unknown depth."""
        run = self._find(block)
        if run is not None:
            return run, run.position(block) + 1
        run = self._new(None, 0, size, base=None)
        self._append(run, block)
        return run, 1

    def _step(self, run: BlockRun | None, at: int, block: int, size: int) -> tuple[BlockRun, int]:
        """The block is the next one there."""
        known = self._find(block)
        if known is not None:
            return known, known.position(block) + 1
        if run is not None and at < len(run.blocks):
            if run.blocks[at] == block:
                self._hold(run, at)
                return run, at + 1
            run = self._split(run, at)
        siblings = self._roots if run is None else run.children
        if (old := siblings.get(block)) is not None:
            self._hold(old, 0)
            return old, 1
        if run is None or run.children or run.size != size:
            run = siblings[block] = self._new(run, 0 if run is None else run.depth(len(run.blocks)), size, base=0)
        self._append(run, block)
        return run, len(run.blocks)

    def _find(self, block: int) -> BlockRun | None:
        number = self._where.get(block)
        return None if number is None else self._runs[number]

    def _new(self, parent: BlockRun | None, start: int, size: int, base: int | None) -> BlockRun:
        run = BlockRun(parent, start, size, base)
        if self._free:
            run.number = self._free.pop()
            self._runs[run.number] = run
        else:
            run.number = len(self._runs)
            self._runs.append(run)
        return run

    def _append(self, run: BlockRun, block: int) -> None:
        run.blocks.append(block)
        run.held.append(1)
        self._where.put(block, run.number)

    def _hold(self, run: BlockRun, at: int) -> None:
        run.held[at] = 1
        run.gaps -= 1
        self._where.put(run.blocks[at], run.number)

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        """Cut a run in two: the lower part stays itself, and with it the chains that end there."""
        upper = self._new(run.parent, run.start, run.size, run.base)
        upper.blocks, upper.held = run.blocks[:at], run.held[:at]
        upper.gaps = upper.held.count(0)
        siblings = self._roots if run.parent is None else run.parent.children
        if siblings.get(run.blocks[0]) is run:
            siblings[run.blocks[0]] = upper
        for i, block in enumerate(upper.blocks):
            if upper.held[i]:
                self._where.put(block, upper.number)
        run.start = run.depth(at)
        run.blocks, run.held, run.gaps, run.hint = run.blocks[at:], run.held[at:], run.gaps - upper.gaps, 0
        run.parent = upper
        upper.children[run.blocks[0]] = run
        self._drop(run)
        return upper

    def _drop(self, run: BlockRun | None) -> None:
        """If nothing of it is held, and nothing continues it."""
        while run is not None and run.gaps == len(run.blocks) and not run.children:
            siblings = self._roots if run.parent is None else run.parent.children
            siblings.pop(run.blocks[0], None)
            self._runs[run.number] = None
            self._free.append(run.number)
            run.number = GONE
            run = run.parent
