"""A prompt of ours, tied to the engine's own chain of blocks: how much of another prompt it says is held.

Rules:
- Our blocks and the engine's are counted in different tokens. A prompt that ends or branches off within one of
  our blocks shares half of it: wrong by half a block at most.
- The next turn of a conversation gives the answer back. How much of an answer's blocks it finds again (chat
  templates differ, and reasoning is left out) is learned for each endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.prefix_cache.block_tree import Chain
from policies.types import PoolEstimate

MEMORY = 1 / 16  # weight of the latest turn


@dataclass(slots=True)
class AnswerReuse:
    """The share of an answer's blocks that the next turn finds again."""

    share: float = 0.0

    def observe(self, share: float) -> None:
        self.share += (min(max(share, 0.0), 1.0) - self.share) * MEMORY


@dataclass(frozen=True, slots=True)
class ChainBinding:
    """A prompt of ours and the engine's chain for it."""

    prompt: Chain  # its full blocks
    answered: Chain  # and those of its answer
    tokens: int  # as reported
    blocks: int  # of ours
    block_tokens: float  # the engine's tokens in one of ours
    messages: int = 0  # 0: it was not computed to its end
    answer_reuse: AnswerReuse = field(default_factory=AnswerReuse)

    def cached_tokens(self, depth: int, prompt: PoolEstimate) -> float:
        """Tokens held of a prompt that shares `depth` of its blocks with this one, or with one that continues it."""
        resident = self.prompt.resident_tokens()
        if resident < self.full_block_tokens:
            return min((depth + 0.5) * self.block_tokens, resident)
        if depth > self.blocks:
            return self.tokens + (depth - self.blocks) * prompt.blocks.size * prompt.blocks.scale
        if depth == self.blocks and prompt.messages > self.messages:
            return self.tokens + self.answer_reuse.share * (self.answered.resident_tokens() - resident)
        return min((depth + 0.5) * self.block_tokens, self.tokens)  # the border lies within the next block

    @property
    def full_block_tokens(self) -> int:
        return self.prompt.depth + (self.prompt.base or 0)

    def observe_turn(self, depth: int, prompt: PoolEstimate, cached: int) -> None:
        """So much of a prompt was cached."""
        answer = self.answered.resident_tokens() - self.full_block_tokens
        if depth == self.blocks and prompt.messages > self.messages and answer > 0 and cached >= self.full_block_tokens:
            self.answer_reuse.observe((cached - self.full_block_tokens) / answer)
