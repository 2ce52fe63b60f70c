"""The table of known refusals, `refusals.yaml`, read once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from backends.body_changes import Scalar
from backends.error_body import ErrorPart

FILE = Path(__file__).with_name("refusals.yaml")
READ = 1000  # characters of an error's words
NUMBER = "{n}"  # as a fact's value: the number that the group n of the words has
MOST_MATCHES = 8  # of a row
_NOTHING = re.compile(r"(?!)")


class Course(Enum):
    UNREAD = "unread"
    MERITS = "merits"
    LACKS = "lacks"
    LEAVE_OUT = "leave_out"
    RENAME = "rename"
    REPLACE = "replace"
    ROLE = "role"
    FOLD = "fold"
    PARTS = "parts"
    FIT = "fit"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class KnownRefusal:
    course: Course
    words: re.Pattern[str]
    names: frozenset[str]
    member: str = ""
    to: str = ""
    also: str = ""
    beside: str = ""
    was: tuple[str, ...] = ()
    facts: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()  # of the server, by which a body is fitted
    pair: bool = False  # m and x do not go together
    once: bool = False

    def matches(self, part: ErrorPart) -> list[re.Match[str] | None]:
        """The places of the words that fit; [None]: the names alone; []: the row does not fit."""
        found: list[re.Match[str] | None] = [*islice(self.words.finditer(part.words[:READ]), MOST_MATCHES)]
        return found or ([None] if not self.names.isdisjoint(part.names) else [])


@dataclass(frozen=True, slots=True)
class RefusalTable:
    """`meaning`, `slight`: of paths. `same`: names of one thing in several dialects."""

    rows: tuple[KnownRefusal, ...]
    meaning: re.Pattern[str]
    slight: re.Pattern[str]
    same: tuple[frozenset[str], ...]
    known: frozenset[str]

    def are_same(self, name: str, other: str) -> bool:
        return any(name in each and other in each for each in self.same)


@cache
def table() -> RefusalTable:
    read = yaml.safe_load(FILE.read_text("utf-8"))
    rows = tuple(_row(each, read["patterns"]) for each in read["rows"])
    same = tuple(map(frozenset, read["same"]))
    return RefusalTable(rows, _paths(read["meaning"]), _paths(read["slight"]), same, frozenset(read["known"]))


def _row(row: dict[str, Any], patterns: Mapping[str, str]) -> KnownRefusal:
    words = re.compile(_written_out(row["words"], patterns), re.IGNORECASE) if "words" in row else _NOTHING
    given: dict[str, Any] = {
        name: row[name] for name in ("member", "to", "also", "beside", "pair", "once") if name in row
    }
    given |= {"was": tuple(row.get("was", ())), "facts": tuple(_fact(*each) for each in row.get("facts", {}).items())}
    return KnownRefusal(Course(row["do"]), words, _names(row.get("names", ())), **given)


def _fact(name: str, value: Any) -> tuple[str, tuple[Scalar, ...]]:
    return name, tuple(value) if isinstance(value, list) else (value,)


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


def _written_out(words: str, patterns: Mapping[str, str]) -> str:
    for name, pattern in patterns.items():
        words = words.replace("{" + name + "}", pattern)
    return words


def _paths(paths: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(_path_pattern, paths)))


def _path_pattern(path: str) -> str:
    return path.replace(".", r"\.").replace("**", "ANY").replace("*", r"[^.]+").replace("ANY", ".+")
