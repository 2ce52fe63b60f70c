"""Least predicted TTFT, plus the price of what the prompt costs others.

The median prediction holds everything that delays this request: queue, uncached tokens, the engine's pace. Its cost to
others is added: a prefill stalls each answer that shares its steps. With a perfect prediction alone a fleet met TTFT
for 87 % of requests and was good for only 58 %, as answers in progress lost their pace. So the expected number of
answers that would miss their TPOT (`policies.latency.tpot`) is priced at TPOT_MISS seconds each.

Affinity has no price of its own: a hit is worth the seconds saved for this request, for the answers in progress, and
ENGINE_TIME of the prefill for later requests. Without the last, siblings of one prefix that arrive together are each
computed on an engine of their own, as none would wait longer for the first one. More than 0.3 concentrates load too
much: at 1 and 3 a saturated fleet lost 1 to 4 % of its good answers.

Costs within NEAR of the least count as equal, as predictions are not more exact than that and a learned difference of
a few percent would send every fresh prompt to one of two equal engines. Among equals the longest hit is first, so
a prefix stays on its endpoint; remaining ties are broken by sequence number.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.latency.tpot import expected_tpot_misses
from policies.scorers.scorer import CandidateInput
from policies.types import MEDIAN

TPOT_MISS = 3.0  # s of this request's delay per answer that misses its TPOT: an agent's whole TTFT budget
ENGINE_TIME = 0.3  # s of this request's delay per second of engine time
NEAR = 0.05  # of the least cost
PER_HIT = 1e-9  # s per cached token: less than any difference in cost, enough to order equals


def predicted(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Seconds."""
    costs = []
    for candidate in candidates:
        forecast, load = candidate.forecast, candidate.load
        cost = forecast.point_estimate * forecast.ratios[MEDIAN] + ENGINE_TIME * forecast.prefill
        if load.expected_tpot_misses:
            cost += TPOT_MISS * expected_tpot_misses(load, forecast.prefill)
        costs.append(cost)
    least = min(costs)
    near = least * (1 + NEAR)
    return [(least if cost <= near else cost) - PER_HIT * c.hit for cost, c in zip(costs, candidates, strict=True)]
