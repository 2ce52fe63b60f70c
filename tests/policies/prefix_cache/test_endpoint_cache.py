"""Prompts that were sent and the engine's events: which of both counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.prefix_cache.residency import Residency
from policies.types import PoolEstimate, PrefixBlocks

B = 16  # tokens in a block, ours and the engine's
OURS = [101, 102, 103, 104]
THEIRS = [1, 2, 3, 4]


def prompt(hashes: Sequence[int] = OURS, rest: int = 5, messages: int = 1) -> PoolEstimate:
    tokens = len(hashes) * B + rest
    return PoolEstimate(tokens, PrefixBlocks(hashes, B, 1.0), tokens, messages)


def held(cache: EndpointCache, asked: PoolEstimate, block: int = B) -> int:
    """Rounded to the engine's blocks, as hits are."""
    return cache.hit(asked, block)


class PublishingEndpoint:
    """An endpoint that publishes KV events."""

    def __init__(self) -> None:
        self.cache = EndpointCache(25_000)
        self.engine: Residency = self.cache.enable_events()
        self.number = 0

    def held(self, asked: PoolEstimate, block: int = B) -> int:
        return held(self.cache, asked, block)

    def serve(
        self,
        asked: PoolEstimate,
        blocks: Sequence[int],
        cached: int = 0,
        answer: Sequence[int] = (),
        late: bool = False,
    ) -> bool:
        """A prompt from its sending to its end; whether events account for it. `late`: they come after it."""
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
def served() -> PublishingEndpoint:
    return PublishingEndpoint()


def test_what_the_engine_dropped_does_not_count(served: PublishingEndpoint) -> None:
    """From the last block on, and without what still is there behind a gap."""
    served.serve(prompt(), THEIRS)
    assert served.held(prompt()) == 4 * B
    served.engine.on_removed([4])
    assert served.held(prompt()) == 3 * B
    served.engine.on_removed([2])
    assert served.held(prompt()) == B


def test_a_prompt_under_way_counts_whatever_was_dropped(served: PublishingEndpoint) -> None:
    """The engine computes it before whatever is sent now."""
    served.serve(prompt(), THEIRS)
    served.engine.on_removed(THEIRS)
    sent = served.cache.on_sent("again", prompt(), "again")
    assert served.held(prompt()) == 4 * B
    served.engine.on_stored(THEIRS[:2], None, B, session="again")
    served.cache.on_unanswered("again", sent)
    assert served.held(prompt()) == 2 * B


def test_an_engine_told_to_stop_may_finish_its_step(served: PublishingEndpoint) -> None:
    """Blocks stored after the end of the attempt count as well."""
    sent = served.cache.on_sent("lost", prompt(), "lost")
    served.cache.on_unanswered("lost", sent)
    assert served.held(prompt()) == 0
    for end in (2, 3):
        served.engine.on_stored(THEIRS[:end], None, B, session="lost")
        served.cache.on_events()
        assert served.held(prompt()) == end * B


def test_events_may_come_after_the_answer(served: PublishingEndpoint) -> None:
    """Another process sends them: until they come, what was sent counts."""
    assert served.serve(prompt(), THEIRS, late=True)
    served.engine.on_removed([3, 4])
    assert (served.held(prompt()), served.engine.anchored) == (2 * B, 1)


def test_a_prompt_that_stores_nothing_has_the_chain_of_the_one_it_repeats(served: PublishingEndpoint) -> None:
    """All but its last tokens were cached: no event names it."""
    served.serve(prompt(), THEIRS)
    assert served.serve(prompt(rest=7), THEIRS, cached=4 * B)
    served.engine.on_removed([4])
    assert served.held(prompt(rest=7)) == 3 * B


def test_an_answer_is_cached_as_far_as_turns_found_it_again(served: PublishingEndpoint) -> None:
    """Nothing is expected at first; a chat whose template keeps answers as they were teaches the other extreme."""
    hashes, theirs, messages = list(OURS), list(THEIRS), 1
    served.serve(prompt(hashes), theirs, answer=[9001, 9002])
    for turn in range(40):
        answer, following = [9001 + 10 * turn, 9002 + 10 * turn], [9011 + 10 * turn, 9012 + 10 * turn]
        cached = len(theirs) * B + 2 * B
        hashes = hashes + [1000 + 10 * turn + i for i in range(3)]
        theirs = theirs + answer + [2000 + turn]
        messages += 2
        before = served.held(prompt(hashes, messages=messages))
        assert cached - 2 * B <= before <= cached
        served.serve(prompt(hashes, messages=messages), theirs, cached, following)
    assert before >= cached - B


def test_a_prompt_that_leaves_within_a_block_shares_half_of_it(served: PublishingEndpoint) -> None:
    """Wrong by half a block at most, whichever way."""
    served.serve(prompt(), THEIRS)
    assert served.held(prompt([*OURS[:2], 777]), block=1) == 2.5 * B


def test_a_gap_leaves_what_was_sent(served: PublishingEndpoint) -> None:
    """Removals were lost: the belief is the same as without events."""
    served.serve(prompt(), THEIRS)
    served.engine.on_removed([2, 3, 4])
    served.cache.on_event_gap()
    assert served.held(prompt()) == 4 * B


def test_a_lost_cache_leaves_nothing(served: PublishingEndpoint) -> None:
    """Neither what was sent nor what the engine said."""
    served.serve(prompt(), THEIRS)
    served.cache.clear()
    assert (served.held(prompt()), served.engine.statistics().blocks) == (0, 0)


def test_what_an_answer_reports_counts_against_events(served: PublishingEndpoint) -> None:
    """One of two copies was removed."""
    served.serve(prompt(), THEIRS)
    served.engine.on_removed([3, 4])
    assert served.serve(prompt(rest=8), THEIRS, cached=4 * B)
    assert served.held(prompt(rest=8)) == 4 * B


def test_a_prompt_whose_events_never_come_is_as_without_events(served: PublishingEndpoint) -> None:
    """Events are awaited while 64 others end."""
    sent = served.cache.on_sent("lost", prompt([7, 8, 9]), "lost")
    assert served.cache.on_answered("lost", sent, 3 * B + 5, 0)
    for i in range(65):
        sent = served.cache.on_sent(i, prompt([1000 + i]), f"x{i}")
        served.cache.on_answered(i, sent, B + 5, 0)
    assert (served.held(prompt([7, 8, 9])), served.engine.unanchored) == (3 * B, 2)
    served.engine.on_stored([5, 6, 7], None, B, session="lost")
    served.cache.on_events()
    assert served.engine.anchored == 0


def test_an_endpoint_without_events_is_believed_by_what_was_sent() -> None:
    """Nobody else is asked."""
    cache = EndpointCache(25_000)
    sent = cache.on_sent("key", prompt(), "")
    assert not cache.on_answered("key", sent, 4 * B + 5, 0)
    assert held(cache, prompt()) == 4 * B
