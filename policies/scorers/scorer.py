"""Scorer interface: a pure function from a tier's endpoints to numbers, smaller is better.

Rules:
- A scorer gets the endpoints of one tier, so of one pool: prompt tokens and prices are the same for all.
- It returns one finite float per candidate, in their order; its unit is its own.
- It breaks no ties: `policies.routing.ranking` spreads equal scores over their endpoints by `tie_break`.
- To add one: a function in `policies.scorers.baselines` or a file here, a name in `policies.scorers.scorer_catalog`
  and in `policies.routes.route.ScorerName`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

from policies.types import Endpoint, Forecast, Load, PoolEstimate

_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class CandidateInput:
    """An endpoint able to take the request, before ranking."""

    endpoint: Endpoint
    tier: int  # 0 is the most wanted
    load: Load
    prompt: PoolEstimate
    price: float  # expected USD
    hit: int  # tokens, believed cached
    forecast: Forecast


# Arguments: the candidates of one tier, and the request's sequence number as the only source of variety.
Scorer = Callable[[Sequence[CandidateInput], int], Sequence[float]]


@lru_cache(maxsize=4096)
def _digest(name: str) -> int:
    return crc32(name.encode())


def tie_break(sequence: int, name: str) -> int:
    """A number that is the same in every process, with an order over names that differs for every sequence number.

    `hash` of text differs between processes, and CRC-32 alone is linear: of three names, one would come first half of
    the time. Two odd multipliers (splitmix64's) spread it to within chance.
    """
    mixed = (_digest(name) + sequence) * 0x9E3779B97F4A7C15 & _WORD
    return (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 & _WORD
