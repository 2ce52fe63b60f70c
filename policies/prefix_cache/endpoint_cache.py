"""Belief about the prefix cache of an endpoint, from our prompts and from the engine's KV events.

Blocks which a prompt shares with earlier prompts are, by the last prompt through them:
- pending: the prompt has not ended. The blocks count, whatever the events say: the engine computes them first;
- bound: the prompt is bound to the engine's chain. The blocks count as far as the chain is held; blocks of ours
  beyond
  the chain's prompt count all or none;
- neither (no events, or no chain was found): the blocks count, within the capacity of `PrefixIndex`.

Tokens reported as cached were held, whatever the events say. A gap in the events drops every binding; a restart or a
cleared cache forgets all blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from policies.prefix_cache.block_tree import Chain
from policies.prefix_cache.prefix_index import PrefixIndex
from policies.prefix_cache.residency import AnswerReuse, ChainBinding, Residency, ResidencyStatistics
from policies.types import PoolEstimate

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

    @property
    def block_tokens(self) -> float:
        """The engine's tokens in one of our blocks."""
        return self.prompt.blocks.size * self.prompt.blocks.scale


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
            held = depth * blocks.size * blocks.scale
        else:
            held = run.binding.cached_tokens(depth, prompt)
        if held >= prompt.tokens:
            held = prompt.tokens - 1
        return int(held) // block_size * block_size

    def residency_statistics(self) -> ResidencyStatistics | None:
        return None if self.residency is None else self.residency.statistics()

    # ----------------------------------------------------------------- prompts of ours

    def on_sent(self, key: Hashable, prompt: PoolEstimate, session: str) -> PendingPrompt:
        depth, run = self.index.find(prompt.blocks.hashes)
        after = None if run is None else run.binding
        stamp = self.index.record(prompt.blocks.hashes)
        if self.residency is not None:
            self.residency.on_sent(key, session, stamp)
        return PendingPrompt(prompt, depth, stamp, after)

    def on_answered(self, key: Hashable, pending: PendingPrompt, tokens: int | None, cached: int | None) -> bool:
        """The prompt was computed. Returns whether the engine's events account for it, now or shortly."""
        if self.residency is None:
            return False
        self.residency.on_ended(pending.stamp)
        pending.tokens = tokens or pending.prompt.tokens
        pending.cached = cached
        if pending.after is not None and cached is not None:
            pending.after.observe_turn(pending.depth, pending.prompt, cached)
        return self._bind(key, pending, self.residency) or self._await_events(key, pending, self.residency)

    def on_unanswered(self, key: Hashable, pending: PendingPrompt) -> None:
        """The prompt ended before the first token: only blocks in events were computed."""
        self.index.trim(pending.prompt.blocks.hashes, pending.depth, pending.stamp)
        if self.residency is not None:
            self.residency.on_ended(pending.stamp)
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
            residency.mark_cached(chain, pending.cached)
        prompt, hashes = pending.prompt, pending.prompt.blocks.hashes
        binding = ChainBinding(
            prompt=chain,
            answered=answered,
            tokens=pending.tokens,
            blocks=len(hashes),
            block_tokens=pending.block_tokens * pending.tokens / prompt.tokens,
            answer_reuse=self._answer_reuse,
            messages=prompt.messages,
        )
        self.index.bind(hashes, binding)
        residency.forget(key)
        residency.anchored += 1
        return True

    def _bind_computed(self, key: Hashable, pending: PendingPrompt, residency: Residency) -> None:
        """Binds the computed part of a cancelled prompt; the engine may still finish a step or two."""
        hashes, block_tokens = pending.prompt.blocks.hashes, pending.block_tokens
        chain = residency.chain(key, pending.prompt.tokens, None)
        if chain is None or chain.depth <= pending.computed:
            return
        pending.computed = chain.depth
        resident = chain.resident_tokens()
        blocks = min(int(resident / block_tokens), len(hashes))
        self.index.trim(hashes, blocks, pending.stamp)
        if blocks:
            self.index.bind(hashes[:blocks], ChainBinding(chain, chain, resident, blocks, block_tokens, AnswerReuse()))

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
