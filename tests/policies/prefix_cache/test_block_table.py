"""A map in flat arrays, compared with a dict."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix_cache.block_tree import BlockTable

# Names of few slots, for collisions and wrap-around.
names = st.integers(1, 7) | st.integers(60, 64) | st.integers(124, 130) | st.integers(1, 2**64 - 1)
steps = st.lists(st.tuples(names, st.integers(0, 2**32 - 1) | st.none()), max_size=300)


@settings(max_examples=300)
@given(steps)
def test_a_block_table_equals_a_dict(story: Sequence[tuple[int, int | None]]) -> None:
    """None removes. Every name ever used is looked up at the end."""
    table, plain = BlockTable(), dict[int, int]()
    for name, value in story:
        if value is None:
            assert table.pop(name) == plain.pop(name, None)
        else:
            table.put(name, value)
            plain[name] = value
        assert len(table) == len(plain)
    assert [table.get(name) for name, _ in story] == [plain.get(name) for name, _ in story]


def test_a_block_table_grows_and_can_be_cleared() -> None:
    """By doubling."""
    table = BlockTable()
    for name in range(1, 10_001):
        table.put(name * 2**40 + name, name)
    assert [table.get(name * 2**40 + name) for name in range(1, 10_001)] == list(range(1, 10_001))
    table.clear()
    assert (len(table), table.get(2**40 + 1)) == (0, None)
