"""Prefix blocks: chained hashes of the text of a prompt."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.tokenize.prompt_reader import BLOCK_BYTES, HASH_BYTES, extend, start

TEXT = st.binary(max_size=600)


def blocks(*parts: bytes, group: str = "g", adapter: str = "") -> bytes:
    """The hashes of all blocks of a prompt, extended by these parts in turn."""
    chain, found = start(group, adapter), b""
    for part in parts:
        chain = extend(chain, part)
        found += chain.blocks
    return found


@given(TEXT, TEXT)
def test_blocks_do_not_depend_on_how_a_prompt_is_divided(first: bytes, second: bytes) -> None:
    """The same text is the same blocks, in one part or in two."""
    assert blocks(first, second) == blocks(first + second)


@given(TEXT, TEXT)
def test_a_longer_prompt_keeps_the_blocks_of_its_beginning(first: bytes, more: bytes) -> None:
    """A full block is final."""
    assert blocks(first + more).startswith(blocks(first))


@given(st.binary(min_size=3 * BLOCK_BYTES, max_size=600), st.integers(0, BLOCK_BYTES - 1))
def test_a_changed_byte_changes_every_block_from_its_own_on(text: bytes, at: int) -> None:
    """A hash stands for the whole prompt up to its block."""
    place = BLOCK_BYTES + at
    changed = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
    ours, theirs = blocks(text), blocks(changed)
    same = [ours[i : i + HASH_BYTES] == theirs[i : i + HASH_BYTES] for i in range(0, len(ours), HASH_BYTES)]
    assert same == [True] + [False] * (len(same) - 1)


def test_groups_and_adapters_share_no_block() -> None:
    """The group is part of every hash, and so is the adapter."""
    text = bytes(range(256)) * 2
    found = [array("Q", blocks(text, group=group, adapter=name)) for group, name in (("a", ""), ("b", ""), ("a", "x"))]
    assert len({block for each in found for block in each}) == sum(map(len, found)) == 12


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Replicas identify blocks by their hashes: a change of the function needs a decision record."""
    hashes = list(array("Q", blocks(bytes(range(240)), group="web")))
    assert hashes == [0x7AA480F47C9E2DDE, 0x91F6572A3DDBD5A9]


def test_the_size_of_a_chain_is_all_of_its_text() -> None:
    """Blocks, and what comes after the last."""
    chain = extend(extend(start("g"), b"x" * 100), b"y" * 50)
    assert (chain.size, len(chain.blocks), len(chain.tail)) == (150, HASH_BYTES, 30)
