"""Prefix blocks: chained hashes of token ids."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.tokenize.estimator import Prefix, extend, start

IDS = st.lists(st.integers(0, 300_000), max_size=100)


def pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def blocks(*parts: list[int], group: str = "g", size: int = 16) -> bytes:
    """The hashes of all blocks of a prompt, extended by these parts in turn."""
    prefix, found = start(group), b""
    for part in parts:
        prefix = extend(prefix, b"", pack(part), size)
        found += prefix.blocks
    return found


@given(IDS, IDS, st.integers(1, 40))
def test_blocks_do_not_depend_on_how_a_prompt_is_divided(first: list[int], second: list[int], size: int) -> None:
    """The same ids are the same blocks, in one piece or in two."""
    assert blocks(first, second, size=size) == blocks(first + second, size=size)


@given(IDS, IDS)
def test_a_longer_prompt_keeps_the_blocks_of_its_beginning(first: list[int], more: list[int]) -> None:
    """A full block is final."""
    assert blocks(first + more).startswith(blocks(first))


@given(IDS.filter(lambda ids: len(ids) >= 48), st.integers(0, 15))
def test_a_changed_token_changes_every_block_from_its_own_on(ids: list[int], at: int) -> None:
    """A hash stands for the whole prompt up to its block."""
    changed = [*ids[: 16 + at], ids[16 + at] + 1, *ids[17 + at :]]
    ours, theirs = blocks(ids), blocks(changed)
    same = [ours[i : i + 8] == theirs[i : i + 8] for i in range(0, len(ours), 8)]
    assert same == [True] + [False] * (len(same) - 1)


def test_groups_share_no_block() -> None:
    """The group is part of every hash."""
    ids = list(range(64))
    assert not set(array("Q", blocks(ids, group="a"))) & set(array("Q", blocks(ids, group="b")))


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Replicas identify blocks by their hashes: a change of the function needs a decision record."""
    hashes = list(array("Q", blocks(list(range(32)), group="web")))
    assert hashes == [0xF5BF982C91DB86C8, 0xF4466D3F9C429A8F]


def test_template_tokens_have_a_place_but_are_no_text() -> None:
    """Template tokens shift the blocks, and are not part of the text count, from which corrections are learned."""
    prefix = extend(start("g"), pack([1, 2, 3, 4]), pack([5, 6, 7]), 4)
    assert prefix == Prefix(blocks([1, 2, 3, 4], size=4), blocks([1, 2, 3, 4], size=4), pack([5, 6, 7]), 7, 3)
