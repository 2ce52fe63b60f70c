"""Scorers: pure functions from the endpoints of a tier to numbers, smaller is better.

Rules:
- The endpoints are of one pool: prompt tokens and prices are the same for all.
- A scorer returns a finite float per candidate, in the same order, in a unit of the scorer's own.
- No scorer breaks ties: `policies.routing.ranking` spreads equal scores over the endpoints by `tie_break`.
- The default, `predicted`, is no scorer: it goes by value (`policies.routing.ranking`). The rules of other load
  balancers are here: a route with one of them takes the first tier whole.
- To add a scorer: a function here, a name in SCORERS and in `policies.routes.route.ScorerName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from policies.routes.route import Route
from policies.types import Candidate, PrefixBlocks

# Arguments: candidates of a tier, the sequence number of the request as the only source of variety, and its route.
Scorer = Callable[[Sequence[Candidate], int, Route], Sequence[float]]

BEHIND = 1e9  # above any score of a load balancer: what its filters drop is for failover only
_WORD = 0xFFFFFFFFFFFFFFFF


def tie_break(sequence: int, name: str) -> int:
    """A number equal in every process, with an order over names that differs for every sequence number.

    `hash` of text differs between processes, and CRC-32 alone is linear: of three names, the same would come first half
    of the time. Two odd multipliers (splitmix64's) spread the order to within chance.
    """
    return draw(crc32(name.encode()) + sequence)


def draw(number: int) -> int:
    """A number that looks random beside those of other numbers."""
    mixed = number * 0x9E3779B97F4A7C15 & _WORD
    return (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 & _WORD


def round_robin(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Turns until the endpoint is next. Routes with a common pool interleave, as with a common counter."""
    n = len(candidates)
    return [float((rank - sequence) % n) for rank in range(n)]


def least_request(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Requests in flight, as Envoy's and nginx's least_conn; the engine's queue adds less than 1, to break ties.

    All endpoints are compared, not two at random (power of two choices): with exact counts and a single gateway the
    full comparison is the stronger baseline.
    """
    return [c.load.in_flight + c.load.waiting / (c.load.waiting + 1) for c in candidates]


# --------------------------------------------------------------------------- prefix hash of SMG

OVERLOAD_WAITING, OVERLOAD_KV = 8, 0.8  # requests in the engine's queue, and share of its KV cache in use
HASHED_TOKENS = 256  # of the prompt, for prefix_hash: the length of a system prompt
HASH_FACTOR, HASH_MARGIN = 1.25, 10  # of the mean number of requests in flight, and requests above it


def prefix_hash(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """The home of the prompt's first HASHED_TOKENS, unless overloaded; else the fewest requests.

    smg 1.13.0, `--policy prefix_hash` with its defaults: overloaded above HASH_FACTOR times the mean in flight and
    above HASH_MARGIN requests more. Homes by rendezvous hashing (Thaler and Ravishankar 1998) in place of a ring: both
    move only the prompts of a removed endpoint, and rendezvous spreads few endpoints more evenly.
    """
    able = without_overloaded(candidates)
    key = _prefix_key(candidates[0].blocks)
    if key is None:
        return chosen_first(able, candidates)
    mean = (sum(c.load.in_flight for c in able) + 1) / len(able)
    home = max(able, key=lambda c: tie_break(key, c.endpoint.id))
    overloaded = home.load.in_flight > max(HASH_FACTOR * mean, mean + HASH_MARGIN)
    return chosen_first(able if overloaded else [home], candidates)


def _prefix_key(blocks: PrefixBlocks) -> int | None:
    """Chained hash of the first HASHED_TOKENS, or of all full blocks of a shorter prompt; None without any."""
    count = min(max(HASHED_TOKENS // blocks.size, 1), len(blocks.hashes))
    return blocks.hashes[count - 1] if count else None


def without_overloaded(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leaves out the engines that are overloaded by themselves, where there are others."""
    able = [c for c in candidates if c.load.waiting < OVERLOAD_WAITING and c.load.kv_usage < OVERLOAD_KV]
    return able or candidates


def chosen_first(chosen: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[float]:
    """Ranks by requests in flight, the chosen before all others."""
    first = {c.endpoint.id for c in chosen}
    return [c.load.in_flight + (0.0 if c.endpoint.id in first else BEHIND) for c in candidates]


SCORERS: Mapping[str, Scorer] = {
    "round_robin": round_robin,
    "least_request": least_request,
    "prefix_hash": prefix_hash,
}
