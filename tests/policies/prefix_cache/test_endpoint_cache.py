"""Prefix cache of an endpoint, from sent prompts and from the engine's KV events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.prefix_cache.residency import Residency
from policies.types import PoolEstimate, PrefixBlocks

B = 16  # tokens in a block of the gateway and of the engine
OURS = [101, 102, 103, 104]
THEIRS = [1, 2, 3, 4]


def prompt(hashes: Sequence[int] = OURS, rest: int = 5, messages: int = 1) -> PoolEstimate:
    tokens = len(hashes) * B + rest
    return PoolEstimate(tokens, PrefixBlocks(hashes, B, 1.0), tokens, messages)


def held(cache: EndpointCache, asked: PoolEstimate, block: int = B) -> int:
    """Cached tokens of the prompt, in whole blocks of `block` tokens."""
    return cache.hit(asked, block)


class PublishingEndpoint:
    """An endpoint that publishes KV events."""

    def __init__(self) -> None:
        self.cache = EndpointCache(25_000)
        self.engine: Residency = self.cache.enable_events()
        self.number = 0

    def held(self, asked: PoolEstimate, block: int = B) -> int:
        """Cached tokens of the prompt, in whole blocks of `block` tokens."""
        return held(self.cache, asked, block)

    def serve(
        self,
        asked: PoolEstimate,
        blocks: Sequence[int],
        cached: int = 0,
        answer: Sequence[int] = (),
        late: bool = False,
    ) -> bool:
        """Sends a prompt and ends the answer; True if events account for the prompt. `late`: events follow the
        answer."""
        self.number += 1
        key = f"s{self.number}"
        sent = self.cache.on_sent(key, asked, key)
        if not late:
            self.store(key, blocks, cached, answer)
        accounted = self.cache.on_answered(key, sent, asked.tokens, cached)
        if late:
            self.store(key, blocks, cached, answer)
        return accounted

    def store(self, key: str, blocks: Sequence[int], cached: int, answer: Sequence[int]) -> None:
        first = cached // B
        self.engine.on_stored(blocks[first:], blocks[first - 1] if first else None, B, session=key)
        self.engine.on_stored(answer, blocks[-1], B, session=key)
        self.cache.on_events()


@pytest.fixture
def endpoint() -> PublishingEndpoint:
    return PublishingEndpoint()


def test_removed_blocks_are_no_hit(endpoint: PublishingEndpoint) -> None:
    """Neither are the blocks behind a removed block."""
    endpoint.serve(prompt(), THEIRS)
    assert endpoint.held(prompt()) == 4 * B
    endpoint.engine.on_removed([4])
    assert endpoint.held(prompt()) == 3 * B
    endpoint.engine.on_removed([2])
    assert endpoint.held(prompt()) == B


def test_a_prompt_in_flight_counts_as_cached_after_removals(endpoint: PublishingEndpoint) -> None:
    """The engine computes that prompt before any later one."""
    endpoint.serve(prompt(), THEIRS)
    endpoint.engine.on_removed(THEIRS)
    sent = endpoint.cache.on_sent("again", prompt(), "again")
    assert endpoint.held(prompt()) == 4 * B
    endpoint.engine.on_stored(THEIRS[:2], None, B, session="again")
    endpoint.cache.on_unanswered("again", sent)
    assert endpoint.held(prompt()) == 2 * B


def test_blocks_stored_after_an_abort_count(endpoint: PublishingEndpoint) -> None:
    """An engine finishes its step after an abort."""
    sent = endpoint.cache.on_sent("lost", prompt(), "lost")
    endpoint.cache.on_unanswered("lost", sent)
    assert endpoint.held(prompt()) == 0
    for end in (2, 3):
        endpoint.engine.on_stored(THEIRS[:end], None, B, session="lost")
        endpoint.cache.on_events()
        assert endpoint.held(prompt()) == end * B


def test_before_its_events_a_sent_prompt_counts_as_cached(endpoint: PublishingEndpoint) -> None:
    """Events come from another process of the engine, often after the answer."""
    assert endpoint.serve(prompt(), THEIRS, late=True)
    endpoint.engine.on_removed([3, 4])
    assert (endpoint.held(prompt()), endpoint.engine.anchored) == (2 * B, 1)


def test_a_repeated_prompt_is_bound_to_the_chain_of_the_first(endpoint: PublishingEndpoint) -> None:
    """The prompt was cached, so no event names the session."""
    endpoint.serve(prompt(), THEIRS)
    assert endpoint.serve(prompt(rest=7), THEIRS, cached=4 * B)
    endpoint.engine.on_removed([4])
    assert endpoint.held(prompt(rest=7)) == 3 * B


def test_the_cached_share_of_answers_is_learned_from_turns(endpoint: PublishingEndpoint) -> None:
    """At first no reuse is assumed; turns of a chat template that keeps answers unchanged teach full reuse."""
    hashes, theirs, messages = list(OURS), list(THEIRS), 1
    endpoint.serve(prompt(hashes), theirs, answer=[9001, 9002])
    for turn in range(40):
        answer, following = [9001 + 10 * turn, 9002 + 10 * turn], [9011 + 10 * turn, 9012 + 10 * turn]
        cached = len(theirs) * B + 2 * B
        hashes = hashes + [1000 + 10 * turn + i for i in range(3)]
        theirs = theirs + answer + [2000 + turn]
        messages += 2
        before = endpoint.held(prompt(hashes, messages=messages))
        assert cached - 2 * B <= before <= cached
        endpoint.serve(prompt(hashes, messages=messages), theirs, cached, following)
    assert before >= cached - B


def test_a_prompt_that_diverges_within_a_block_shares_half_of_that_block(endpoint: PublishingEndpoint) -> None:
    """An error of half a block at most."""
    endpoint.serve(prompt(), THEIRS)
    assert endpoint.held(prompt([*OURS[:2], 777]), block=1) == 2.5 * B


def test_an_event_gap_falls_back_to_sent_prompts(endpoint: PublishingEndpoint) -> None:
    """Removals were lost: the hit is the same as without events."""
    endpoint.serve(prompt(), THEIRS)
    endpoint.engine.on_removed([2, 3, 4])
    endpoint.cache.on_event_gap()
    assert endpoint.held(prompt()) == 4 * B


def test_clear_drops_sent_prompts_and_events(endpoint: PublishingEndpoint) -> None:
    """After a restart of the engine."""
    endpoint.serve(prompt(), THEIRS)
    endpoint.cache.clear()
    assert (endpoint.held(prompt()), endpoint.engine.statistics().blocks) == (0, 0)


def test_reported_cached_tokens_override_removals(endpoint: PublishingEndpoint) -> None:
    """Only one of two copies was removed."""
    endpoint.serve(prompt(), THEIRS)
    endpoint.engine.on_removed([3, 4])
    assert endpoint.serve(prompt(rest=8), THEIRS, cached=4 * B)
    assert endpoint.held(prompt(rest=8)) == 4 * B


def test_a_prompt_without_events_counts_as_sent(endpoint: PublishingEndpoint) -> None:
    """Events are awaited until 64 later prompts have ended."""
    sent = endpoint.cache.on_sent("lost", prompt([7, 8, 9]), "lost")
    assert endpoint.cache.on_answered("lost", sent, 3 * B + 5, 0)
    for i in range(65):
        sent = endpoint.cache.on_sent(i, prompt([1000 + i]), f"x{i}")
        endpoint.cache.on_answered(i, sent, B + 5, 0)
    assert (endpoint.held(prompt([7, 8, 9])), endpoint.engine.unanchored) == (3 * B, 2)
    endpoint.engine.on_stored([5, 6, 7], None, B, session="lost")
    endpoint.cache.on_events()
    assert endpoint.engine.anchored == 0


def test_without_events_sent_prompts_count_as_cached() -> None:
    """No other source exists."""
    cache = EndpointCache(25_000)
    sent = cache.on_sent("key", prompt(), "")
    assert not cache.on_answered("key", sent, 4 * B + 5, 0)
    assert held(cache, prompt()) == 4 * B
