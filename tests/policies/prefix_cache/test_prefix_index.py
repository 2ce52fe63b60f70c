"""Prefix caches as known from sent prompts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix_cache.endpoint_cache import PrefixIndex


def chain(*tokens: int) -> list[int]:
    """Chained hashes: equal for equal prefixes."""
    return list(accumulate(tokens, lambda parent, token: hash((parent, token)) % 2**64, initial=7))[1:]


def index(capacity: int = 100) -> PrefixIndex:
    return PrefixIndex(capacity)


def depth(of: PrefixIndex, hashes: Sequence[int]) -> int:
    return of.find(hashes)[0]


A, B, C = chain(1, 2, 3, 4), chain(1, 2, 5, 6), chain(9, 8, 7)


class BlockListIndex:
    """The same rules, block by block."""

    def __init__(self, capacity: int) -> None:
        self.blocks: dict[int, int] = {}  # least recently used first -> stamp
        self.capacity = capacity

    def record(self, hashes: Sequence[int], stamp: int) -> None:
        for block in reversed(hashes):
            self.blocks.pop(block, None)
            self.blocks[block] = stamp
        self.evict()

    def evict(self) -> None:
        while len(self.blocks) > self.capacity:
            del self.blocks[next(iter(self.blocks))]

    def depth(self, hashes: Sequence[int]) -> int:
        return next((i for i, block in enumerate(hashes) if block not in self.blocks), len(hashes))

    def trim(self, hashes: Sequence[int], depth: int, stamp: int) -> None:
        for block in hashes[depth:]:
            if self.blocks.get(block) == stamp:
                del self.blocks[block]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda tokens: chain(*tokens))
steps = st.one_of(
    st.tuples(st.just("record"), prompts),
    st.tuples(st.just("trim"), st.integers(0, 5)),
    st.tuples(st.just("resize"), st.integers(1, 30)),
    st.tuples(st.just("forget"), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40), st.lists(prompts, min_size=1, max_size=10))
def test_a_prefix_index_equals_a_list_of_blocks(history: list, asked: list[list[int]]) -> None:
    """After any records, trims, evictions and clearings."""
    real, plain, sent = index(12), BlockListIndex(12), []
    for what, value in history:
        if what == "record":
            before = plain.depth(value)
            stamp = real.record(value)
            plain.record(value, stamp)
            sent.append((value, before, stamp))
        elif what == "trim" and value < len(sent):
            real.trim(*sent[value])
            plain.trim(*sent[value])
        elif what == "resize":
            real.resize(value)
            plain.capacity = value
            plain.evict()
        elif what == "forget":
            real.clear()
            plain.blocks.clear()
    assert len(real) == len(plain.blocks)
    assert [depth(real, hashes) for hashes in asked] == [plain.depth(hashes) for hashes in asked]


def test_the_depth_is_the_number_of_leading_blocks_held() -> None:
    """Blocks after a missing block cannot be used."""
    held = index()
    held.record(A)
    assert [depth(held, hashes) for hashes in (A, A[:2], B, C, [])] == [4, 2, 2, 0, 0]
    assert depth(index(), A) == 0


def test_of_one_prompt_the_last_block_is_evicted_first() -> None:
    """In the order in which vLLM frees blocks."""
    held = index(capacity=4)
    held.record(A)
    held.record(C[:2])
    assert (depth(held, A), depth(held, C)) == (2, 2)


def test_a_shared_prefix_outlives_the_prompts_that_continue_it() -> None:
    """Each of these prompts uses the prefix anew."""
    held = index(capacity=6)
    held.record(A)
    held.record(B)
    held.record(C[:2])
    assert (depth(held, A), depth(held, B)) == (2, 4)


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    """The cache has no room for the rest."""
    held = index(capacity=3)
    held.record(A)
    assert (depth(held, A), len(held)) == (3, 3)


def test_trim_removes_blocks_of_a_failed_attempt() -> None:
    """An attempt without a first token filled no cache; blocks cached before stay."""
    held = index()
    held.record(A[:2])
    stamp = held.record(A)
    held.trim(A, 2, stamp)
    assert depth(held, A) == 2


def test_trim_keeps_blocks_of_later_prompts() -> None:
    """The later prompt computes those blocks itself."""
    held = index()
    stamp = held.record(A)
    held.record(B)
    held.trim(A, 0, stamp)
    assert (depth(held, A), depth(held, B)) == (2, 4)


def test_clear_keeps_the_capacity() -> None:
    """A restarted engine has an empty cache of the same size."""
    held = index(capacity=50)
    held.record(A)
    held.clear()
    assert (depth(held, A), held.capacity) == (0, 50)


def test_confirm_adapts_the_capacity_to_reported_hits() -> None:
    """Missing hits shrink the capacity, full hits restore the capacity, up to the engine's own."""
    held = index(capacity=1000)
    held.confirm(believed=100, reported=0)
    assert held.capacity == 800
    held.confirm(believed=100, reported=50)
    assert held.capacity == 720
    for _ in range(100):
        held.confirm(believed=100, reported=100)
    assert held.capacity == 1000


def test_confirm_keeps_a_minimal_capacity() -> None:
    """Enough to notice later hits."""
    held = index(capacity=25_600)
    for _ in range(40):
        held.confirm(believed=64, reported=0)
    assert held.capacity == 100


@pytest.mark.parametrize(("length", "most"), [(512, 10), (64, 16)])
def test_a_million_blocks_fit_in_tens_of_megabytes(length: int, most: float) -> None:
    """Bytes per block, measured over a hundred thousand."""
    tracemalloc.start()
    held = index(capacity=10**6)
    for number in range(100_000 // length):
        held.record(range(number * 1000, number * 1000 + length))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / len(held) < most


def test_the_depth_since_a_stamp_is_that_of_the_latest_records() -> None:
    """The blocks of an older prompt count as far as a newer one went through them, within a run too."""
    found = index()
    found.record(A, 10)
    assert (found.depth_since(A, 10), found.depth_since(A, 11), found.depth_since(A[:3], 10)) == (4, 0, 3)
    found.record(B, 20)
    assert [found.depth_since(A, stamp) for stamp in (10, 11, 20, 21)] == [4, 2, 2, 0]
    assert (found.depth_since(C, 0), found.depth_since([], 0)) == (0, 0)
