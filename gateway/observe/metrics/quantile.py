"""Quantiles of histograms, as Prometheus computes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Interpolated linearly within a bucket; beyond the last bound the bound is the result.

    `counts`: of each bucket; the last has no bound. None: nothing was counted.
    """
    cumulated = list(accumulate(counts))
    if not bounds or not cumulated or not cumulated[-1]:
        return None
    rank = q * cumulated[-1]
    at = next(i for i, total in enumerate(cumulated) if total >= rank and counts[i])
    if at == len(bounds):
        return bounds[-1]
    low, below = (bounds[at - 1], cumulated[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / counts[at]
