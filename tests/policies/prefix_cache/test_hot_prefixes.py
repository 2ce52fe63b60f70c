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
    """Chained hashes of a prompt whose parts are so many blocks long: equal parts, equal prefix."""
    blocks = [(name, i) for name, size in parts for i in range(size)]
    return list(accumulate(blocks, lambda parent, block: hash((parent, block)), initial=0))[1:]


def nowhere(text: str, blocks: int) -> int:
    return 0


def hottest(of: HotPrefixes[str], room: int = ROOMY, now: float = 0.0) -> list[HotPrefix[str]]:
    return of.hottest(room, now, nowhere)


SYSTEM = ("system", 96)


def test_a_conversation_counts_by_its_latest_turn_alone() -> None:
    """Whole, to its last block: the next turn begins with all of it. The earlier turns' texts are given up."""
    hot = HotPrefixes[str](LIMIT)
    hot.record(chain(("turn 1", 40)), "turn 1", 1000, 0.0)
    hot.record(chain(("turn 1", 40), ("turn 2", 37)), "turn 2", 2000, 1.0)
    assert hottest(hot, now=1.0) == [HotPrefix("turn 2", 77)]
    assert hot.bytes == 2000


def test_what_many_share_counts_once_and_first() -> None:
    """With room for little, it is the system prompt of all, cut from any of them."""
    hot = HotPrefixes[str](LIMIT)
    for user in range(20):
        hot.record(chain(SYSTEM, (f"user {user}", 60)), f"user {user}", 1000, float(user))
    (only,) = hottest(hot, room=100, now=20.0)
    assert (only.blocks, only.text.startswith("user")) == (96, True)
    assert len(hottest(hot, room=96 + 3 * 60, now=20.0)) == 3


def test_short_conversations_under_a_long_system_prompt_are_told_apart() -> None:
    """However little of their prompts is their own."""
    hot = HotPrefixes[str](LIMIT)
    for turn in range(1, 4):
        for user in "abc":
            hot.record(chain(("long", 300), (user, 8 * turn)), f"{user}{turn}", 1000, float(turn))
    assert sorted(hottest(hot, now=3.0), key=lambda found: found.text) == [HotPrefix(f"{user}3", 324) for user in "abc"]


def test_a_conversation_of_many_turns_comes_before_one_prompt() -> None:
    """A conversation is likelier to go on."""
    hot = HotPrefixes[str](LIMIT)
    for turn in range(1, 5):
        hot.record(chain(("talk", 20 * turn)), f"talk {turn}", 1000, 0.0)
    hot.record(chain(("single", 80)), "single", 1000, 0.0)
    assert hottest(hot, room=80) == [HotPrefix("talk 4", 80)]


def test_what_other_engines_hold_comes_after_what_none_does() -> None:
    """Callers are served where the prefix is; its worth is a share of them."""
    hot = HotPrefixes[str](LIMIT)
    for name in ("held", "lost"):
        hot.record(chain((name, 80)), name, 1000, 0.0)
    found = hot.hottest(80, 0.0, lambda text, blocks: 2 if text == "held" else 0)
    assert found == [HotPrefix("lost", 80)]


def test_the_recent_comes_before_the_old_and_the_old_is_let_go() -> None:
    """Heat halves; a prompt that nobody came back to is not worth it any more."""
    hot = HotPrefixes[str](LIMIT)
    hot.record(chain(("old", 80)), "old", 1000, 0.0)
    hot.record(chain(("new", 80)), "new", 1000, HALF_LIFE)
    assert hottest(hot, room=80, now=HALF_LIFE) == [HotPrefix("new", 80)]
    assert hottest(hot, now=2.5 * HALF_LIFE) == [HotPrefix("new", 80)]
    assert hottest(hot, now=4 * HALF_LIFE) == []


def test_heat_is_kept_over_months() -> None:
    """Weights that grow with time begin anew before they overflow."""
    hot = HotPrefixes[str](LIMIT)
    for day in range(90):
        hot.record(chain(("a", 80)), "a", 1000, day * 86_400.0)
        hot.record(chain(("b", 80)), "b", 1000, day * 86_400.0 + HALF_LIFE)
    assert hottest(hot, room=80, now=89 * 86_400.0 + HALF_LIFE) == [HotPrefix("b", 80)]


def test_texts_are_bounded_in_bytes() -> None:
    """Those that were not used longest go; one that would take most of the room is not kept at all."""
    hot = HotPrefixes[str](10_000)
    for i in range(50):
        hot.record(chain((f"{i}", 80)), f"{i}", 1000, 0.0)
    assert hot.bytes == 10_000
    assert {prefix.text for prefix in hottest(hot)} == {f"{i}" for i in range(40, 50)}
    hot.record(chain(("large", 80)), "large", int(10_000 * MAX_TEXT_SHARE) + 1, 0.0)
    assert hot.bytes == 10_000


def test_places_are_bounded() -> None:
    """However many prompts come."""
    hot = HotPrefixes[str](LIMIT)
    for i in range(MAX_NODES + 1):
        hot.record(chain((f"{i}", 6)), f"{i}", 1, 0.0)
    assert (len(hot), hot.bytes) == (2 * MAX_NODES, MAX_NODES)


def test_a_prompt_without_a_whole_block_is_not_worth_it() -> None:
    """Nor one of a single block."""
    hot = HotPrefixes[str](LIMIT)
    for blocks in range(DEPTHS[0]):
        hot.record(chain(("short", blocks)), "short", 10, 0.0)
    assert (hottest(hot), hot.bytes) == ([], 0)


prompts = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=4), min_size=1, max_size=30
)


@given(prompts, st.integers(1, 200))
def test_the_room_is_kept(parts: list[list[tuple[str, int]]], room: int) -> None:
    """Blocks that several share take their room once."""
    hot = HotPrefixes[Sequence[int]](LIMIT)
    for prompt in parts:
        hashes = chain(*prompt)
        hot.record(hashes, hashes, 100, 0.0)
    found = hot.hottest(room, 0.0, lambda text, blocks: 0)
    assert len({block for prefix in found for block in prefix.text[: prefix.blocks]}) <= room
