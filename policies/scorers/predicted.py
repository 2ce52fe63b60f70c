"""Least predicted TTFT, and what the prompt would cost those already being served there.

The median prediction holds everything that delays this request: queue, uncached tokens, the
engine's pace. What it does not hold is the harm to others: a prefill stalls each answer that shares its
steps, and with a perfect prediction alone a fleet met TTFT for 87 % of requests and was good for only
58 %, because answers under way lost their pace. So the answers that its prefill would cost their
pace there (`policies.fleet.decode_interference`: expected losses, a number) are priced at WORTH seconds each.

Affinity has no price of its own: a hit is worth the seconds it saves to this request, what its prefill
would cost the others, and EFFORT for the engine's time, which whoever comes next will want. Without the
last, siblings of one prefix that arrive together would each compute it on an engine of their own, for
none would wait longer for the first to be done. More than 0.3 scatters load too little: at 1 and 3 a
saturated fleet lost 1 to 4 % of its good answers.

Costs within NEAR of the least are equal: predictions are not better than that, and a difference
of a few percent, once learned, would send every fresh prompt to one of two equal engines. Among
equals the longer hit is first, so that a prefix stays where it is; then luck decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.fleet.decode_interference import expected_tpot_misses
from policies.scorers.scorer import CandidateInput, Context
from policies.types import MEDIAN

WORTH = 3.0  # s of this request's delay that one answer's pace is worth: an agent's whole budget
EFFORT = 0.3  # s of this request's delay that a second of an engine's time is worth
NEAR = 0.05  # of the least cost
PER_HIT = 1e-9  # s per cached token: less than any difference in cost, enough to order equals


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Seconds."""
    costs, hits = [], []
    for _, _, load, _, _, hit, center, ratios, prefill, _ in prospects:  # by place: names cost as much as the rest
        cost = center * ratios[MEDIAN] + EFFORT * prefill
        costs.append(cost + WORTH * expected_tpot_misses(load, prefill) if load.expected_tpot_misses else cost)
        hits.append(hit)
    least = min(costs)
    near = least * (1 + NEAR)
    return [(least if cost <= near else cost) - PER_HIT * hit for cost, hit in zip(costs, hits, strict=True)]
