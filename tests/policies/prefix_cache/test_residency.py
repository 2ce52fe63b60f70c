"""Resident blocks as published by an engine, and the chains of sent prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix_cache.block_tree import Chain
from policies.prefix_cache.residency import UNNAMED, Residency

B = 16  # tokens
Prompt = tuple[int, ...]


def blocks_of(prompt: Prompt) -> list[int]:
    """Block hashes that depend on the whole prefix, like an engine's."""
    return [hash(prompt[: i + 1]) & (1 << 64) - 1 for i in range(len(prompt))]


class SetEngine:
    """A model engine with a set of blocks."""

    def __init__(self, sessions: bool = True) -> None:
        self.residency, self.sessions = Residency(), sessions
        self.held: set[int] = set()
        self.prompts = 0

    def leading(self, blocks: Sequence[int]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self.held), len(blocks))

    def serve(self, prompt: Prompt, answer: Prompt = (), chunk: int = 3) -> Chain | None:
        """Serves a prompt and its answer, `chunk` blocks per step; returns the chain of the prompt."""
        self.prompts += 1
        key, blocks = f"s{self.prompts}", blocks_of(prompt + answer)
        self.residency.on_sent(key, key if self.sessions else "", self.prompts)
        cached = min(self.leading(blocks), len(prompt))
        steps = [*range(cached, len(prompt), chunk), *range(len(prompt), len(blocks) + 1)]
        for start, end in pairwise(steps):
            parent = blocks[start - 1] if start else None
            self.residency.on_stored(blocks[start:end], parent, B, session=key if self.sessions else "")
        self.held.update(blocks)
        tokens = len(prompt) * B + 5
        chain = self.residency.chain(key, tokens, cached * B)
        self.residency.forget(key)
        self.residency.pending_stamps.discard(self.prompts)
        return chain and chain.truncated(tokens)

    def evict(self, blocks: Sequence[int]) -> None:
        self.held.difference_update(blocks)
        self.residency.on_removed(blocks)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
steps = st.lists(
    st.tuples(st.just("serve"), prompts, prompts, st.integers(1, 4))
    | st.tuples(st.just("evict"), st.integers(0, 99), st.integers(1, 5))
    | st.just(("clear",)),
    max_size=30,
)


@settings(max_examples=300)
@given(steps)
def test_the_resident_prefix_of_a_chain_equals_a_set_of_blocks(story: list[tuple[object, ...]]) -> None:
    """Exactly; but a chain that was wholly evicted and stored again may look evicted until its own prompt is sent
    again."""
    engine, chains = SetEngine(), list[tuple[Chain, list[int], int]]()
    for step in story:
        match step:
            case ("serve", tuple(prompt), tuple(answer), int(chunk)):
                chain = engine.serve(prompt, answer, chunk)
                if chain is not None:
                    chains.append((chain, blocks_of(prompt), len(prompt)))
            case ("evict", int(which), int(count)):
                held = sorted(engine.held)
                engine.evict([held[(which + i) % len(held)] for i in range(min(count, len(held)))])
            case _:
                engine.held.clear()
                engine.residency.clear()
                chains.clear()
        assert engine.residency.statistics().blocks == len(engine.held)
        for i, (chain, blocks, least) in enumerate(chains):
            leading = engine.leading(blocks)
            if leading <= least:
                assert chain.resident_tokens() == leading * B
            else:
                assert chain.resident_tokens() <= leading * B
            chains[i] = chain, blocks, min(leading, least)


def test_a_chain_is_found_by_session() -> None:
    """For two prompts of equal length at the same time."""
    residency = Residency()
    for name in ("a", "b"):
        residency.on_sent(name, name, 1)
    residency.on_stored([1, 2], None, B, session="a")
    residency.on_stored([5, 6], None, B, session="b")
    residency.on_removed([6])
    assert [found.resident_tokens() for name in ("a", "b") if (found := residency.chain(name, 2 * B, 0))] == [2 * B, B]


def test_without_sessions_a_chain_is_found_by_depth() -> None:
    """The chain whose event ended at the prompt's length. A longer chain through that depth does not count."""
    residency = Residency()
    residency.on_sent("a", "", 1)
    residency.on_stored([1, 2], None, B)
    residency.on_stored([5, 6, 7], None, B)
    found = residency.chain("a", 2 * B + 3, 0)
    assert found is not None
    assert found.last_block() == 2


def test_without_sessions_an_ambiguous_depth_binds_no_chain() -> None:
    """Nor does a chain stored before the prompt was sent."""
    residency = Residency()
    residency.on_stored([1, 2], None, B)
    residency.on_sent("a", "", 1)
    assert residency.chain("a", 2 * B, 0) is None
    residency.on_stored([3, 4], None, B)
    residency.on_stored([5, 6], None, B)
    assert residency.chain("a", 2 * B, 0) is None


def test_a_chain_of_another_adapter_is_not_the_prompts() -> None:
    """The same prompt for two adapters and the model, stored under three chains of one depth. An engine that names no
    adapter tells no more than that there was one."""
    residency = Residency()
    for adapter in ("", "sql", "support"):
        residency.on_sent(adapter or "model", "", 1, adapter)
    for number, adapter in enumerate(("", "sql", "other")):
        residency.on_stored([10 * number + 1, 10 * number + 2], None, B, adapter=adapter)
    chains = {name: residency.chain(name, 2 * B, 0) for name in ("model", "sql", "support")}
    assert {name: chain and chain.last_block() for name, chain in chains.items()} == {
        "model": 2,
        "sql": 12,
        "support": None,
    }
    residency.on_stored([31, 32], None, B, adapter=UNNAMED)
    found = residency.chain("support", 2 * B, 0)
    assert found is not None
    assert found.last_block() == 32


def test_reported_cached_tokens_give_the_depth_of_unknown_parents() -> None:
    """Three blocks were cached before the first event; the reported hit of 48 tokens is their depth."""
    residency = Residency()
    residency.on_sent("a", "a", 1)
    residency.on_stored([4, 5], 3, B, session="a")
    assert residency.chain("a", 5 * B, None) is None
    found = residency.chain("a", 5 * B, 3 * B)
    assert found is not None
    assert found.resident_tokens() == 5 * B
    residency.on_removed([3])
    assert found.resident_tokens() == 2 * B


def test_chains_may_mix_block_sizes() -> None:
    """Depths are counted in tokens."""
    residency = Residency()
    residency.on_sent("a", "a", 1)
    residency.on_stored([1, 2], None, 32, session="a")
    residency.on_stored([3], 2, 16, session="a")
    found = residency.chain("a", 80, 0)
    assert found is not None
    assert found.resident_tokens() == 80


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention"])
def test_only_full_attention_groups_count(kind: str) -> None:
    """Group 0 holds windows, group 1 whole prompts; removals from another group change nothing."""
    residency = Residency()
    residency.on_sent("a", "a", 1)
    residency.on_stored([1, 2, 3], None, B, 0, kind, "a")
    residency.on_stored([1, 2], None, B, 1, "full_attention", "a")
    residency.on_removed([1, 2], 0)
    found = residency.chain("a", 2 * B, 0)
    assert found is not None
    assert found.resident_tokens() == 2 * B


def test_mark_held_restores_reported_blocks() -> None:
    """One copy of two was removed; the reported hit shows the other copy."""
    engine = SetEngine()
    chain = engine.serve((1, 2, 3))
    assert chain is not None
    engine.residency.on_removed(blocks_of((1, 2, 3))[1:])
    assert chain.resident_tokens() == B
    engine.residency.tree.mark_held(chain, 2 * B)
    assert chain.resident_tokens() == 2 * B


def test_no_state_remains_of_ended_prompts() -> None:
    """With or without events."""
    engine = SetEngine(sessions=False)
    for i in range(100):
        engine.serve((i, 1, 2))
    assert (engine.residency._pending, engine.residency._by_session, engine.residency.pending_stamps) == ({}, {}, set())
