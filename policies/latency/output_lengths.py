"""How many tokens a route's answers have, learned from those that completed."""

from __future__ import annotations

PRIOR = 256  # tokens, before any
PRIOR_WEIGHT = 8  # answers that the prior counts for
DECAY = 1 / 64  # weight of the latest answer in the mean


class OutputLengths:
    """One route's answers."""

    __slots__ = ("_mean", "_seen")

    def __init__(self) -> None:
        self._mean = float(PRIOR)
        self._seen = PRIOR_WEIGHT

    def observe(self, tokens: int) -> None:
        self._seen += 1
        weight = 1 / self._seen
        self._mean += (tokens - self._mean) * (weight if weight > DECAY else DECAY)

    def mean(self, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer that may have at most `max_tokens`."""
        expected = round(self._mean)
        return max(1, expected if max_tokens is None else min(expected, max_tokens))
