"""What a scorer is: a pure function from a tier's endpoints to numbers, smaller is better.

Rules:
- A scorer sees the endpoints of one tier, so of one pool: prompt tokens and prices are the same for all.
- It returns one finite float per prospect, in their order; its unit is its own.
- It breaks no ties: equal scores are spread over their endpoints by `scatter`.
- To add one: a file here with a `score`, a name in `catalog` and in `policies.routes.route.ScorerName`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from policies.types import MEDIAN, Endpoint, Forecast, Load, PoolEstimate, Quantiles, probability_within

_WORD = 0xFFFFFFFFFFFFFFFF


class CandidateInput(NamedTuple):
    """An endpoint that could take the request, before it is ranked.

    One is made for every endpoint of every decision: it holds what a `Forecast` is made of, and makes one when asked.
    """

    endpoint: Endpoint
    tier: int  # 0 is the most wanted
    load: Load
    prompt: PoolEstimate
    price: float  # expected USD
    hit: int  # tokens, believed cached
    point_estimate: float  # of the TTFT, s
    ratios: Quantiles  # to it, at QUANTILES
    prefill: float  # s of the engine's time
    samples: int  # first tokens that stand behind it

    @property
    def p50(self) -> float:
        """The median TTFT, s."""
        return self.point_estimate * self.ratios[MEDIAN]

    @property
    def forecast(self) -> Forecast:
        return Forecast(self.point_estimate, self.ratios, self.load.tpot, self.samples, self.prefill)

    def probability(self, left: float) -> float:
        """Of the first token within so many seconds from now."""
        return probability_within(self.point_estimate, self.ratios, left)


class Context(NamedTuple):
    """What a scorer may know beyond its prospects."""

    now: float
    seed: int  # the ordinal of the request: the only source of variety


Scorer = Callable[[Sequence[CandidateInput], Context], Sequence[float]]


@lru_cache(maxsize=4096)
def _digest(name: str) -> int:
    return crc32(name.encode())


def tie_break(seed: int, name: str) -> int:
    """A number that is the same in every process, and whose order over names differs with every seed.

    `hash` of text differs between processes, and CRC-32 alone is linear: of three names, one would
    come first half of the time. Two odd multipliers (splitmix64's) spread it to within chance.
    """
    mixed = (_digest(name) + seed) * 0x9E3779B97F4A7C15 & _WORD
    return (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 & _WORD
