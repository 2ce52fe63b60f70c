"""How many tokens a route's answers have, learned from those that completed."""

from __future__ import annotations

from bisect import insort
from collections import deque

WINDOW = 256  # answers
PRIOR = 256  # tokens, before any
PRIOR_WEIGHT = 8  # answers that the prior counts for
DECAY = 1 / 64  # weight of the latest answer in the mean


class OutputLengths:
    """One route's answers."""

    __slots__ = ("_mean", "_recent", "_seen", "_sorted")

    def __init__(self) -> None:
        self._mean = float(PRIOR)
        self._seen = PRIOR_WEIGHT
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        self._seen += 1
        self._mean += (tokens - self._mean) * max(DECAY, 1 / self._seen)
        if len(self._recent) == WINDOW:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(tokens)
        insort(self._sorted, tokens)

    def mean(self, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer that may have at most `max_tokens`."""
        return _bounded(self._mean, max_tokens)

    def p90(self, max_tokens: int | None = None) -> int:
        """Nine of ten answers are no longer."""
        if not self._sorted:
            return _bounded(2.3 * PRIOR, max_tokens)  # an exponential's: ln 10 times the mean
        return _bounded(self._sorted[(len(self._sorted) * 9) // 10], max_tokens)


def _bounded(tokens: float, max_tokens: int | None) -> int:
    return max(1, round(tokens) if max_tokens is None else min(round(tokens), max_tokens))
