"""Intervals of measured shares."""

from __future__ import annotations

from math import sqrt

NORMAL = 1.96  # quantile of the normal distribution for an interval of 95%


def wilson(met: int, of: int) -> tuple[float, float]:
    """The interval of 95% of a share, by Wilson (1927)."""
    if not of:
        return 0.0, 1.0
    share, z2 = met / of, NORMAL**2
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = NORMAL / (1 + z2 / of) * sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)
