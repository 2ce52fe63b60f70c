"""Workers agree upon which slot is whose endpoint's, each when it takes a configuration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.shared_memory import SlotTable, slot_tag

NAMES = [f"pool/{letter}" for letter in "abcdef"]


def test_workers_find_the_same_slots_in_whatever_order_they_ask() -> None:
    """Whoever comes first takes them; the others find the names."""
    table = SlotTable(4, 2)
    first = table.take(0, ["pool/a", "pool/b"])
    assert table.take(1, ["pool/b", "pool/a"]) == first == {"pool/a": 0, "pool/b": 1}


def test_a_slot_is_free_when_nobody_holds_it_and_not_before() -> None:
    """A worker that is late with a reload still has the endpoint that others have given up."""
    table = SlotTable(2, 2)
    for worker in (0, 1):
        table.take(worker, ["pool/a", "pool/b"])
    assert table.take(0, ["pool/b", "pool/c"]) == {"pool/b": 1}
    assert table.take(1, ["pool/b", "pool/c"]) == {"pool/b": 1, "pool/c": 0}
    assert table.take(0, ["pool/b", "pool/c"]) == {"pool/b": 1, "pool/c": 0}


def test_the_slot_that_was_taken_longest_ago_is_taken_first() -> None:
    """What its last endpoint left in it is old."""
    table = SlotTable(3, 1)
    for name in ("pool/a", "pool/b", "pool/c"):
        table.take(0, [name])
    assert table.take(0, ["pool/d"]) == {"pool/d": 0}


def test_one_that_finds_no_slot_is_left_out() -> None:
    assert len(SlotTable(2, 1).take(0, NAMES)) == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.sampled_from(NAMES))), max_size=30))
def test_no_two_endpoints_that_are_held_have_one_slot(turns: list[tuple[int, set[str]]]) -> None:
    """Whatever is taken and given up, and by whom."""
    table, held = SlotTable(4, 3), dict[int, dict[str, int]]()
    for worker, names in turns:
        held[worker] = table.take(worker, sorted(names))
        assert held[worker].keys() <= names
        slots = {(name, at) for taken in held.values() for name, at in taken.items()}
        assert len({at for _, at in slots}) == len(slots) == len({name for name, _ in slots})


def test_a_tag_tells_endpoints_of_one_slot_apart() -> None:
    """What was noted of the one before is not taken for the other's."""
    assert len({slot_tag(3, name) for name in NAMES}) == len(NAMES)
    assert {slot_tag(3, name) & 0xFFFF for name in NAMES} == {3}
