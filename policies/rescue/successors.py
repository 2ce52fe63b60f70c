"""Decides which endpoints may write the rest of an answer that broke, in which order, and after what silence.

Rules:
- An answer that broke by a fault of its request is continued by nobody.
- Endpoints of the broken one's pool come first, then the others pool by pool as ranked; of each the soonest as of now:
  an engine that dies leaves many answers at once, and the ranking of each is as old as the answer.
- A silent stream is left for another endpoint after GAPS of its mean gaps, TTFTS times the other's predicted TTFT, or
  LEAST_SILENCE, whichever is longest. Where a parser of tool calls may hold tokens back, the pace tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest

from policies.attempts.candidate_walk import OWN_FAULTS
from policies.blame.blame import Blame
from policies.types import FOREVER, AttemptKind, Candidate, Endpoint, Health, Load

LEAST_SILENCE, GAPS, TTFTS = 2.0, 20, 2  # s; mean gaps between two tokens; predicted TTFTs of the other endpoint
RESCUE_ATTEMPT = AttemptKind("rescue", continues=True)
MOST_FORECAST = 8  # endpoints at a break: those of the pool first, with the least prefill queued


def patience(own: Endpoint, tpot: float | None, others: Sequence[Candidate]) -> float:
    """Seconds without a byte after which a stream may be left for the first of the others; FOREVER: there is none."""
    first = next((each for each in others if each.endpoint.pool == own.pool), others[0] if others else None)
    return FOREVER if first is None else max(LEAST_SILENCE, GAPS * (tpot or 0.0), TTFTS * first.forecast.p50)


def is_of_request(blame: Blame) -> bool:
    """Whoever continues the answer would break alike."""
    return blame.fault in OWN_FAULTS


def able(
    others: Sequence[Candidate], loads: Mapping[str, Load], obstacle: Callable[[Endpoint], str]
) -> list[Candidate]:
    """Those that can continue the answer now. `loads`: by endpoint; `obstacle`: the reason for which no endpoint of
    this one's pool can; empty: they can. Asked once for each pool."""
    of_pools, found = dict[str, str](), list[Candidate]()
    for each in others:
        endpoint = each.endpoint
        if (load := loads.get(endpoint.id)) is None or load.health is not Health.UP:
            continue
        if endpoint.pool not in of_pools:
            of_pools[endpoint.pool] = obstacle(endpoint)
        if not of_pools[endpoint.pool]:
            found.append(each)
    return found


def to_forecast(own: Endpoint, found: Sequence[Candidate], loads: Mapping[str, Load]) -> list[Endpoint]:
    """Endpoints whose forecasts as of now order them: a thousand streams may ask at once."""
    bearing = (each.endpoint for each in found if loads[each.endpoint.id].tpot_pressure < 1)

    def order(endpoint: Endpoint) -> tuple[bool, float]:
        return endpoint.pool != own.pool, loads[endpoint.id].backlog_s

    return nsmallest(MOST_FORECAST, bearing, key=order)


def in_order(own: Endpoint, found: Sequence[Candidate], ttfts: Mapping[str, float]) -> list[Candidate]:
    """By pool: the same one, then the others as ranked; of each the soonest first. `ttfts`: s, of those known."""
    pools = [*dict.fromkeys([own.pool, *(each.endpoint.pool for each in found)])]
    return sorted(found, key=lambda each: (pools.index(each.endpoint.pool), ttfts.get(each.endpoint.id, FOREVER)))
