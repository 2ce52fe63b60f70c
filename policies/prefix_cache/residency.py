"""Blocks held by an engine, from KV events, and the chain of these blocks which belongs to a prompt of ours.

An engine names a block by a hash of tokens from the engine's own tokenizer and chat template, which nobody else can
compute. So a prompt of ours is bound to the engine's chain by other evidence, when the prompt ends. Rules:
- Events name the session under which the prompt was sent (vLLM 0.32). Without sessions, a chain is found by depth:
  the last event of a prompt ends with the last full block, and only a single chain may have ended at the reported
  depth between sending and end, computed by the same LoRA adapter.
- The tokens before the first block stored for a prompt were cached, as many as reported: the depth of a chain with a
  start before the first event follows from the report.
- Models with several kinds of attention report groups. The first group with whole prompts counts: windows and states
  keep only the last blocks.
- Engines move blocks to slower tiers, and load them again: those blocks are held. Events of a slower tier tell where a
  known block lies as well, and begin no chain: every block was in the GPU first.
- Copies are not counted: a removal of a copy looks like a removal, until an answer or an event shows the other copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from policies.prefix_cache.block_tree import GPU, BlockTree, Chain
from policies.types import SLOWER_TIERS, PoolEstimate, PrefixBlocks

# Kinds of attention which keep only a part of a prompt (vLLM's KVCacheSpecKind).
PARTIAL_ATTENTION = frozenset(
    {"sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "encoder_only_attention"}
)
MAX_RECENT = 512  # stored events without a session which may still belong to a prompt of ours
MAX_BLOCKS = 4_000_000  # of an engine: more means lost removals
MAX_RUNS = 1 << 18  # of an engine, some 450 bytes each: more means that prompts share nothing, or an engine that lies
TIERS = {"gpu": GPU, **{tier: 2 << at for at, tier in enumerate(SLOWER_TIERS)}}  # bits by medium
UNNAMED = "\0"  # adapter without a name in the event
REUSE_WEIGHT = 1 / 16  # of the latest turn


class AnswerReuse:
    """Learned share of an answer's blocks which the next turn of a conversation finds cached.

    Chat templates differ, and reasoning is left out of the next prompt.
    """

    def __init__(self) -> None:
        self.share = 0.0

    def observe(self, share: float) -> None:
        self.share += (min(max(share, 0.0), 1.0) - self.share) * REUSE_WEIGHT


@dataclass(frozen=True, slots=True)
class ChainBinding:
    """A prompt of ours and the engine's chain for it.

    Both sides count blocks in different tokens. A prompt which ends or branches off within one of our blocks is assumed
    to share half of it: wrong by half a block at most.
    """

    prompt: Chain  # its full blocks
    answered: Chain  # these and the blocks of its answer
    tokens: int  # as reported
    blocks: int  # of ours
    measure: PrefixBlocks  # the engine's tokens in blocks of ours; without the hashes
    answer_reuse: AnswerReuse
    messages: int = 0  # 0: the prompt was not computed to its end

    def cached_tokens(self, depth: int, prompt: PoolEstimate) -> float:
        """Tokens held of a prompt with `depth` blocks shared with this prompt or a continuation."""
        resident = self.prompt.resident_tokens()
        if resident < self.full_block_tokens:
            return min(self.measure.tokens(depth + 0.5), resident)
        if depth > self.blocks:
            return self.tokens + prompt.blocks.tokens(depth) - prompt.blocks.tokens(self.blocks)
        if depth == self.blocks and prompt.messages > self.messages:
            return self.tokens + self.answer_reuse.share * (self.answered.resident_tokens() - resident)
        return min(self.measure.tokens(depth + 0.5), self.tokens)

    @property
    def full_block_tokens(self) -> int:
        return self.prompt.depth + (self.prompt.base or 0)

    def observe_turn(self, depth: int, prompt: PoolEstimate, cached: int) -> None:
        """`cached`: reported tokens of a prompt with `depth` shared blocks."""
        full = self.full_block_tokens
        answer = self.answered.resident_tokens() - full
        if depth == self.blocks and prompt.messages > self.messages and answer > 0 and cached >= full:
            self.answer_reuse.observe((cached - full) / answer)


@dataclass(slots=True)
class PendingChain:
    """A prompt under way, and the chain stored for its session so far."""

    session: str
    since: int  # number of stored events when it was sent
    adapter: str = ""  # LoRA adapter that answers
    first: Chain | None = None  # continued by the first event
    tip: Chain | None = None


@dataclass(frozen=True, slots=True)
class ResidencyStatistics:
    """Of an endpoint, as GET /fleet shows it."""

    blocks: int  # held
    runs: int
    anchored: int  # prompts with a known chain
    unanchored: int  # prompts without a known chain
    evicted: int  # blocks that the engine has dropped from the GPU
    slower_tokens: int  # held, but not in the GPU


class Residency:
    """The blocks of an engine."""

    def __init__(self) -> None:
        self.pending_stamps: set[int] = set()  # the index's stamps of prompts under way
        self.anchored = self.unanchored = self.evicted = 0
        self.tree = BlockTree()
        self._group: int | None = None
        self._pending: dict[Hashable, PendingChain] = {}
        self._by_session: dict[str, PendingChain] = {}
        self._recent: deque[tuple[int, Chain, str]] = deque(maxlen=MAX_RECENT)  # event's number, chain, adapter
        self._stored = 0

    # ----------------------------------------------------------------- events of the engine

    def on_stored(
        self,
        blocks: Sequence[int],
        parent: int | None,
        size: int,
        group: int = 0,
        kind: str | None = None,
        session: str = "",
        adapter: str = "",
        *,
        is_last: bool = True,
    ) -> None:
        """Blocks of `size` tokens, which follow `parent` and one another, are held. `kind`: of attention; `adapter`:
        LoRA adapter that computed them; `is_last`: no more blocks of the same event follow."""
        if self._group is None and blocks and kind not in PARTIAL_ATTENTION:
            self._group = group
        if not blocks or group != self._group:
            return
        first, tip = self.tree.store(blocks, parent, size)
        self._stored += is_last
        if session:
            if (pending := self._by_session.get(session)) is not None:
                pending.first = pending.first or first
                pending.tip = tip
        elif self._pending and is_last:
            self._recent.append((self._stored, tip, adapter))
        if len(self.tree) > MAX_BLOCKS or self.tree.runs > MAX_RUNS:
            self.clear()

    def on_removed(self, blocks: Sequence[int], group: int = 0, medium: str = "gpu") -> None:
        if group == self._group:
            self.evicted += len(blocks) * (medium == "gpu")
            for block in blocks:
                self.tree.remove(block, TIERS[medium])

    def on_offloaded(self, blocks: Sequence[int], group: int, medium: str) -> None:
        """Blocks are held in a slower tier."""
        if group == self._group:
            for block in blocks:
                self.tree.hold(block, TIERS[medium])

    def clear(self) -> None:
        """Assumes that no block is held."""
        self.tree.clear()
        self._recent.clear()
        for pending in self._pending.values():
            pending.first = pending.tip = None

    # ----------------------------------------------------------------- prompts of ours

    def on_sent(self, key: Hashable, session: str, stamp: int, adapter: str = "") -> None:
        self.pending_stamps.add(stamp)
        pending = self._pending[key] = PendingChain(session, self._stored, adapter)
        if session:
            self._by_session[session] = pending

    def chain(self, key: Hashable, tokens: int, cached: int | None) -> Chain | None:
        """The chain stored for a prompt of `tokens` tokens and for its answer; None: not known."""
        if (pending := self._pending.get(key)) is None:
            return None
        tip = pending.tip
        if tip is None and not pending.session:
            tip = self._by_depth(pending, tokens)
        if tip is None:
            return None
        root = tip.root
        if root.base is None and pending.first is not None and cached is not None:
            root.base = max(0, cached - pending.first.depth)
        return None if root.base is None else tip

    def awaits_events(self, key: Hashable) -> bool:
        """Returns whether later events may still tell the prompt's chain."""
        pending = self._pending.get(key)
        return pending is not None and bool(pending.session)

    def forget(self, key: Hashable) -> None:
        """Ends the search for the prompt's chain."""
        pending = self._pending.pop(key, None)
        if pending is not None and self._by_session.get(pending.session) is pending:
            del self._by_session[pending.session]

    def statistics(self) -> ResidencyStatistics:
        tree = self.tree
        return ResidencyStatistics(
            len(tree), tree.runs, self.anchored, self.unanchored, self.evicted, tree.slower_tokens
        )

    def _by_depth(self, pending: PendingChain, tokens: int) -> Chain | None:
        found: dict[int, Chain] = {}
        for number, tip, adapter in reversed(self._recent):
            if number <= pending.since:
                break
            if bool(adapter) != bool(pending.adapter) or adapter not in (pending.adapter, UNNAMED):
                continue
            size = tip.tip.size
            if tip.depth + (tip.base or 0) == tokens // size * size and (block := tip.last_block()) is not None:
                found[block] = tip
        return next(iter(found.values())) if len(found) == 1 else None
