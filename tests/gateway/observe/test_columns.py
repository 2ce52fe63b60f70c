"""A column is written once: JSON, the row of a file, and the table of a spreadsheet follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from gateway.observe.columns import MS, Column, Columns, Note, ms, named


class Trip(NamedTuple):
    waited: float | None = None
    legs: tuple[tuple[str, float], ...] = ()


COLUMNS = Columns[Trip](
    (
        Column("legs", "", lambda e: [(town, ms(took)) for town, took in e.legs], "", ("to", "took_ms"), many=True),
        Column("waited_ms", MS, lambda e: e.waited, "", csv=1),
        Column("number_of_legs", "", lambda e: len(e.legs), "", csv=0),
        Column("longest", "", lambda e: max(e.legs, default=None), "", ("to", "took")),
    )
)


def test_a_value_is_shown_by_its_columns() -> None:
    """Times of unit ms are seconds in the value; members have names, and no name is written twice beside many rows."""
    trip = Trip(0.0123456789, (("Rome", 1.5), ("Nice", 0.25)))
    row = COLUMNS.row(trip)
    assert row == [[("Rome", 1500.0), ("Nice", 250.0)], 12.346, 2, ("Rome", 1.5)]
    assert COLUMNS.view(trip) == named(COLUMNS.shape, row)
    assert COLUMNS.view(trip) == {
        "legs": [{"to": "Rome", "took_ms": 1500.0}, {"to": "Nice", "took_ms": 250.0}],
        "waited_ms": 12.346,
        "number_of_legs": 2,
        "longest": {"to": "Rome", "took": 1.5},
    }


def test_unknown_values_are_null_and_unknown_members_are_left_out() -> None:
    assert COLUMNS.view(Trip()) == {"legs": [], "waited_ms": None, "number_of_legs": 0, "longest": None}
    assert named([("stages_ms", ("read", "relay"), False)], [[1.5, None]]) == {"stages_ms": {"read": 1.5}}


def test_a_spreadsheet_has_the_columns_that_name_a_place_there_in_order() -> None:
    assert [each.name for each in COLUMNS.table] == ["number_of_legs", "waited_ms"]


def test_two_columns_of_one_name_are_a_bug_of_a_part() -> None:
    """One of them would be lost in the JSON."""
    with pytest.raises(AssertionError, match="two columns have one name"):
        Columns([*COLUMNS.all, Column("longest", "", lambda e: None, "")])


@dataclass
class Kept:
    notes: tuple[Any, ...] = ()


def test_a_note_is_found_by_itself_and_replaced_as_a_whole() -> None:
    """Notes of several parts share one tuple, whose values may be equal."""
    tries, words, kept = Note(0), Note(""), Kept()
    assert (tries.of(kept), words.take(kept), kept.notes) == (0, "", ())
    tries.put(kept, 1)
    words.put(kept, "twice")
    tries.put(kept, 2)
    assert (tries.of(kept), words.of(kept), len(kept.notes)) == (2, "twice", 4)
    assert (words.take(kept), words.of(kept), tries.of(kept)) == ("twice", "", 2)
