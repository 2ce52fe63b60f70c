"""By how much predictions were wrong lately: the quantiles of actual / predicted.

Conformal in spirit: the spread of the next forecast is the spread of the last errors, whatever their
shape. While there are few of them, and again once they are old, a wide prior is mixed in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import exp, log
from statistics import NormalDist

from policies.facts import NEVER, QUANTILES

WINDOW = 128  # samples
PRIOR_SIGMA = 0.6  # of the ratio's logarithm, before any sample: nine of ten under 2.2 times the prediction
PRIOR_WEIGHT = 6.0  # samples at which the prior counts as much as they do; at ten times as many, a hundredth
HALF_LIFE = 1800.0  # s after which old samples count half
REFRESH = 60.0  # s between looks at their age
LARGEST = 6.0  # of the logarithm's magnitude: a factor of 400

PRIOR: tuple[float, ...] = tuple(PRIOR_SIGMA * NormalDist().inv_cdf(q) for q in QUANTILES)


class Ratios:
    """A window of ratios; works in logarithms, in which twice and half are equally wrong."""

    __slots__ = ("_latest", "_made_at", "_prior", "_quantiles", "_recent", "_sorted")

    def __init__(self) -> None:
        self._prior: Sequence[float] = PRIOR
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._latest = self._made_at = NEVER
        self._quantiles: tuple[float, ...] = tuple(map(exp, PRIOR))

    def add(self, ratio: float, now: float) -> None:
        value = min(max(log(max(ratio, 1e-9)), -LARGEST), LARGEST)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)
        self._latest, self._made_at = now, NEVER

    def forget(self) -> None:
        """What was learned no longer holds."""
        self._recent.clear()
        self._sorted.clear()
        self._made_at = NEVER

    def follow(self, other: Ratios, now: float) -> None:
        """Take another's spread for prior."""
        self._prior = tuple(map(log, other.quantiles(now)))
        self._made_at = NEVER

    def quantiles(self, now: float) -> tuple[float, ...]:
        """At QUANTILES, ascending."""
        if now - self._made_at > REFRESH:
            self._quantiles = self._mix(now)
            self._made_at = now
        return self._quantiles

    def _mix(self, now: float) -> tuple[float, ...]:
        values = self._sorted
        if not values:
            return tuple(map(exp, self._prior))
        weight = len(values) * 0.5 ** (max(now - self._latest, 0.0) / HALF_LIFE)
        share = weight**2 / (weight**2 + PRIOR_WEIGHT**2)
        last = len(values) - 1
        mixed = []
        for q, prior in zip(QUANTILES, self._prior, strict=True):
            at = min(max(q * (last + 2) - 1, 0.0), float(last))  # the (n+1)q-th of n, as conformal prediction has it
            low = int(at)
            value = values[low] + (values[min(low + 1, last)] - values[low]) * (at - low)
            mixed.append(exp(share * value + (1 - share) * prior))
        return tuple(mixed)
