"""Blocks that an engine has moved to slower tiers: held, and to be loaded."""

from __future__ import annotations

from random import Random

import pytest

from policies.prefix_cache.block_tree import GPU, BlockTree
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.prefix_cache.residency import TIERS
from policies.types import PoolEstimate, PrefixBlocks

B = 16  # tokens
CPU, DISK = TIERS["cpu"], TIERS["disk"]
PROMPT = PoolEstimate(4 * B + 5, PrefixBlocks([101, 102, 103, 104], B, 1.0), 4 * B + 5, 1)


def test_a_block_that_leaves_the_gpu_is_held_while_a_slower_tier_has_it() -> None:
    """And is gone with the last copy."""
    tree = BlockTree()
    _, chain = tree.store([1, 2, 3], None, B)
    tree.hold(3, CPU)
    tree.hold(3, DISK)
    tree.remove(3)
    assert (chain.resident_tokens(), chain.slower_tokens(3 * B), tree.slower_tokens) == (3 * B, (B, 0, 0), B)
    tree.remove(3, CPU)
    assert (chain.resident_tokens(), chain.slower_tokens(3 * B), tree.slower_tokens) == (3 * B, (0, B, 0), B)
    tree.remove(3, DISK)
    assert (chain.resident_tokens(), chain.slower_tokens(3 * B), tree.slower_tokens) == (2 * B, (), 0)


def test_a_block_that_was_loaded_is_in_the_gpu_again() -> None:
    """The copy below stays, and counts once the GPU drops the block."""
    tree = BlockTree()
    _, chain = tree.store([1, 2], None, B)
    tree.hold(2, CPU)
    tree.remove(2)
    tree.store([2], 1, B)
    assert (chain.slower_tokens(2 * B), tree.slower_tokens, len(tree)) == ((), 0, 2)
    tree.remove(2)
    assert (chain.slower_tokens(2 * B), tree.slower_tokens) == ((B, 0, 0), B)


def test_a_prompt_that_lies_in_a_slower_tier_alone_is_found() -> None:
    """Its run has no block in the GPU, and is kept; a branch of it cuts the run."""
    tree = BlockTree()
    _, chain = tree.store([1, 2, 3, 4], None, B)
    for block in (1, 2, 3, 4):
        tree.hold(block, CPU)
    for block in (4, 3, 2, 1):
        tree.remove(block)
    assert (chain.resident_tokens(), chain.slower_tokens(4 * B)) == (4 * B, (4 * B, 0, 0))
    _, branch = tree.store([9], 2, B)
    assert (branch.slower_tokens(3 * B), chain.slower_tokens(3 * B)) == ((2 * B, 0, 0), (3 * B, 0, 0))
    for block in (9, 1, 2, 3, 4):
        tree.remove(block, GPU if block == 9 else CPU)
    assert (len(tree), tree.runs, tree.slower_tokens) == (0, 0, 0)


def test_events_of_any_order_leave_what_a_set_of_copies_would() -> None:
    """Moves between tiers, and evictions from each, against a plain model."""
    random, tree = Random(5), BlockTree()
    copies: dict[int, int] = {}
    tree.store(blocks := list(range(1, 40)), None, B)
    copies = dict.fromkeys(blocks, GPU)
    for _ in range(3000):
        block, tier = random.choice(blocks), random.choice((GPU, CPU, DISK))
        if random.random() < 0.5:
            copies[block] &= ~tier
            tree.remove(block, tier)
        elif tier != GPU and copies[block]:
            copies[block] |= tier
            tree.hold(block, tier)
        elif tier == GPU and (block == 1 or copies[block - 1]):
            copies[block] |= GPU
            tree.store([block], block - 1 or None, B)
        if not any(copies.values()):
            break
        assert len(tree) == sum(held > 0 for held in copies.values())
        assert tree.slower_tokens == B * sum(held > 0 and not held & GPU for held in copies.values())


@pytest.fixture
def cache() -> EndpointCache:
    """Of an engine with one prompt, bound to its blocks 1 to 4."""
    found = EndpointCache(1_000)
    residency = found.enable_events()
    sent = found.on_sent("s", PROMPT, "s")
    residency.on_stored([1, 2, 3, 4], None, B, session="s")
    found.on_answered("s", sent, PROMPT.tokens, 0)
    return found


def test_a_hit_tells_how_much_of_it_is_to_be_loaded(cache: EndpointCache) -> None:
    assert cache.residency is not None
    assert (cache.hit(PROMPT, B), cache.to_load(PROMPT, 4 * B)) == (4 * B, ())
    cache.residency.on_offloaded([3, 4], 0, "cpu")
    cache.residency.on_removed([4, 3])
    assert (cache.hit(PROMPT, B), cache.to_load(PROMPT, 4 * B)) == (4 * B, (2 * B, 0, 0))
    assert (cache.to_load(PROMPT, 3 * B), cache.slower_tokens) == ((B, 0, 0), 2 * B)
    cache.residency.on_removed([4, 3], 0, "cpu")
    assert (cache.hit(PROMPT, B), cache.to_load(PROMPT, 2 * B), cache.slower_tokens) == (2 * B, (), 0)


def test_a_prompt_in_flight_loads_for_those_behind_it(cache: EndpointCache) -> None:
    """As it computes for them."""
    assert cache.residency is not None
    cache.residency.on_offloaded([3, 4], 0, "cpu")
    cache.residency.on_removed([4, 3])
    cache.on_sent("t", PROMPT, "t")
    assert (cache.hit(PROMPT, B), cache.to_load(PROMPT, 4 * B)) == (4 * B, ())


def test_lost_events_leave_nothing_to_load(cache: EndpointCache) -> None:
    assert cache.residency is not None
    cache.residency.on_offloaded([3, 4], 0, "cpu")
    cache.residency.on_removed([4, 3])
    cache.on_event_gap()
    assert (cache.to_load(PROMPT, 4 * B), cache.slower_tokens) == ((), 0)


def test_events_of_another_group_of_layers_or_an_unknown_block_change_nothing(cache: EndpointCache) -> None:
    assert cache.residency is not None
    cache.residency.on_offloaded([3, 77], 1, "cpu")
    cache.residency.on_offloaded([77], 0, "cpu")
    cache.residency.on_removed([4, 3])
    assert (cache.hit(PROMPT, B), cache.residency.statistics().blocks) == (2 * B, 2)
