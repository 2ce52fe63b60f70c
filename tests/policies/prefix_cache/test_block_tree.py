"""Chains of cached blocks; test_residency.py compares chains with a set of blocks."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from policies.prefix_cache.block_tree import BlockTree

B = 16  # tokens


def test_a_chain_survives_branches() -> None:
    """At any block, and after the removal of blocks of the branch."""
    tree = BlockTree()
    _, chain = tree.store([1, 2, 3, 4], None, B)
    _, other = tree.store([7, 8], 2, B)
    _, third = tree.store([9], 1, B)
    assert [(one.resident_tokens(), one.last_block()) for one in (chain, other, third)] == [
        (4 * B, 4),
        (4 * B, 8),
        (2 * B, 9),
    ]
    for block in (8, 7, 9):
        tree.remove(block)
    assert [one.resident_tokens() for one in (chain, other, third)] == [4 * B, 2 * B, B]


def test_a_block_stored_again_closes_its_gap() -> None:
    """The blocks behind the gap were resident all the time."""
    tree = BlockTree()
    _, chain = tree.store([1, 2, 3], None, B)
    tree.remove(2)
    assert chain.resident_tokens() == B
    tree.store([2], 1, B)
    assert (chain.resident_tokens(), len(tree)) == (3 * B, 3)


def test_empty_runs_are_removed() -> None:
    """With the branches of their prompts: a tree that lives for months does not grow."""
    tree = BlockTree()
    for prompt in range(100):
        blocks = [1, *(1000 * (prompt + 1) + i for i in range(10))]
        tree.store(blocks, None, B)
        for block in reversed(blocks[1:]):
            tree.remove(block)
    assert (len(tree), tree.runs) == (1, 1)


def test_a_cleared_tree_ignores_old_chains() -> None:
    """Chains from before the clearing hold blocks of a lost cache."""
    tree = BlockTree()
    _, chain = tree.store([1, 2], None, B)
    tree.remove(2)
    tree.clear()
    tree.mark_held(chain, 2 * B)
    assert (len(tree), tree.runs) == (0, 0)


@pytest.mark.parametrize("prompts", [400, 800, 1200])
def test_a_block_costs_less_than_60_bytes(prompts: int) -> None:
    """At any load of the table; the index of sent prompts takes 12 more."""
    random, tree = Random(1), BlockTree()
    tracemalloc.start()
    for _ in range(prompts):
        tree.store([random.getrandbits(64) for _ in range(100)], None, B)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tree) == 100 * prompts
    assert size / (100 * prompts) < 60
