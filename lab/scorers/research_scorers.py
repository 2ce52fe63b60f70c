"""Research scorers: the rules of other routers and of papers, for comparisons in replays; and the table of a replay.

Rules:
- A baseline sees what its router sees: its own routing history (requests and tokens in flight, prompts sent and where)
  and scraped metrics. Where its source has a rougher signal, it is given the better one of this gateway: token counts
  for characters, counts that drain for counts that wait for a poll, a fleet's index for one tree.
- A choice among several steps of a source (filters, then scores) is one number: what a filter drops comes behind.
- Waiting is as in the sources read: all send at once. Two papers also move requests that wait (DualMap, within the
  pair; PolyServe, until an engine fits), which a scorer cannot do: here they send at once too.
- A configuration cannot name a research scorer: a replay hands REPLAY_SCORERS to the decision code.
- To add a scorer: a function here, and a name in RESEARCH_SCORERS.

Sources, as of November 2026: smg 1.13.0 (PyPI: its defaults and help texts; rules in smg-project/smg f8daa88, August),
llm-d/llm-d-router ebab687 (August), ai-dynamo/dynamo 03037af (`docs/components/router/router-concepts.md`), papers by
their arXiv numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from math import log

from policies.routes.route import Route
from policies.scorers.scorers import BEHIND, SCORERS, Scorer, chosen_first, tie_break, without_overloaded
from policies.types import FOREVER, Candidate, Load


def argmin_ttft(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Median predicted TTFT, s: prediction without the price of interference."""
    return [c.forecast.p50 for c in candidates]


# --------------------------------------------------------------------------- work


def lpwl(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Least prefill work left: pending prefill tokens, plus the uncached tokens of the prompt; then fewest requests.

    `leastwork` of gahow/agentic-kvc (commit d904632, May 2026): no parameter, as answers cost agents next to nothing.
    """
    return [c.load.queued_tokens + c.uncached + _below_one(batch_size(c.load)) for c in candidates]


def lmetric(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """New prefill tokens (uncached tokens of the prompt and queued tokens) times batch size.

    LMetric (arXiv:2603.15202). The batch counts the new request: else all idle engines are equal, whatever is cached.
    """
    return [(c.uncached + c.load.queued_tokens) * batch_size(c.load) for c in candidates]


def batch_size(load: Load) -> int:
    """Requests in the engine, the new request included. A scrape counts ours too, so the larger, not the sum."""
    return max(load.running + load.waiting, load.in_flight) + 1


def _below_one(count: float) -> float:
    """Ascending, from 0 and below 1: breaks ties of whole numbers."""
    return count / (count + 1)


# --------------------------------------------------------------------------- SMG, the successor of SGLang's router

MATCHED = 0.3  # share of the prompt, above which the holders of the longest match are preferred
SPILL_FACTOR, SPILL_MARGIN = 1.5, 64  # of the mean number of requests in flight, and requests above it
LEAST_MARGIN, DEVIATIONS = 4, 2.0  # cap of the margin: standard deviations of the count, and never less requests


def cache_aware(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """The holder of the longest match with the fewest requests, unless overloaded; else the fewest requests.

    smg 1.13.0, `--policy cache_aware` over HTTP with its defaults. Engines that queue, or whose KV cache is full, are
    left out while there are others. A holder is overloaded that has SPILL_FACTOR times the mean in flight, and
    SPILL_MARGIN requests more than the mean; the margin is at most the natural swing of such a count.
    """
    able = without_overloaded(candidates)
    counts = [c.load.in_flight for c in able]
    mean = sum(counts) / len(able)
    margin = min(SPILL_MARGIN, max(LEAST_MARGIN, DEVIATIONS * mean**0.5))
    longest = max(candidates, key=cached_share)
    holders = [c for c in able if c.hit == longest.hit] if cached_share(longest) > MATCHED else []
    least = min((c.load.in_flight for c in holders), default=FOREVER)
    keep = bool(holders) and not (least > mean * SPILL_FACTOR and least > mean + margin)
    return chosen_first(holders if keep else able, candidates)


DRAIN_RATE = 2_000.0  # tokens/s, where an engine reports no rate of its own, as vLLM does not over HTTP
KV_PRESSURE = 0.15  # s: weight of the share of the KV cache in use
FULLEST = 0.999  # share of the KV cache in use, beyond which it counts as this


def least_load(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Least expected wait, s: pending prompt tokens at DRAIN_RATE, and a price of the KV cache in use.

    smg 1.13.0, `--policy least_load` over HTTP with its defaults. The price is KV_PRESSURE times k / (1 - k), the
    queue of a server that is busy for a share k of the time: it grows without bound as the cache fills up.
    """
    return [c.load.queued_tokens / DRAIN_RATE + _kv_pressure(c.load) for c in candidates]


def _kv_pressure(load: Load) -> float:
    used = min(load.kv_usage, FULLEST)
    return KV_PRESSURE * used / (1 - used)


# --------------------------------------------------------------------------- Dynamo


def dynamo(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Prompt tokens to compute, and tokens that answers hold in the KV cache, the request included in both.

    Dynamo's linear cost with its defaults: `prefill_load_scale` and `overlap_score_credit` 1, no decay of the credit,
    temperature 0. Tokens for its blocks: all its terms have the same unit. The length of the answers so far counts,
    which the source leaves out by default. Its queue, from 16 full batches of prefill on every engine, plays no part.
    """
    return [c.load.queued_tokens + c.uncached + _kv_tokens(c.load) + c.prompt_tokens for c in candidates]


def _kv_tokens(load: Load) -> float:
    """Tokens of answers in progress, and of prompts without a first token."""
    return load.context + load.queued_tokens


# --------------------------------------------------------------------------- llm-d

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
STICKY = 0.8  # cached share of the prompt that makes an endpoint preferred
PATIENCE = 18.0  # s of predicted TTFT: value of affinity to token_load
STRICT, LOOSE = 0.99, 0.80  # cached shares of the two gates of predicted_chain
GATE_PATIENCE = 5.0  # s of predicted TTFT that these gates give away
EXPLORED = 100  # requests per exploration of an endpoint that would miss a budget
TTFT_WEIGHT, TPOT_WEIGHT = 0.8, 0.2
STEPS = 100  # of a weight


def weighted_chain(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Sum of three scores: the shortest queue, the emptiest KV cache, and the longest cached prefix.

    llm-d's default profile (`pkg/epp/config/loader/defaults.go`): `queue-scorer`, `kv-cache-utilization-scorer` and
    `prefix-cache-scorer`. The queue is scored between the longest and the shortest one. Requests sent since the last
    scrape are part of it; the source scrapes every 50 ms.
    """
    queues = [c.load.waiting for c in candidates]
    shortest, longest = min(queues), max(queues)
    spread = max(longest - shortest, 1)
    return [
        QUEUE_WEIGHT * (queue - shortest) / spread + KV_WEIGHT * c.load.kv_usage - PREFIX_WEIGHT * cached_share(c)
        for c, queue in zip(candidates, queues, strict=True)
    ]


def token_load(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Uncached prompt tokens in flight, the new prompt included: llm-d's token load with prefix affinity.

    Endpoints with at least STICKY of the prompt come first, unless the best is predicted to be more than PATIENCE
    slower than the best without (`prefix-cache-affinity-filter` with its defaults).
    """
    kept = {c.endpoint.id for c in _affine(candidates, STICKY, PATIENCE)}
    return [c.load.queued_tokens + c.uncached + (0.0 if c.endpoint.id in kept else BEHIND) for c in candidates]


def predicted_chain(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """llm-d's predicted-latency profile: strict affinity, budget tier, loose affinity, least headroom, weighted draw.

    Plugins and parameters of `config/charts/routerlib/templates/_config.yaml`, with `streamingMode`, so TPOT counts.
    Headroom is the budget minus the prediction. Endpoints with headroom in both come first, but for one request in
    EXPLORED; among them the least headroom weighs most. Without any: idle ones, else those that miss TPOT alone, else
    TTFT alone. The draw takes an endpoint in proportion to its weight (Efraimidis and Spirakis 2006).
    """
    budget = route.ttft_budget(None, min(c.uncached for c in candidates)) if route.ttft else 0.0
    room = {c.endpoint.id: _headroom(c, budget, route) for c in candidates}
    kept = _affine(candidates, STRICT, GATE_PATIENCE)
    kept = _affine(_budget_tier(kept, room, sequence), LOOSE, GATE_PATIENCE)
    weights = _weights(_least_missing(kept, room), room)
    return [-log(_draw(sequence, name)) / weights[name] if name in weights else BEHIND for name in room]


def cached_share(candidate: Candidate) -> float:
    """Share of the prompt's full blocks, or of a prompt without any."""
    blocks = candidate.blocks
    return candidate.hit / (len(blocks.hashes) * blocks.size * blocks.scale or max(candidate.prompt_tokens, 1))


def _affine(candidates: Sequence[Candidate], share: float, patience: float) -> Sequence[Candidate]:
    """Those with this share of the prompt, unless none has or they are too slow."""
    sticky = [c for c in candidates if cached_share(c) >= share]
    others = [c for c in candidates if cached_share(c) < share]
    if not sticky or not others:
        return candidates
    slower = min(c.forecast.p50 for c in sticky) - min(c.forecast.p50 for c in others)
    return candidates if slower > patience else sticky


Headroom = tuple[float, float]  # s of TTFT, and s per token


def _headroom(candidate: Candidate, ttft: float, route: Route) -> Headroom:
    """Below 0: missed, as without a budget; the order among endpoints is the same."""
    return ttft - candidate.forecast.p50, (route.tpot.budget if route.tpot else 0.0) - candidate.forecast.tpot


def _budget_tier(candidates: Sequence[Candidate], room: Mapping[str, Headroom], sequence: int) -> Sequence[Candidate]:
    making = [c for c in candidates if min(room[c.endpoint.id]) >= 0]
    missing = [c for c in candidates if min(room[c.endpoint.id]) < 0]
    explore = tie_break(sequence, "explore") % EXPLORED == 0
    return missing if missing and (explore or not making) else making


def _least_missing(candidates: Sequence[Candidate], room: Mapping[str, Headroom]) -> Sequence[Candidate]:
    """All candidates within the budgets; without any, idle candidates, or candidates with the least serious miss."""
    if min(room[candidates[0].endpoint.id]) >= 0:
        return candidates
    if idle := [c for c in candidates if not c.load.in_flight]:
        return idle
    kinds: dict[tuple[bool, bool], list[Candidate]] = {}
    for c in candidates:
        ttft, tpot = room[c.endpoint.id]
        kinds.setdefault((ttft < 0, tpot < 0), []).append(c)
    return kinds[min(kinds)]


def _weights(candidates: Sequence[Candidate], room: Mapping[str, Headroom]) -> dict[str, float]:
    """From 1 to STEPS + 1, the largest for the endpoint closest to its budgets. Equal in one, the other decides."""
    ttft = _scaled([abs(room[c.endpoint.id][0]) for c in candidates])
    tpot = _scaled([abs(room[c.endpoint.id][1]) for c in candidates])
    shares = (TTFT_WEIGHT, TPOT_WEIGHT) if ttft and tpot else (1.0, 1.0)
    away = [
        shares[0] * (ttft[i] if ttft else 0.0) + shares[1] * (tpot[i] if tpot else 0.0) for i in range(len(candidates))
    ]
    return {c.endpoint.id: int((1 - far) * STEPS) + 1.0 for c, far in zip(candidates, away, strict=True)}


def _scaled(values: Sequence[float]) -> list[float]:
    """From 0 to 1; empty: all are equal."""
    least, spread = min(values), max(values) - min(values)
    return [(value - least) / spread for value in values] if spread > 1e-9 else []


def _draw(sequence: int, name: str) -> float:
    """Uniform in (0, 1)."""
    return (tie_break(sequence, name) + 0.5) / 2**64


# --------------------------------------------------------------------------- papers

IN_TIME = 0.5  # probability: the median prediction makes the budget
HELD_BY = 3  # endpoints, from which a prefix is common: more than the two that a key maps to


def dualmap(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """Of two endpoints by two hashes of the prefix: the longer hit while in time, else the less loaded.

    DualMap (arXiv:2602.06502, ICLR 2026): two candidates keep a prefix together, and the better of two evens the load.
    Load is the predicted TTFT, so that a slow engine counts as such. The paper's key adapts to prefixes that are common
    to too many requests; here it begins behind what HELD_BY endpoints hold, and gets longer while both candidates
    are late. Without the paper's second step, that moves requests which wait from one candidate to the other.
    """
    pair = _pair(candidates, sequence)
    first = max(pair, key=lambda c: (c.hit, -c.forecast.p50))
    if first.probability < IN_TIME:
        first = min(pair, key=lambda c: c.forecast.p50)
    order = {c.endpoint.id: 1 for c in pair} | {first.endpoint.id: 0}
    return [c.forecast.p50 + BEHIND * order.get(c.endpoint.id, 2) for c in candidates]


def _pair(candidates: Sequence[Candidate], sequence: int) -> Sequence[Candidate]:
    """The two endpoints of the shortest key with one in time, or of the shortest."""
    pairs = []
    for key in _keys(candidates, sequence):
        pairs.append(nlargest(2, candidates, key=lambda c: tie_break(key, c.endpoint.id)))
        if max(c.probability for c in pairs[-1]) >= IN_TIME:
            return pairs[-1]
    return pairs[0]


def _keys(candidates: Sequence[Candidate], sequence: int) -> Iterator[int]:
    """Hashes of longer and longer prefixes, from the first block that is not common."""
    hashes, common = candidates[0].blocks.hashes, _common_blocks(candidates)
    yield hashes[min(common, len(hashes) - 1)] if hashes else sequence
    more = 1
    while common + more < len(hashes):
        yield hashes[common + more]
        more *= 2


def _common_blocks(candidates: Sequence[Candidate]) -> int:
    """Leading blocks of the prompt that HELD_BY endpoints hold."""
    hits, blocks = sorted((c.hit for c in candidates), reverse=True), candidates[0].blocks
    return int(hits[HELD_BY - 1] / (blocks.size * blocks.scale)) if len(hits) >= HELD_BY else 0


def polyserve(candidates: Sequence[Candidate], sequence: int, route: Route) -> list[float]:
    """The fullest endpoint at which the request still makes its budgets; the fastest, where there is none.

    PolyServe (arXiv:2507.17769): the highest load that is still attainable makes a gradient, whose empty end can be
    scaled down. In time by the median prediction; TPOT by the present pace, and by the stall that answers in progress
    can bear. Its groups of servers by TPOT are the pools of the routes.
    """
    tpot = route.tpot.budget if route.tpot else FOREVER
    fits = [c.probability >= IN_TIME and c.forecast.tpot <= tpot and not c.load.reopens_in for c in candidates]
    return [-batch_size(c.load) if fit else BEHIND + c.forecast.p50 for c, fit in zip(candidates, fits, strict=True)]


RESEARCH_SCORERS: Mapping[str, Scorer] = {
    "cache_aware": cache_aware,
    "least_load": least_load,
    "dynamo": dynamo,
    "weighted_chain": weighted_chain,
    "lpwl": lpwl,
    "lmetric": lmetric,
    "token_load": token_load,
    "predicted_chain": predicted_chain,
    "dualmap": dualmap,
    "polyserve": polyserve,
    "argmin_ttft": argmin_ttft,
}
REPLAY_SCORERS: Mapping[str, Scorer] = {**SCORERS, **RESEARCH_SCORERS}
