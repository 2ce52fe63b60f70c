"""Columns of what has ended: a column is written once. JSON, access log, CSV, records on disk and docs follow from it.

Rules:
- A column reads the value that has ended, and knows nothing else. A part declares the columns of what it has noted.
- Times are seconds in the value that has ended; a column of unit MS shows milliseconds, rounded to the microsecond.
- A row is the list of a value's columns in order. Names are kept once, beside many rows (`Columns.shape`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

MS = "ms"

Ended = TypeVar("Ended")
Value = TypeVar("Value")
Shape = Sequence[tuple[str, Sequence[str], bool]]  # name, names of its members, and whether it is a list of these


@dataclass(frozen=True, slots=True)
class Column(Generic[Ended]):
    """`name`: as shown, its unit included. `get`: its value; None: unknown. `members`: the names of a value that is a
    sequence, whose unknown ones are not shown; `many`: the value is a list of such. `csv`: place in a spreadsheet."""

    name: str
    unit: str
    get: Callable[[Ended], Any]
    help: str
    members: Sequence[str] = ()
    many: bool = False
    csv: int | None = None


class Columns(Generic[Ended]):
    """All columns of a value, in order of their JSON. No two have one name."""

    def __init__(self, columns: Iterable[Column[Ended]]) -> None:
        self.all: tuple[Column[Ended], ...] = ()
        self.add(columns)

    def add(self, columns: Iterable[Column[Ended]]) -> None:
        """Append those of a part, before the first value has ended. Known ones are there once."""
        self.all = tuple(dict.fromkeys((*self.all, *columns)))
        names = [each.name for each in self.all]
        assert len(names) == len({*names}), f"two columns have one name: {sorted(names)}"
        self.shape: Shape = [(each.name, each.members, each.many) for each in self.all]
        self.table = sorted((each for each in self.all if each.csv is not None), key=lambda each: each.csv or 0)
        self._gets = [each.get for each in self.all]
        self._times = [place for place, each in enumerate(self.all) if each.unit == MS]

    def row(self, ended: Ended) -> list[Any]:
        found = [get(ended) for get in self._gets]
        for place in self._times:
            if (seconds := found[place]) is not None:
                found[place] = int(seconds * 1e6 + 0.5) / 1e3  # `round` takes three times as long
        return found

    def view(self, ended: Ended) -> dict[str, Any]:
        """As JSON."""
        return named(self.shape, self.row(ended))


def named(shape: Shape, row: Sequence[Any]) -> dict[str, Any]:
    """The JSON of a row."""
    return {
        name: value if not members or value is None else _members(members, value, many)
        for (name, members, many), value in zip(shape, row, strict=True)
    }


def _members(names: Sequence[str], value: Any, many: bool) -> Any:
    if many:
        return [dict(zip(names, each, strict=True)) for each in value]
    return {name: each for name, each in zip(names, value, strict=True) if each is not None}


def ms(seconds: float | None) -> float | None:
    """Milliseconds, rounded to the microsecond: of a time within a value of several."""
    return None if seconds is None else int(seconds * 1e6 + 0.5) / 1e3


class Noted(Protocol):
    """Keeps notes of parts: each note, and after it its value."""

    notes: tuple[Any, ...]


class Note(Generic[Value]):
    """Value that a part keeps of a request. Only that part writes it. Most requests have few, and a tuple is small."""

    def __init__(self, unknown: Value) -> None:
        self.unknown = unknown

    def of(self, ended: Noted) -> Value:
        notes = ended.notes
        return notes[notes.index(self) + 1] if self in notes else self.unknown

    def put(self, ended: Noted, value: Value) -> None:
        if self in ended.notes:
            self.take(ended)
        ended.notes += (self, value)

    def take(self, ended: Noted) -> Value:
        """Return what is known, for the last time."""
        notes = ended.notes
        if self not in notes:
            return self.unknown
        place = notes.index(self)
        ended.notes = notes[:place] + notes[place + 2 :]
        found: Value = notes[place + 1]
        return found
