"""Prefix cache of an endpoint as believed here: a radix tree of the blocks sent there, corrected by KV events.

Rules of the tree:
- A block is named by a chained hash (unsigned 64 bits): equal hash, equal prefix up to and including the block. So a
  run is found by the first hash alone, and the divergence from a run by binary search.
- All blocks of a run were last used by the same prompt; a prompt through only a part splits the run.
- The least recently used block is evicted first and, of a prompt, the last block first, as vLLM frees blocks
  (`KVCacheManager.free` returns blocks in reverse). So a block never outlives the prefix before.
- The bound is the engine's capacity, scaled by the share which reports confirm: outputs, pinned blocks and other
  traffic take a part.
- A run may have a binding: the engine's own chain for a prompt through the run's end.
- A block takes 8 bytes and a share of a run.

Blocks which a prompt shares with earlier prompts are, by the last prompt through them:
- pending: the prompt has not ended. The blocks count, whatever the events say: the engine computes them first;
- bound: the prompt is bound to the engine's chain. The blocks count as far as the chain is held; blocks of ours beyond
  the chain's prompt count all or none;
- neither (no events, or no chain was found): the blocks count, within the capacity of `PrefixIndex`.

Tokens reported as cached were held, whatever the events say. A gap in the events drops every binding; a restart or a
cleared cache forgets all blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from policies.prefix_cache.block_tree import Chain
from policies.prefix_cache.residency import AnswerReuse, ChainBinding, Residency
from policies.types import PoolEstimate, PrefixBlocks

SHRINK = 0.2  # of the capacity, when no token of the believed hit was cached
GROW = 0.005  # of the capacity, when all of it was
MIN_SHARE_OF_CAPACITY = 1 / 256  # enough to be proved wrong
DEFAULT_BLOCKS = 25_000


@dataclass(slots=True, eq=False)
class IndexRun:
    """Consecutive blocks. `children`: number of runs after the end."""

    blocks: array[int]
    parent: IndexRun | None
    stamp: int  # of the last record through this run
    children: int = 0
    binding: ChainBinding | None = None  # of the last prompt through its end


class PrefixIndex:
    """The blocks believed cached at an endpoint."""

    def __init__(self, capacity: int = DEFAULT_BLOCKS) -> None:
        self.capacity = capacity  # bound in use
        self._nominal = capacity  # of the engine
        self._share = 1.0  # of the nominal capacity, that reports confirm
        self._stamp = 0
        self.clear()

    def clear(self) -> None:
        """Cache lost."""
        self.runs: dict[int, IndexRun] = {}  # by first hash
        self._order: OrderedDict[IndexRun, None] = OrderedDict()  # least recently used first; children before parents
        self._size = 0
        self._fit(self._nominal, 1.0)

    def __len__(self) -> int:
        """Blocks held."""
        return self._size

    def find(self, hashes: Sequence[int]) -> tuple[int, IndexRun | None]:
        """Number of leading blocks held, and the run of the last of them."""
        if not hashes or hashes[0] not in self.runs:
            return 0, None
        path, depth, _ = self._path(hashes)
        return depth, path[-1]

    def depth_since(self, hashes: Sequence[int], stamp: int) -> int:
        """Number of leading blocks held that a record of this stamp or of a later one went through."""
        path, depth, surplus = self._path(hashes)
        end = depth + surplus
        for run in reversed(path):
            if run.stamp >= stamp:
                return min(end, depth)
            end -= len(run.blocks)
        return 0

    def record(self, hashes: Sequence[int], stamp: int | None = None) -> int:
        """The endpoint is sent this prompt. `stamp`: of this record; None: the next number. Returns the stamp."""
        self._stamp = self._stamp + 1 if stamp is None else stamp
        path, depth, surplus = self._path(hashes)
        if surplus:
            path[-1] = self._split(path[-1], len(path[-1].blocks) - surplus)
        if depth < len(hashes):
            self._append(path, hashes, depth)
        for run in reversed(path):
            run.stamp = self._stamp
            self._order.move_to_end(run)
        self._evict()
        return self._stamp

    def bind(self, hashes: Sequence[int], binding: ChainBinding) -> None:
        """Records a prompt and binds it to the engine's chain."""
        self.record(hashes)
        for run in self._path(hashes)[0]:
            run.binding = binding

    def unbind(self) -> None:
        """Drops all bindings: the engine's events have a gap."""
        for run in self._order:
            run.binding = None

    def trim(self, hashes: Sequence[int], depth: int, stamp: int) -> None:
        """Takes back blocks past `depth` of a prompt which was not computed, unless used since its record."""
        path, shared, surplus = self._path(hashes)
        end = shared + surplus
        for run in reversed(path):
            if run.stamp != stamp or run.children or end <= depth:
                return
            end -= len(run.blocks)
            self._shorten(run, max(0, depth - end))

    def confirm(self, believed: int, reported: int) -> None:
        """Scales the capacity by how many of the tokens believed cached the engine reports as cached."""
        if reported < believed:
            self._fit(self._nominal, self._share * (1 - SHRINK * (believed - reported) / believed))
        elif self._share < 1.0:
            self._fit(self._nominal, self._share * (1 + GROW))

    def resize(self, blocks: int) -> None:
        """`blocks`: capacity of the engine."""
        self._fit(blocks, self._share)

    def _path(self, hashes: Sequence[int]) -> tuple[list[IndexRun], int, int]:
        """Runs on the path of the prompt, number of shared blocks, and surplus blocks of the last run."""
        path, at, size, runs = [], 0, len(hashes), self.runs
        while at < size and (run := runs.get(hashes[at])) is not None:
            path.append(run)
            end = at + len(run.blocks)
            if end > size or run.blocks[-1] != hashes[end - 1]:
                at += _shared(run.blocks, hashes, at)
                return path, at, end - at
            at = end
        return path, at, 0

    def _split(self, run: IndexRun, at: int) -> IndexRun:
        """Cuts a run in two; the lower part keeps its place in the LRU order."""
        upper = IndexRun(run.blocks[:at], run.parent, run.stamp, children=1, binding=run.binding)
        self.runs[run.blocks[0]] = upper
        run.blocks, run.parent = run.blocks[at:], upper
        self.runs[run.blocks[0]] = run
        self._order[upper] = None
        return upper

    def _append(self, path: list[IndexRun], hashes: Sequence[int], depth: int) -> None:
        parent = path[-1] if path else None
        fresh = array("Q", hashes[depth:])
        self._size += len(fresh)
        if parent is not None and not parent.children:
            parent.blocks.extend(fresh)
            return
        if parent is not None:
            parent.children += 1
        run = IndexRun(fresh, parent, self._stamp)
        self.runs[fresh[0]] = run
        self._order[run] = None
        path.append(run)

    def _fit(self, nominal: int, share: float) -> None:
        self._nominal = nominal
        self._share = min(max(share, MIN_SHARE_OF_CAPACITY), 1.0)
        self.capacity = max(1, round(nominal * self._share))
        self._evict()

    def _evict(self) -> None:
        while (excess := self._size - self.capacity) > 0:
            oldest = next(iter(self._order))
            self._shorten(oldest, max(0, len(oldest.blocks) - excess))

    def _shorten(self, run: IndexRun, keep: int) -> None:
        """Drops the tail of a run without children."""
        self._size -= len(run.blocks) - keep
        if keep:
            del run.blocks[keep:]
            return
        del self.runs[run.blocks[0]], self._order[run]
        if run.parent is not None:
            run.parent.children -= 1


def _shared(blocks: array[int], hashes: Sequence[int], at: int) -> int:
    """Number of leading `blocks` equal to `hashes[at:]`, given an equal first block: binary search."""
    high = min(len(blocks), len(hashes) - at)
    if blocks[high - 1] == hashes[at + high - 1]:
        return high
    low, high = 1, high - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if blocks[middle - 1] == hashes[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


MAX_LATE = 64  # prompts which ended before their last event


@dataclass(slots=True)
class PendingPrompt:
    """A prompt under way, or until its last event comes."""

    prompt: PoolEstimate
    depth: int  # blocks believed held when it was sent
    stamp: int  # of the record in the index
    after: ChainBinding | None  # of the prompt with the shared blocks
    tokens: int = 0  # once answered
    cached: int | None = None  # as the answer reported
    computed: int = 0  # tokens, by events, of a prompt which was not answered

    def measure(self, correction: float = 1.0) -> PrefixBlocks:
        """The engine's tokens in our blocks. `correction`: reported tokens per estimated one."""
        blocks = self.prompt.blocks
        return PrefixBlocks((), blocks.size, blocks.scale * correction, blocks.ends)


class EndpointCache:
    """`residency`: None unless the engine publishes KV events."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex(blocks)
        self.residency: Residency | None = None
        self._late: OrderedDict[Hashable, PendingPrompt] = OrderedDict()
        self._answer_reuse = AnswerReuse()

    def hit(self, prompt: PoolEstimate, block_size: int) -> int:
        """Leading tokens of the prompt (the engine's) believed cached: whole blocks, less than the prompt."""
        blocks = prompt.blocks
        depth, run = self.index.find(blocks.hashes)
        if run is None:
            return 0
        if run.binding is None or (self.residency is not None and run.stamp in self.residency.pending_stamps):
            held = blocks.tokens(depth)
        else:
            held = run.binding.cached_tokens(depth, prompt)
        return int(min(held, prompt.tokens - 1)) // block_size * block_size

    @property
    def slower_tokens(self) -> int:
        """Held in slower tiers alone."""
        return 0 if self.residency is None else self.residency.tree.slower_tokens

    def to_load(self, prompt: PoolEstimate, hit: int) -> tuple[int, ...]:
        """Of the `hit` tokens those that the engine has to load, by tier; empty: none."""
        residency = self.residency
        if not hit or residency is None or not residency.tree.slower_tokens:
            return ()
        _, run = self.index.find(prompt.blocks.hashes)
        bound = run is not None and run.stamp not in residency.pending_stamps and run.binding
        return bound.answered.slower_tokens(hit) if bound else ()

    # ----------------------------------------------------------------- prompts of ours

    def on_sent(self, key: Hashable, prompt: PoolEstimate, session: str) -> PendingPrompt:
        depth, run = self.index.find(prompt.blocks.hashes)
        after = None if run is None else run.binding
        stamp = self.index.record(prompt.blocks.hashes)
        if self.residency is not None:
            self.residency.on_sent(key, session, stamp, prompt.variant)
        return PendingPrompt(prompt, depth, stamp, after)

    def on_answered(self, key: Hashable, pending: PendingPrompt, tokens: int | None, cached: int | None) -> bool:
        """The prompt was computed. Returns whether the engine's events account for it, now or shortly."""
        if self.residency is None:
            return False
        self.residency.pending_stamps.discard(pending.stamp)
        pending.tokens = tokens or pending.prompt.tokens
        pending.cached = cached
        if pending.after is not None and cached is not None:
            pending.after.observe_turn(pending.depth, pending.prompt, cached)
        return self._bind(key, pending, self.residency) or self._await_events(key, pending, self.residency)

    def on_unanswered(self, key: Hashable, pending: PendingPrompt) -> None:
        """The prompt ended before the first token: only blocks in events were computed."""
        self.index.trim(pending.prompt.blocks.hashes, pending.depth, pending.stamp)
        if self.residency is not None:
            self.residency.pending_stamps.discard(pending.stamp)
            self._bind_computed(key, pending, self.residency)
            self._await_events(key, pending, self.residency)

    # ----------------------------------------------------------------- the engine

    def enable_events(self) -> Residency:
        self._late.clear()
        self._answer_reuse = AnswerReuse()
        self.residency = Residency()
        return self.residency

    def disable_events(self) -> None:
        """Falls back to the prompts which were sent."""
        if self.residency is not None:
            self.residency = None
            self._late.clear()
            self.index.unbind()

    def on_events(self) -> None:
        """Events came: prompts which ended before may be complete now."""
        if self.residency is not None:
            for key, pending in [*self._late.items()]:
                if pending.tokens and self._bind(key, pending, self.residency):
                    del self._late[key]
                elif not pending.tokens:
                    self._bind_computed(key, pending, self.residency)

    def on_event_gap(self) -> None:
        """Events were lost, and removals with them."""
        self._clear_residency()
        self.index.unbind()

    def clear(self) -> None:
        """Cache lost."""
        self._clear_residency()
        self.index.clear()

    def _clear_residency(self) -> None:
        if self.residency is not None:
            self.residency.clear()
            while self._late:
                self._give_up(*self._late.popitem(), self.residency)

    # ----------------------------------------------------------------- bindings

    def _bind(self, key: Hashable, pending: PendingPrompt, residency: Residency) -> bool:
        answered = residency.chain(key, pending.tokens, pending.cached) or self._shared_chain(pending)
        chain = answered and answered.truncated(pending.tokens)
        if chain is None or answered is None:
            return False
        if pending.cached is not None:
            residency.tree.mark_held(chain, pending.cached)
        prompt, hashes = pending.prompt, pending.prompt.blocks.hashes
        binding = ChainBinding(
            prompt=chain,
            answered=answered,
            tokens=pending.tokens,
            blocks=len(hashes),
            measure=pending.measure(pending.tokens / prompt.tokens),
            answer_reuse=self._answer_reuse,
            messages=prompt.messages,
        )
        self.index.bind(hashes, binding)
        residency.forget(key)
        residency.anchored += 1
        return True

    def _bind_computed(self, key: Hashable, pending: PendingPrompt, residency: Residency) -> None:
        """Binds the computed part of a cancelled prompt; the engine may still finish a step or two."""
        hashes, measure = pending.prompt.blocks.hashes, pending.measure()
        chain = residency.chain(key, pending.prompt.tokens, None)
        if chain is None or chain.depth <= pending.computed:
            return
        pending.computed = chain.depth
        resident = chain.resident_tokens()
        blocks = sum(1 for depth in range(1, len(hashes) + 1) if measure.tokens(depth) <= resident)
        self.index.trim(hashes, blocks, pending.stamp)
        if blocks:
            self.index.bind(hashes[:blocks], ChainBinding(chain, chain, resident, blocks, measure, AnswerReuse()))

    def _await_events(self, key: Hashable, pending: PendingPrompt, residency: Residency) -> bool:
        """Returns whether events for the prompt may still come."""
        if not residency.awaits_events(key):
            self._give_up(key, pending, residency)
            return False
        self._late[key] = pending
        if len(self._late) > MAX_LATE:
            self._give_up(*self._late.popitem(last=False), residency)
        return True

    def _shared_chain(self, pending: PendingPrompt) -> Chain | None:
        """The earlier prompt's chain, if all but the last tokens were cached: such a prompt stores no block."""
        _, run = self.index.find(pending.prompt.blocks.hashes)
        if run is None or (binding := run.binding) is None or pending.cached is None:
            return None
        size = binding.answered.tip.size
        return binding.answered if pending.cached == pending.tokens // size * size else None

    def _give_up(self, key: Hashable, pending: PendingPrompt, residency: Residency) -> None:
        residency.forget(key)
        residency.unanchored += pending.tokens > 0
