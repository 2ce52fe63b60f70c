"""Fewest requests in flight, then the shortest queue in the engine: Envoy's and nginx's least_conn.

All endpoints are compared, not two at random (power of two choices): with exact counts and one
gateway the full comparison is the stronger yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.scorers.scorer import CandidateInput, Context


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Requests in flight; the engine's queue adds less than one, so it only breaks ties."""
    return [p.load.in_flight + p.load.waiting / (p.load.waiting + 1) for p in prospects]
