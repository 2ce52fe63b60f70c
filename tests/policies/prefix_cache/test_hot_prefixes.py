"""Hottest prefixes of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix_cache.warm_up import DEPTHS, HALF_LIFE, MAX_NODES, MAX_TEXT_SHARE, HotPrefix, HotPrefixes

ROOMY = 100_000  # blocks
LIMIT = 1_000_000  # bytes


def chain(*parts: tuple[str, int]) -> list[int]:
    """Chained hashes of a prompt with parts of given numbers of blocks: equal parts, equal prefix."""
    blocks = [(name, i) for name, size in parts for i in range(size)]
    return list(accumulate(blocks, lambda parent, block: hash((parent, block)), initial=0))[1:]


def nowhere(text: str, blocks: int) -> int:
    return 0


def hottest(of: HotPrefixes[str], room: int = ROOMY, now: float = 0.0) -> list[HotPrefix[str]]:
    return of.hottest(room, now, nowhere)


SYSTEM = ("system", 96)


def test_only_the_latest_turn_of_a_conversation_is_kept() -> None:
    """To the last block, since the next turn begins with the whole prompt. Texts of earlier turns are dropped."""
    hot = HotPrefixes[str](LIMIT)
    hot.record(chain(("turn 1", 40)), "turn 1", 1000, 0.0)
    hot.record(chain(("turn 1", 40), ("turn 2", 37)), "turn 2", 2000, 1.0)
    assert hottest(hot, now=1.0) == [HotPrefix("turn 2", 77)]
    assert hot.bytes == 2000


def test_a_shared_system_prompt_is_the_hottest_prefix() -> None:
    """With little room, only the system prompt is returned, cut from any of the prompts."""
    hot = HotPrefixes[str](LIMIT)
    for user in range(20):
        hot.record(chain(SYSTEM, (f"user {user}", 60)), f"user {user}", 1000, float(user))
    (only,) = hottest(hot, room=100, now=20.0)
    assert (only.blocks, only.text.startswith("user")) == (96, True)
    assert len(hottest(hot, room=96 + 3 * 60, now=20.0)) == 3


def test_short_conversations_under_a_long_system_prompt_are_separate() -> None:
    """Even with few blocks of their own."""
    hot = HotPrefixes[str](LIMIT)
    for turn in range(1, 4):
        for user in "abc":
            hot.record(chain(("long", 300), (user, 8 * turn)), f"{user}{turn}", 1000, float(turn))
    assert sorted(hottest(hot, now=3.0), key=lambda found: found.text) == [HotPrefix(f"{user}3", 324) for user in "abc"]


def test_a_conversation_of_many_turns_is_hotter_than_a_single_prompt() -> None:
    """A conversation is likelier to continue."""
    hot = HotPrefixes[str](LIMIT)
    for turn in range(1, 5):
        hot.record(chain(("talk", 20 * turn)), f"talk {turn}", 1000, 0.0)
    hot.record(chain(("single", 80)), "single", 1000, 0.0)
    assert hottest(hot, room=80) == [HotPrefix("talk 4", 80)]


def test_prefixes_cached_on_other_engines_rank_lower() -> None:
    """Callers are routed to the copies, so the worth is divided among the engines."""
    hot = HotPrefixes[str](LIMIT)
    for name in ("held", "lost"):
        hot.record(chain((name, 80)), name, 1000, 0.0)
    found = hot.hottest(80, 0.0, lambda text, blocks: 2 if text == "held" else 0)
    assert found == [HotPrefix("lost", 80)]


def test_heat_decays_and_cold_prefixes_are_dropped() -> None:
    """By half per HALF_LIFE."""
    hot = HotPrefixes[str](LIMIT)
    hot.record(chain(("old", 80)), "old", 1000, 0.0)
    hot.record(chain(("new", 80)), "new", 1000, HALF_LIFE)
    assert hottest(hot, room=80, now=HALF_LIFE) == [HotPrefix("new", 80)]
    assert hottest(hot, now=2.5 * HALF_LIFE) == [HotPrefix("new", 80)]
    assert hottest(hot, now=4 * HALF_LIFE) == []


def test_heat_does_not_overflow_in_months() -> None:
    """Weights that grow with time are rescaled."""
    hot = HotPrefixes[str](LIMIT)
    for day in range(90):
        hot.record(chain(("a", 80)), "a", 1000, day * 86_400.0)
        hot.record(chain(("b", 80)), "b", 1000, day * 86_400.0 + HALF_LIFE)
    assert hottest(hot, room=80, now=89 * 86_400.0 + HALF_LIFE) == [HotPrefix("b", 80)]


def test_texts_are_bounded_in_bytes() -> None:
    """The least recently used text goes first; a text above MAX_TEXT_SHARE is not kept."""
    hot = HotPrefixes[str](10_000)
    for i in range(50):
        hot.record(chain((f"{i}", 80)), f"{i}", 1000, 0.0)
    assert hot.bytes == 10_000
    assert {prefix.text for prefix in hottest(hot)} == {f"{i}" for i in range(40, 50)}
    hot.record(chain(("large", 80)), "large", int(10_000 * MAX_TEXT_SHARE) + 1, 0.0)
    assert hot.bytes == 10_000


def test_nodes_are_bounded() -> None:
    """At any number of prompts."""
    hot = HotPrefixes[str](LIMIT)
    for i in range(MAX_NODES + 1):
        hot.record(chain((f"{i}", 6)), f"{i}", 1, 0.0)
    assert (len(hot), hot.bytes) == (2 * MAX_NODES, MAX_NODES)


def test_prompts_below_the_first_depth_are_not_kept() -> None:
    """Recomputing such a prefix costs little."""
    hot = HotPrefixes[str](LIMIT)
    for blocks in range(DEPTHS[0]):
        hot.record(chain(("short", blocks)), "short", 10, 0.0)
    assert (hottest(hot), hot.bytes) == ([], 0)


prompts = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=4), min_size=1, max_size=30
)


@given(prompts, st.integers(1, 200))
def test_the_returned_prefixes_fit_the_room(parts: list[list[tuple[str, int]]], room: int) -> None:
    """Shared blocks count once."""
    hot = HotPrefixes[Sequence[int]](LIMIT)
    for prompt in parts:
        hashes = chain(*prompt)
        hot.record(hashes, hashes, 100, 0.0)
    found = hot.hottest(room, 0.0, lambda text, blocks: 0)
    assert len({block for prefix in found for block in prefix.text[: prefix.blocks]}) <= room
