"""Prompts believed held in a provider's prompt cache, for one key and one model.

A provider reads a prefix of a prompt from its cache at a lower price. So a conversation that moves to another API pays
there for its whole prompt, and the expected price of a place counts what the provider still holds.

Rules:
- An answered prompt is believed held for the lifetime that the provider names, from its latest use on.
- An answer that reports much less than was believed at its sending ends the belief beyond what it reports, as far as no
  other prompt goes through the same blocks.
- Blocks are those of the prefix index, so cache groups share none. The least recently used are forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.prefix_cache.endpoint_cache import PrefixIndex
from policies.types import PoolEstimate, PromptCacheTerms

BLOCKS = 250_000  # 2 MB: 75 conversations of 100,000 tokens
REFUTED = 0.5  # share of the believed tokens, below which a report refutes the belief


class ProviderCache:
    """The belief. All times are seconds of the fleet's clock."""

    def __init__(self) -> None:
        self._index = PrefixIndex(BLOCKS)

    def hit(self, prompt: PoolEstimate, terms: PromptCacheTerms, now: float) -> int:
        """Leading tokens of the prompt believed held."""
        blocks = prompt.blocks
        depth = self._index.depth_since(blocks.hashes, _stamp(now - terms.lifetime))
        tokens = int(blocks.tokens(depth)) if depth else 0
        return tokens if tokens >= terms.least else 0

    def record(self, hashes: Sequence[int], at: float) -> None:
        """The provider has read a prompt of these blocks."""
        self._index.record(hashes, _stamp(at))

    def on_answered(self, prompt: PoolEstimate, sent_at: float, believed: int, reported: int | None) -> bool:
        """The same, of an answered prompt. `believed`: `hit` at its sending; `reported`: tokens read from the cache, by
        the usage of the answer; None: no usage came. Returns whether all of the prompt is believed held."""
        hashes = prompt.blocks.hashes
        self.record(hashes, sent_at)
        is_refuted = reported is not None and reported < REFUTED * believed
        if is_refuted:
            self._index.trim(hashes, len(hashes) * (reported or 0) // prompt.tokens, _stamp(sent_at))
        return not is_refuted


def _stamp(at: float) -> int:
    """Of the index: ms."""
    return int(at * 1e3)
