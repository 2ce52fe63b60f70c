"""Least predicted TTFT and nothing else: what prediction alone achieves."""

from __future__ import annotations

from collections.abc import Sequence

from policies.scorers.scorer import CandidateInput, Context


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Seconds, the median."""
    return [p.p50 for p in prospects]
