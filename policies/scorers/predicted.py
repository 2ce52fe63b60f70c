"""The default scorer: the least predicted time to first token, with the price of the prompt to other requests."""

from __future__ import annotations

from collections.abc import Sequence

from policies.latency.tpot import expected_tpot_misses
from policies.routes.route import Route
from policies.types import MEDIAN, Candidate

TPOT_MISS = 3.0  # s of delay of the request per answer with a TPOT miss: an agent's whole TTFT budget
NEAR = 0.05  # of the least cost
PER_HIT = 1e-9  # s per cached token: less than any difference in cost, enough to order equals


def predicted(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Seconds: the least predicted TTFT, plus the price of the prompt to other requests.

    A prefill stalls each answer decoded in the same steps: with a perfect prediction alone a fleet met TTFT for 87 % of
    requests and was good for only 58 %. So the expected TPOT misses (`policies.latency.tpot`) have a price. Affinity
    has none of its own, nor has engine time.

    Costs within NEAR of the least count as equal: predictions are not more exact. Among equals the longest hit is
    first, so a prefix stays on an endpoint.
    """
    costs = []
    for candidate in candidates:
        forecast, load = candidate.forecast, candidate.load
        cost = forecast.point_estimate * forecast.ratios[MEDIAN]
        if load.expected_tpot_misses:
            cost += TPOT_MISS * expected_tpot_misses(load, forecast.prefill)
        costs.append(cost)
    least = min(costs)
    near = least * (1 + NEAR)
    return [(least if cost <= near else cost) - PER_HIT * c.hit for cost, c in zip(costs, candidates, strict=True)]
