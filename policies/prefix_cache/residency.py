"""Which blocks an engine holds, by its own word, and which chain of them is a prompt of ours.

An engine names a block by a hash that only it can compute: the tokens are those of its tokenizer and chat
template. So its events are kept as they come, as chains of its names, and a prompt of ours is tied to its
chain when it ends. Rules:
- A chain is known by the request that stored it: the engine repeats the session that we named in it (vLLM 0.32).
  Where it does not, by its depth: engines store what a step computed, so a prompt's last event ends with its last
  full block. The only chain that did so, between sending and end, at the depth that was reported; of two, neither.
- What precedes the first block stored for a prompt was cached: so many tokens as the engine reported. By that a
  chain finds its depth whose beginning was stored before we listened; its beginning is taken for held.
- Models that mix kinds of attention report groups. The first group that keeps whole prompts counts: of windows
  and states only the last blocks are kept, by design, and these go and come with the others.
- Copies are not counted: one removed of two looks like none left, until an answer or an event says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from policies.prefix_cache.block_tree import BlockTree, Chain

# Kinds of attention that keep a part of a prompt only (vLLM's KVCacheSpecKind).
PARTIAL_ATTENTION = frozenset(
    {"sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "encoder_only_attention"}
)
RECENT = 512  # stored events without a session that may still turn out to be a prompt of ours
MOST_BLOCKS = 4_000_000  # of one engine; beyond it somebody counts wrong


@dataclass(slots=True)
class PendingChain:
    """A prompt of ours under way. `first`, `tip`: what was stored for its session so far."""

    session: str
    since: int
    first: Chain | None = None
    tip: Chain | None = None


@dataclass(frozen=True, slots=True)
class ResidencyStatistics:
    """Of one endpoint."""

    blocks: int  # held
    runs: int
    anchored: int  # prompts of ours that were tied to their chains
    unanchored: int  # that were not


class Residency:
    """The blocks of one endpoint."""

    def __init__(self) -> None:
        self.pending_stamps: set[int] = set()  # the index's stamps of prompts under way
        self.anchored = self.unanchored = 0
        self._tree = BlockTree()
        self._group: int | None = None
        self._pending: dict[Hashable, PendingChain] = {}
        self._by_session: dict[str, PendingChain] = {}
        self._recent: deque[tuple[int, Chain]] = deque(maxlen=RECENT)
        self._stored = 0

    # ----------------------------------------------------------------- told by the engine

    def on_stored(
        self,
        blocks: Sequence[int],
        parent: int | None,
        size: int,
        group: int = 0,
        kind: str | None = None,
        session: str = "",
    ) -> None:
        """These blocks follow `parent` and one another, and are held."""
        if not blocks or not self._counts(group, kind):
            return
        first, tip = self._tree.store(blocks, parent, size)
        self._note(first, tip, session)

    def on_removed(self, blocks: Sequence[int], group: int = 0) -> None:
        if group == self._group:
            for block in blocks:
                self._tree.remove(block)

    def clear(self) -> None:
        """Nothing is held any more, or nobody knows what."""
        self._tree.clear()
        self._recent.clear()
        for watched in self._pending.values():
            watched.first = watched.tip = None

    # ----------------------------------------------------------------- told of our prompts

    def on_sent(self, key: Hashable, session: str, stamp: int) -> None:
        self.pending_stamps.add(stamp)
        watched = self._pending[key] = PendingChain(session, self._stored)
        if session:
            self._by_session[session] = watched

    def on_ended(self, stamp: int) -> None:
        """The prompt is not under way any more."""
        self.pending_stamps.discard(stamp)

    def chain(self, key: Hashable, tokens: int, cached: int | None) -> Chain | None:
        """What was stored for a prompt of so many tokens, and for its answer; None: that is not known."""
        watched = self._pending.get(key)
        if watched is None:
            return None
        tip = watched.tip
        if tip is None and not watched.session:
            tip = self._by_depth(watched.since, tokens)
        if tip is None:
            return None
        root = tip.root
        if root.base is None and watched.first is not None and cached is not None:
            root.base = max(0, cached - watched.first.depth)
        return None if root.base is None else tip

    def awaits_events(self, key: Hashable) -> bool:
        """Whether events to come may still say what its chain is."""
        watched = self._pending.get(key)
        return watched is not None and bool(watched.session)

    def forget(self, key: Hashable) -> None:
        """Its chain was found, or will not be."""
        watched = self._pending.pop(key, None)
        if watched is not None and self._by_session.get(watched.session) is watched:
            del self._by_session[watched.session]

    def mark_cached(self, chain: Chain, tokens: int) -> None:
        """An answer shows that so many leading tokens were held."""
        self._tree.mark_held(chain, tokens)

    def statistics(self) -> ResidencyStatistics:
        return ResidencyStatistics(len(self._tree), self._tree.runs, self.anchored, self.unanchored)

    # ----------------------------------------------------------------- whose it is

    def _counts(self, group: int, kind: str | None) -> bool:
        if self._group is None and kind not in PARTIAL_ATTENTION:
            self._group = group
        return group == self._group

    def _note(self, first: Chain, tip: Chain, session: str) -> None:
        self._stored += 1
        if session:
            watched = self._by_session.get(session)
            if watched is not None:
                watched.first = watched.first or first
                watched.tip = tip
        elif self._pending:
            self._recent.append((self._stored, tip))
        if len(self._tree) > MOST_BLOCKS:
            self.clear()

    def _by_depth(self, since: int, tokens: int) -> Chain | None:
        found: dict[int, Chain] = {}
        for number, tip in reversed(self._recent):
            if number <= since:
                break
            size = tip.tip.size
            if tip.depth + (tip.base or 0) == tokens // size * size and (block := tip.last_block()) is not None:
                found[block] = tip
        return next(iter(found.values())) if len(found) == 1 else None
