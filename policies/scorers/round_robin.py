"""Each endpoint in turn, whatever its load: the floor that every router must beat.

The turn is the request's ordinal, so that a replay makes the same choices. With several routes
over one pool the turns interleave, as they do in routers that keep one counter.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.scorers.scorer import CandidateInput, Context


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Turns until it is the endpoint's."""
    n = len(prospects)
    return [float((rank - context.seed) % n) for rank in range(n)]
