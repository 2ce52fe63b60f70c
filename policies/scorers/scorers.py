"""Scorers: pure functions from the endpoints of a tier to numbers, smaller is better.

Rules:
- The endpoints are of one pool: prompt tokens and prices are the same for all.
- A scorer returns a finite float per candidate, in the same order, in a unit of the scorer's own.
- No scorer breaks ties: `policies.routing.candidates` spreads equal scores over the endpoints by `tie_break`.
- To add a scorer: a function here, a name in SCORERS and in `policies.routes.route.ScorerName`.

`predicted` is the default; the rest are the rules of other routers, as baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from zlib import crc32

from policies.latency.tpot import expected_tpot_misses
from policies.routes.route import ScorerName
from policies.types import FOREVER, MEDIAN, Candidate, Load, PrefixBlocks

_WORD = 0xFFFFFFFFFFFFFFFF

# Arguments: candidates of a tier, and the sequence number of the request as the only source of variety.
Scorer = Callable[[Sequence[Candidate], int], Sequence[float]]


def tie_break(sequence: int, name: str) -> int:
    """A number equal in every process, with an order over names that differs for every sequence number.

    `hash` of text differs between processes, and CRC-32 alone is linear: of three names, the same would come first half
    of the time. Two odd multipliers (splitmix64's) spread the order to within chance.
    """
    mixed = (crc32(name.encode()) + sequence) * 0x9E3779B97F4A7C15 & _WORD
    return (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 & _WORD


TPOT_MISS = 3.0  # s of delay of the request per answer with a TPOT miss: an agent's whole TTFT budget
ENGINE_TIME = 0.3  # s of this request's delay per second of engine time
NEAR = 0.05  # of the least cost
PER_HIT = 1e-9  # s per cached token: less than any difference in cost, enough to order equals


def predicted(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Seconds: the least predicted TTFT, plus the price of the prompt to other requests.

    The median prediction holds everything that delays this request: queue, uncached tokens, the engine's pace. The cost
    to others is added: a prefill stalls each answer decoded in the same steps. With a perfect prediction alone a fleet
    met TTFT for 87 % of requests and was good for only 58 %, as answers in progress lost pace. So the expected number
    of TPOT misses (`policies.latency.tpot`) is priced at TPOT_MISS seconds each.

    Affinity has no price of its own: a hit is worth the seconds saved for this request, for the answers in progress,
    and ENGINE_TIME of the prefill for later requests. Without the last, siblings with a common prefix that arrive
    together are each computed on a different engine. More than 0.3 concentrates load too much: at 1 and 3 a saturated
    fleet lost 1 to 4 % of its good answers.

    Costs within NEAR of the least count as equal: predictions are not more exact, and a learned difference of a few
    percent would send every fresh prompt to the same of two equal engines. Among equals the longest hit is first, so a
    prefix stays on an endpoint.
    """
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


# A provider's cache saves more of the time and the price of a long prompt:
SIMILAR = 0.5  # of the least cost, or
SIMILAR_SECONDS = 0.1


def alike(costs: Sequence[float], candidates: Sequence[Candidate]) -> list[float]:
    """Costs, with every cost SIMILAR to the least, and every guess, replaced by the least."""
    least = min(costs)
    near = least + max(least * SIMILAR, SIMILAR_SECONDS)
    return [
        least if cost <= near or not candidate.forecast.trained else cost
        for cost, candidate in zip(costs, candidates, strict=True)
    ]


HASHED_TOKENS = 256  # of the prompt, for prefix_hash: the length of a system prompt; SGLang's default
LOAD_FACTOR = 1.25  # of the mean number of requests in flight, for prefix_hash
STICKY = 0.8  # cached share of the prompt, for token_load
PATIENCE = 18.0  # s of predicted TTFT: value of affinity to token_load


def round_robin(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Turns until the endpoint is next. Routes with a common pool interleave, as with a common counter."""
    n = len(candidates)
    return [float((rank - sequence) % n) for rank in range(n)]


def least_request(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Requests in flight, as Envoy's and nginx's least_conn; the engine's queue adds less than 1, to break ties.

    All endpoints are compared, not two at random (power of two choices): with exact counts and a single gateway the
    full comparison is the stronger baseline.
    """
    return [c.load.in_flight + c.load.waiting / (c.load.waiting + 1) for c in candidates]


def argmin_ttft(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Median predicted TTFT, s: prediction without the price of interference."""
    return [c.forecast.p50 for c in candidates]


def lmetric(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """New prefill tokens (uncached tokens of the prompt and queued tokens) times batch size: the LMETRIC rule."""
    return [(c.uncached + c.load.queued_tokens) * batch_size(c.load) for c in candidates]


def batch_size(load: Load) -> int:
    """Requests in the engine, the new request included. A scrape counts ours too, so the larger, not the sum."""
    return max(load.running + load.waiting, load.in_flight) + 1


def prefix_hash(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Rank by the hash of the prompt's beginning; endpoints at the load bound come last, as in SGLang's prefix_hash.

    Rendezvous hashing (Thaler and Ravishankar 1998): every endpoint draws a number from the hash of the prompt's first
    tokens and the endpoint's name, and the largest wins, so a removed endpoint moves only prompts held there. Bounded
    load (Mirrokni, Thorup and Zadimoghaddam 2016): at most LOAD_FACTOR times the mean.
    """
    n = len(candidates)
    key = prefix_key(candidates[0].blocks, sequence)
    bound = ceil(LOAD_FACTOR * (sum(c.load.in_flight for c in candidates) + 1) / n)
    order = sorted(range(n), key=lambda i: tie_break(key, candidates[i].endpoint.id), reverse=True)
    rank = {i: position for position, i in enumerate(order)}
    return [float(rank[i] + (n if c.load.in_flight >= bound else 0)) for i, c in enumerate(candidates)]


def prefix_key(blocks: PrefixBlocks, default: int) -> int:
    """Chained hash of the first HASHED_TOKENS, or of all full blocks of a shorter prompt; `default` without any."""
    count = min(max(HASHED_TOKENS // blocks.size, 1), len(blocks.hashes))
    return blocks.hashes[count - 1] if count else default


def token_load(candidates: Sequence[Candidate], sequence: int) -> list[float]:
    """Uncached prompt tokens in flight, the new prompt included: llm-d's token load with prefix affinity.

    Endpoints with at least STICKY of the prompt come first, unless the best is predicted to be more than PATIENCE
    slower than the best without.
    """
    tokens = [c.load.queued_tokens + c.uncached for c in candidates]
    sticky = [c.hit >= STICKY * c.prompt_tokens for c in candidates]
    if not any(sticky) or all(sticky) or _affinity_too_slow(candidates, sticky):
        return tokens
    behind = max(tokens) + 1
    return [count if kept else count + behind for count, kept in zip(tokens, sticky, strict=True)]


def _affinity_too_slow(candidates: Sequence[Candidate], sticky: Sequence[bool]) -> bool:
    best = {True: FOREVER, False: FOREVER}
    for candidate, kept in zip(candidates, sticky, strict=True):
        best[kept] = min(best[kept], candidate.forecast.p50)
    return best[True] - best[False] > PATIENCE


SCORERS: Mapping[ScorerName, Scorer] = {
    "predicted": predicted,
    "round_robin": round_robin,
    "least_request": least_request,
    "prefix_hash": prefix_hash,
    "lmetric": lmetric,
    "token_load": token_load,
    "argmin_ttft": argmin_ttft,
}
