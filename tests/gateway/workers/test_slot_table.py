"""Slots of endpoints in shared memory, agreed between workers when each applies a configuration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.shared_memory import SlotTable, slot_tag

NAMES = [f"pool/{letter}" for letter in "abcdef"]


def test_workers_get_equal_slots_in_any_order() -> None:
    """The first worker takes the slots; other workers find the names."""
    table = SlotTable(4, 2)
    first = table.take(0, ["pool/a", "pool/b"])
    assert table.take(1, ["pool/b", "pool/a"]) == first == {"pool/a": 0, "pool/b": 1}


def test_a_slot_is_free_after_the_last_worker_has_left() -> None:
    """A worker that is late with a reload still uses the removed endpoint."""
    table = SlotTable(2, 2)
    for worker in (0, 1):
        table.take(worker, ["pool/a", "pool/b"])
    assert table.take(0, ["pool/b", "pool/c"]) == {"pool/b": 1}
    assert table.take(1, ["pool/b", "pool/c"]) == {"pool/b": 1, "pool/c": 0}
    assert table.take(0, ["pool/b", "pool/c"]) == {"pool/b": 1, "pool/c": 0}


def test_the_least_recently_taken_slot_is_reused_first() -> None:
    """The remains of its last endpoint are old."""
    table = SlotTable(3, 1)
    for name in ("pool/a", "pool/b", "pool/c"):
        table.take(0, [name])
    assert table.take(0, ["pool/d"]) == {"pool/d": 0}


def test_endpoints_beyond_the_table_get_no_slot() -> None:
    assert len(SlotTable(2, 1).take(0, NAMES)) == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.sampled_from(NAMES))), max_size=30))
def test_no_two_held_endpoints_share_a_slot(turns: list[tuple[int, set[str]]]) -> None:
    """For any order of taking and leaving."""
    table, held = SlotTable(4, 3), dict[int, dict[str, int]]()
    for worker, names in turns:
        held[worker] = table.take(worker, sorted(names))
        assert held[worker].keys() <= names
        slots = {(name, at) for taken in held.values() for name, at in taken.items()}
        assert len({at for _, at in slots}) == len(slots) == len({name for name, _ in slots})


def test_a_tag_distinguishes_endpoints_of_one_slot() -> None:
    """Records of the previous endpoint are not taken for the next endpoint's."""
    assert len({slot_tag(3, name) for name in NAMES}) == len(NAMES)
    assert {slot_tag(3, name) & 0xFFFF for name in NAMES} == {3}
