"""By how much predictions were wrong lately: the quantiles of actual / predicted.

Conformal in spirit: the spread of the next forecast is the spread of the last errors, whatever their
shape. While there are few of them, and again once they are old, a wide prior is mixed in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from functools import cache
from math import exp, log
from statistics import NormalDist

from policies.types import NEVER, QUANTILES, Quantiles

WINDOW = 128  # samples
PRIOR_SIGMA = 0.6  # of the ratio's logarithm, before any sample: nine of ten under 2.2 times the prediction
PRIOR_WEIGHT = 6.0  # samples at which the prior counts as much as they do; at ten times as many, a hundredth
HALF_LIFE = 1800.0  # s after which old samples count half
REFRESH = 60.0  # s between looks at their age
LARGEST = 6.0  # of the logarithm's magnitude: a factor of 400
SMALLEST = 1e-9

PRIOR: tuple[float, ...] = tuple(PRIOR_SIGMA * NormalDist().inv_cdf(q) for q in QUANTILES)


class ErrorQuantiles:
    """A window of ratios; works in logarithms, in which twice and half are equally wrong."""

    __slots__ = ("_latest", "_mixed_at", "_prior", "_quantiles", "_recent", "_sorted")

    def __init__(self) -> None:
        self._prior: Quantiles = PRIOR
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._latest = self._mixed_at = NEVER
        self._quantiles: Quantiles = tuple(map(exp, PRIOR))

    def add(self, ratio: float, now: float) -> None:
        value = log(ratio) if ratio > SMALLEST else -LARGEST
        value = LARGEST if value > LARGEST else -LARGEST if value < -LARGEST else value
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)
        self._latest, self._mixed_at = now, NEVER

    def forget(self) -> None:
        """What was learned no longer holds."""
        self._recent.clear()
        self._sorted.clear()
        self._mixed_at = NEVER

    def warm_start_from(self, other: ErrorQuantiles, now: float) -> None:
        """Take another's spread for prior."""
        self._prior = tuple(map(log, other.quantiles(now)))
        self._mixed_at = NEVER

    def quantiles(self, now: float) -> Quantiles:
        """At QUANTILES, ascending."""
        if now - self._mixed_at > REFRESH:
            self._quantiles, self._mixed_at = self._mix(now), now
        return self._quantiles

    def _mix(self, now: float) -> Quantiles:
        values, age = self._sorted, now - self._latest
        if not values:
            return tuple(map(exp, self._prior))
        weight = len(values) * 0.5 ** ((age if age > 0.0 else 0.0) / HALF_LIFE)
        share = weight**2 / (weight**2 + PRIOR_WEIGHT**2)
        rest, mixed = 1 - share, zip(_places(len(values)), self._prior, strict=True)
        return tuple(
            [
                exp(share * (values[low] + (values[high] - values[low]) * part) + rest * prior)
                for (low, high, part), prior in mixed
            ]
        )


@cache
def _places(count: int) -> tuple[tuple[int, int, float], ...]:
    """Of QUANTILES among so many: the (n+1)q-th of n, as conformal prediction has it, lies between two of them."""
    last = count - 1
    places = [min(max(q * (last + 2) - 1, 0.0), float(last)) for q in QUANTILES]
    return tuple((int(at), min(int(at) + 1, last), at - int(at)) for at in places)
