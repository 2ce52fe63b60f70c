"""Least predicted TTFT, and what the prompt would cost those already being served there.

The median prediction holds everything that delays this request: queue, uncached tokens, the
engine's pace. What it does not hold is the harm to others: every prefill token delays each
decode that shares its steps, and with a perfect prediction alone a fleet met TTFT for 87 % of
requests and was good for only 58 %, because answers under way lost their pace. So a request
costs `PRESSURE` seconds for every uncached token and every answer being decoded there.

Affinity has no price of its own: a hit is worth the seconds it saves. What a cached prefix is
worth to the requests that will follow is not weighed yet.

Costs within NEAR of the least are equal: predictions are not better than that, and a difference
of a few percent, once learned, would send every fresh prompt to one of two equal engines. Among
equals the longer hit is first, so that a prefix stays where it is; then luck decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.facts import Load
from policies.stall import lost
from policies.scorers.interface import Context, Prospect

# Seconds, per uncached token and decode: 2 % of the 50 us by which a prefill token delays each
# decode beside it on an 8B-class engine (20 tokens/ms). Small: it decides between near equals.
PRESSURE = 1e-6
import os
BASE = float(os.environ.get('BASE', '10'))
NEAR = 0.05  # of the least cost
PER_HIT = 1e-9  # s per cached token: less than any difference in cost, enough to order equals


MODE = os.environ.get("MODE", "h")
MISS = float(os.environ.get("MISS", "3.0"))


def score(prospects: Sequence[Prospect], context: Context) -> list[float]:
    """Seconds."""
    if MODE == "h":
        costs = [p.forecast.p50 + MISS * harm(p) for p in prospects]
    elif MODE == "b":
        costs = [p.forecast.p50 * (max(p.load.running + p.load.waiting, p.load.in_flight) + BASE) for p in prospects]
    else:
        costs = [(p.forecast.p50 + MISS * harm(p)) * (max(p.load.running + p.load.waiting, p.load.in_flight) + BASE) for p in prospects]
    least = min(costs)
    near = least * (1 + NEAR)
    return [(least if cost <= near else cost) - PER_HIT * p.hit for cost, p in zip(costs, prospects, strict=True)]


def decoding(load: Load) -> int:
    """Answers being decoded: what the engine last said, or what is known to have started since."""
    return max(load.running, load.in_flight - load.prefilling)


def harm(p: Prospect) -> float:
    load = p.load
    return lost(load.harm, p.seconds + load.stalled + load.busy) - lost(load.harm, load.stalled + load.busy) if load.harm else 0.0
