"""The order of preference of a tier's candidates.

A ranking holds every candidate, because failover never asks again, but is described on demand: mostly the first
answers, and describing all costs as much as the rest of the decision.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from policies.routing.candidates import TierCandidates
from policies.scorers.scorers import tie_break
from policies.types import Candidate, Endpoint


def ranked(candidate: Candidate, score: float, reason: str) -> Candidate:
    """The candidate with a rank. `reason` has places for p50 (ms) and probability."""
    return Candidate(  # `replace` takes five times as long
        endpoint=candidate.endpoint,
        tier=candidate.tier,
        prompt_tokens=candidate.prompt_tokens,
        hit=candidate.hit,
        forecast=candidate.forecast,
        probability=candidate.probability,
        price=candidate.price,
        score=score,
        reason=reason % (candidate.forecast.p50 * 1e3, candidate.probability),
        load=candidate.load,
        blocks=candidate.blocks,
    )


def p50_of(candidates: Sequence[Candidate], at: int) -> float:
    """Median TTFT of the candidate at this rank, s, without its description."""
    return candidates.p50(at) if isinstance(candidates, Ranking) else candidates[at].forecast.p50


def one_of_each_pool(candidates: Sequence[Candidate]) -> list[Endpoint]:
    """An endpoint of each pool, where possible without the description of a candidate."""
    if isinstance(candidates, Ranking) and (only := candidates.of_one_pool()) is not None:
        return [only]
    return list({each.endpoint.pool: each.endpoint for each in candidates}.values())


class Ranking(Sequence[Candidate]):
    """A tier's candidates by score, ties by sequence number; then the result of `fallbacks`."""

    def __init__(
        self,
        tier: TierCandidates,
        scores: Sequence[float],
        sequence: int,
        reason: str,
        fallbacks: Callable[[], Sequence[Candidate]] = tuple,
        fallback_count: int = 0,
    ) -> None:
        """`reason` has places for p50 (ms) and probability; `fallbacks` is called at most once."""
        self._order = sorted(range(len(tier)), key=scores.__getitem__)  # ties are in order once asked for
        self._sorted = sorted(scores)
        self._sequence = sequence
        self._tier = tier
        self._scores = scores
        self._reason = reason
        self._fallbacks = fallbacks
        self._size = len(tier) + fallback_count
        self._described: dict[int, Candidate] = {}
        self._settled = 0  # ranks from the first on whose ties are in order

    def of_one_pool(self) -> Endpoint | None:
        """An endpoint of the only pool; None: there are fallbacks, perhaps of other pools."""
        return self._tier[0].endpoint if self._size == len(self._tier) else None

    def p50(self, at: int) -> float:
        return (self._tier[self._index(at)] if at < len(self._tier) else self[at]).forecast.p50

    def _index(self, at: int) -> int:
        """Index in the tier of the candidate at this rank."""
        if at < self._settled:
            return self._order[at]
        score = self._sorted[at]
        low, high = bisect_left(self._sorted, score), bisect_right(self._sorted, score)
        if high - low > 1:
            self._order[low:high] = sorted(self._order[low:high], key=self._tie_break)
        if low == self._settled:
            self._settled = high
        return self._order[at]

    def _tie_break(self, i: int) -> int:
        return tie_break(self._sequence, self._tier[i].endpoint.id)

    def _describe(self, at: int) -> Candidate:
        if at < len(self._tier):
            i = self._index(at)
            return ranked(self._tier[i], self._scores[i], self._reason_of(at))
        self._described.update(enumerate(self._fallbacks(), len(self._tier)))
        return self._described[at]

    def _reason_of(self, at: int) -> str:
        """Reason of a rank; behind the first of the tier, the difference between the two."""
        if at == 0:
            return self._reason
        own, first = self._index(at), self._index(0)
        if self._scores[own] == self._scores[first]:
            return f"{self._reason}; as good as the first of its tier, which luck drew"
        more = self._tier[first].hit - self._tier[own].hit
        if (score := f"{self._scores[own]:.4g}") == (best := f"{self._scores[first]:.4g}") and more > 0:
            return f"{self._reason}; as good as the first of its tier, which holds {more} more tokens of the prompt"
        return f"{self._reason}; score {score}, the first of its tier has {best}"

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int) -> Candidate:  # type: ignore[override]  # no slices
        at = range(self._size)[at]
        if at not in self._described:
            self._described[at] = self._describe(at)
        return self._described[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # candidates are compared, not hashed
