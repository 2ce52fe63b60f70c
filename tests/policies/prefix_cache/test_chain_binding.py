"""Cached tokens of a prompt that shares blocks with a bound prompt."""

from __future__ import annotations

import pytest

from policies.prefix_cache.block_tree import BlockTree
from policies.prefix_cache.residency import AnswerReuse, ChainBinding
from policies.types import PoolEstimate, PrefixBlocks

B = 32  # tokens of an engine block; a gateway block has 30 engine tokens
OURS = 30.0


def bound(tree: BlockTree) -> ChainBinding:
    """330 tokens: 10 engine blocks, 11 gateway blocks; and 3 blocks of answer."""
    _, answered = tree.store(range(1, 14), None, B)
    prompt = answered.truncated(330)
    assert prompt is not None
    return ChainBinding(prompt, answered, 330, 11, PrefixBlocks((), 32, OURS / 32), AnswerReuse(), messages=1)


def asked(blocks: int, messages: int = 1) -> PoolEstimate:
    return PoolEstimate(30 * blocks + 9, PrefixBlocks(range(1, blocks + 1), 32, OURS / 32), 100, messages)


@pytest.mark.parametrize(
    ("shared", "messages", "held"),
    [
        (4, 1, 4.5 * OURS),  # diverges within the fifth block
        (11, 1, 330),  # diverges behind the last whole block, or is equal: the whole prompt at most
        (11, 3, 330),  # the next turn: the whole prompt
        (13, 1, 330 + 2 * OURS),  # blocks of a longer prompt
    ],
)
def test_the_shared_prefix_of_a_resident_chain_is_cached(shared: int, messages: int, held: float) -> None:
    """All blocks of the chain are resident."""
    assert bound(BlockTree()).cached_tokens(shared, asked(14, messages)) == pytest.approx(held)


@pytest.mark.parametrize(("shared", "held"), [(2, 2.5 * OURS), (4, 3 * B), (11, 3 * B), (13, 3 * B)])
def test_evicted_blocks_are_not_cached(shared: int, held: float) -> None:
    """Three blocks are resident."""
    tree = BlockTree()
    binding = bound(tree)
    for block in range(10, 3, -1):
        tree.remove(block)
    assert binding.cached_tokens(shared, asked(14)) == pytest.approx(held)


def test_reuse_of_answers_is_learned_from_following_turns() -> None:
    """Other prompts teach nothing."""
    binding = bound(BlockTree())
    for _ in range(100):
        binding.observe_turn(11, asked(14, messages=3), cached=320 + 2 * B)
        binding.observe_turn(4, asked(14, messages=3), cached=0)
        binding.observe_turn(11, asked(14, messages=1), cached=320)
    assert binding.cached_tokens(11, asked(14, messages=3)) == pytest.approx(330 + 2 * B, abs=1)
