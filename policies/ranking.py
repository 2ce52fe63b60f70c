"""Candidates in order of preference, made as they are asked for.

A decision ranks every endpoint, because failover never asks again; but mostly the first one answers, and a
Candidate with its reason in words costs as much as all else that is worked out for an endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from policies.facts import Candidate
from policies.scorers.interface import Prospect

Row = tuple[Prospect, float, str]  # with its score, and a reason to be filled in with p50 (ms) and chance


class Ranking(Sequence[Candidate]):
    """Equal to another, or to a tuple, where the candidates are."""

    __slots__ = ("_made", "_rows")

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._made: list[Candidate | None] = [None] * len(rows)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        made = self._made[at]
        if made is None:
            made = self._made[at] = _candidate(*self._rows[at])
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _candidate(p: Prospect, score: float, reason: str) -> Candidate:
    filled = reason % (p.forecast.p50 * 1e3, p.chance)
    return Candidate(p.endpoint, p.tier, p.prompt.tokens, p.hit, p.forecast, p.chance, p.price, score, filled)
