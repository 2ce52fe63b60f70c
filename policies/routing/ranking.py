"""Candidates in order of preference, computed on demand.

A decision ranks every endpoint, because failover never asks again; but mostly the first one answers, and sorting and
describing all of them costs as much as the rest of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from policies.scorers.scorer import CandidateInput, tie_break
from policies.types import FOREVER, Candidate

EAGER = 2  # ranks found one at a time, the destination and its first fallback; the others are sorted together


@dataclass(slots=True)
class RankedInput:
    """A candidate with its score; `reason` has places for p50 (ms) and probability."""

    input: CandidateInput
    score: float
    reason: str


def p50_of(ranked: Sequence[Candidate], at: int) -> float:
    """Median TTFT of the candidate at this rank, s."""
    return ranked.p50(at) if isinstance(ranked, Ranking) else ranked[at].forecast.p50


class Ranking(Sequence[Candidate]):
    """The chosen tier's candidates by score, ties by sequence number; then all others, in the order of `fallbacks`."""

    def __init__(
        self,
        sequence: int,
        left: float,
        tier: Sequence[CandidateInput] = (),
        scores: Sequence[float] = (),
        reason: str = "",
        fallbacks: Callable[[], list[RankedInput]] = list,
        fallback_count: int = 0,
    ) -> None:
        """`left`: s of the TTFT budget; `fallbacks` is called at most once."""
        self._sequence = sequence
        self._left = left
        self._tier = tier
        self._tier_reason = reason
        self._scores = list(scores)  # FOREVER once ranked
        self._fallbacks = fallbacks
        self._size = len(tier) + fallback_count
        self._rows: list[RankedInput] = []
        self._candidates: dict[int, Candidate] = {}

    @classmethod
    def of(cls, rows: list[RankedInput], left: float) -> Ranking:
        """A ranking in this order."""
        return cls(0, left, fallbacks=lambda: rows, fallback_count=len(rows))

    def explained(self) -> list[RankedInput]:
        """All rows, each with its reason for not being first."""
        rows = self._all_rows()
        explained = [RankedInput(row.input, row.score, self._reason(at)) for at, row in enumerate(rows[1:], 1)]
        return [rows[0], *explained]

    def p50(self, at: int) -> float:
        """Median TTFT, s, of the candidate at this rank, without constructing it."""
        return self._row(at).input.forecast.p50

    def _all_rows(self) -> list[RankedInput]:
        rows = self._rows
        if len(rows) < self._size:
            left = [(score, self._tie_break(i), i) for i, score in enumerate(self._scores) if score < FOREVER]
            rows += [RankedInput(self._tier[i], score, self._tier_reason) for score, _, i in sorted(left)]
            rows += self._fallbacks()
        return rows

    def _row(self, at: int) -> RankedInput:
        rows = self._rows
        while len(rows) <= at and len(rows) < min(EAGER, len(self._tier)):
            rows.append(self._next_of_tier())
        return rows[at] if at < len(rows) else self._all_rows()[at]

    def _next_of_tier(self) -> RankedInput:
        scores = self._scores
        least = min(scores)
        at = scores.index(least)
        if scores.count(least) > 1:
            at = min((i for i, score in enumerate(scores) if score == least), key=self._tie_break)
        scores[at] = FOREVER
        return RankedInput(self._tier[at], least, self._tier_reason)

    def _tie_break(self, at: int) -> int:
        return tie_break(self._sequence, self._tier[at].endpoint.id)

    def _reason(self, at: int) -> str:
        """Reason of a row's rank; behind the first of the same tier, the difference between the two."""
        row = self._row(at)
        if not 0 < at < len(self._tier):
            return row.reason
        first = self._row(0)
        if row.score == first.score:
            return f"{row.reason}; as good as the first of its tier, which luck drew"
        more = first.input.hit - row.input.hit
        if (score := f"{row.score:.4g}") == (best := f"{first.score:.4g}") and more > 0:
            return f"{row.reason}; as good as the first of its tier, which holds {more} more tokens of the prompt"
        return f"{row.reason}; score {score}, the first of its tier has {best}"

    def _candidate(self, at: int) -> Candidate:
        row = self._row(at)
        found, forecast = row.input, row.input.forecast
        probability = forecast.probability(self._left)
        return Candidate(
            endpoint=found.endpoint,
            tier=found.tier,
            prompt_tokens=found.prompt.tokens,
            hit=found.hit,
            forecast=forecast,
            probability=probability,
            price=found.price,
            score=row.score,
            reason=self._reason(at) % (forecast.p50 * 1e3, probability),
            load=found.load,
        )

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(self._size)))
        at = range(self._size)[at]
        if at not in self._candidates:
            self._candidates[at] = self._candidate(at)
        return self._candidates[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # candidates are compared, not hashed

    def __repr__(self) -> str:
        return repr(tuple(self))
