"""The walk through the candidates of a decision, in their order, each once.

Rules:
- Candidates of avoided pools are passed over.
- A candidate at its cap or rate limit is passed over, and stays worth an attempt where no other is left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from policies.attempts.attempt_events import AttemptFacts
from policies.routing.ranking import p50_of
from policies.types import Candidate


class CandidateWalk:
    """The candidates not yet tried, the pools avoided and the candidates passed over as closed."""

    def __init__(self, candidates: Sequence[Candidate], facts: AttemptFacts) -> None:
        self.closed: list[Candidate] = []
        self.avoided: set[str] = set()  # pools
        self.count = len(candidates)  # tried or not
        self._candidates = candidates
        self._tried = 0
        self._facts = facts

    def advance(self, now: float) -> bool:
        """Pass over avoided and closed candidates. False: none is left."""
        while self._tried < self.count and (self.avoided or self._facts.closes) and self._passes_over(now):
            self._tried += 1
        return self._tried < self.count

    def _passes_over(self, now: float) -> bool:
        candidate = self._candidates[self._tried]
        if candidate.endpoint.pool in self.avoided:
            return True
        if closed := self._facts.closes and self._facts.is_closed(candidate, now):
            self.closed.append(candidate)
        return closed

    @property
    def upcoming(self) -> Candidate:
        """The next candidate, after `advance`."""
        return self._candidates[self._tried]

    @property
    def upcoming_p50(self) -> float:
        """The median TTFT of the next candidate, s, without its description."""
        return p50_of(self._candidates, self._tried)

    def take(self) -> Candidate:
        """The next candidate is tried now."""
        self._tried += 1
        return self._candidates[self._tried - 1]

    def avoid(self, pools: Collection[str]) -> None:
        self.avoided.update(pools)
        self.closed = [each for each in self.closed if each.endpoint.pool not in self.avoided]

    def leads_beyond(self, pools: Collection[str]) -> bool:
        """A candidate that is left is of another pool than these."""
        left = range(self._tried, self.count)
        return any(self._candidates[rank].endpoint.pool not in pools for rank in left)

    def has_sibling(self, candidate: Candidate) -> bool:
        """Another endpoint of the candidate's pool is among the candidates, tried or not."""
        own = candidate.endpoint
        return any(each.endpoint.pool == own.pool and each.endpoint != own for each in self._candidates)

    def has_other_credential(self, candidate: Candidate) -> bool:
        """The server also takes requests by another API key, with separate limits."""
        own = candidate.endpoint
        others = self._candidates if own.server else ()
        return any(each.endpoint.server == own.server and each.endpoint.id != own.id for each in others)
