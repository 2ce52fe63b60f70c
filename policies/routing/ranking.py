"""Candidates in order of preference, made as they are asked for.

A decision ranks every endpoint, because failover never asks again; but mostly the first one answers, and to put all
in order and in words costs as much as all else that is worked out for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from policies.scorers.scorer import CandidateInput, tie_break
from policies.types import FOREVER, MEDIAN, Candidate, Forecast, probability_within

PICKED = 2  # are found one at a time, the one to be sent to and the one that stands by; the others are sorted

Row = tuple[CandidateInput, float, str]  # with its score, and a reason to be filled in with p50 (ms) and chance


def p50_of(ranked: Sequence[Candidate], at: int) -> float:
    """The median TTFT of the candidate there, s."""
    return ranked.p50(at) if isinstance(ranked, Ranking) else ranked[at].forecast.p50


class Ranking(Sequence[Candidate]):
    """A group by score, ties by the luck of the request; then the `others`, which have been put in order.

    Equal to another, or to a tuple, where the candidates are.
    """

    __slots__ = ("_group", "_left", "_made", "_others", "_reason", "_rows", "_scores", "_seed", "_size")

    def __init__(
        self,
        seed: int,
        left: float,
        group: Sequence[CandidateInput],
        scores: Sequence[float],
        reason: str,
        others: Callable[[], list[Row]] = list,
        more: int = 0,
    ) -> None:
        """`left`: s of the TTFT budget; `more`: how many the others are."""
        self._seed, self._left, self._group, self._reason = seed, left, group, reason
        self._scores, self._others, self._size = list(scores), others, len(group) + more
        self._rows: list[Row] = []
        self._made: dict[int, Candidate] = {}

    @classmethod
    def of(cls, rows: list[Row], left: float) -> Ranking:
        """In this order."""
        return cls(0, left, (), (), "", lambda: rows, len(rows))

    def rows(self) -> list[Row]:
        """All of them."""
        rows = self._rows
        if len(rows) < self._size:
            left = [(score, self._luck(i), i) for i, score in enumerate(self._scores) if score < FOREVER]
            rows += [(self._group[i], score, self._reason) for score, _, i in sorted(left)]
            rows += self._others()
        return rows

    def told(self) -> list[Row]:
        """All of them, each of the group with what put it behind the first."""
        rows = self.rows()
        return [rows[0], *((p, score, self._behind(at)) for at, (p, score, _) in enumerate(rows[1:], 1))]

    def _behind(self, at: int) -> str:
        """Why the row there is not the first: what separates them in the eyes of the scorer, or of luck."""
        (first, least, _), (prospect, score, reason) = self._row(0), self._row(at)
        if not 0 < at < len(self._group):
            return reason
        if score == least:
            return f"{reason}; as good as the first of its tier, which luck drew"
        more = first.hit - prospect.hit
        if (shown := f"{score:.4g}") == (best := f"{least:.4g}") and more > 0:
            return f"{reason}; as good as the first of its tier, which holds {more} more tokens of the prompt"
        return f"{reason}; score {shown}, the first of its tier has {best}"

    def _row(self, at: int) -> Row:
        rows = self._rows
        while len(rows) <= at and len(rows) < PICKED and len(rows) < len(self._group):
            rows.append(self._pick())
        return rows[at] if at < len(rows) else self.rows()[at]

    def _pick(self) -> Row:
        """The first of those that are left of the group."""
        scores = self._scores
        least = min(scores)
        at = scores.index(least)
        if scores.count(least) > 1:
            at = min((i for i, score in enumerate(scores) if score == least), key=self._luck)
        scores[at] = FOREVER
        return self._group[at], least, self._reason

    def _luck(self, at: int) -> int:
        return tie_break(self._seed, self._group[at].endpoint.id)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(self._size)))
        made = self._made.get(at)
        if made is None:
            made = self._made[at] = self._make(range(self._size)[at])
        return made

    def p50(self, at: int) -> float:
        """Of the candidate there, which is not made for it."""
        return self._row(at)[0].p50

    def _make(self, at: int) -> Candidate:
        prospect, score, reason = self._row(at)
        if at:
            reason = self._behind(at)
        endpoint, tier, load, prompt, price, hit, center, ratios, prefill, samples = prospect
        chance = probability_within(center, ratios, self._left)
        forecast = Forecast(center, ratios, load.tpot, samples, prefill)
        reason %= (center * ratios[MEDIAN] * 1e3, chance)
        return Candidate(endpoint, tier, prompt.tokens, hit, forecast, chance, price, score, reason, load)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
