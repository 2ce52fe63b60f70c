"""Baseline scorers: the rules of other routers, to compare `predicted` with.

Each returns one float per candidate, smaller is better; see `policies.scorers.scorer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from policies.scorers.scorer import CandidateInput, tie_break
from policies.types import FOREVER, Load, PrefixBlocks

HASHED_TOKENS = 256  # of the prompt, for prefix_hash: the length of a system prompt; SGLang's default
LOAD_FACTOR = 1.25  # of the mean number of requests in flight, for prefix_hash
STICKY = 0.8  # cached share of the prompt, for token_load
PATIENCE = 18.0  # s of predicted TTFT that affinity is worth to token_load


def round_robin(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Turns until the endpoint's own. Routes that share a pool interleave, as with one counter."""
    n = len(candidates)
    return [float((rank - sequence) % n) for rank in range(n)]


def least_request(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Requests in flight, as Envoy's and nginx's least_conn; the engine's queue adds less than one, to break ties.

    All endpoints are compared, not two at random (power of two choices): with exact counts and one gateway the full
    comparison is the stronger baseline.
    """
    return [c.load.in_flight + c.load.waiting / (c.load.waiting + 1) for c in candidates]


def argmin_ttft(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Median predicted TTFT, s: prediction without the price of interference."""
    return [c.forecast.p50 for c in candidates]


def lmetric(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """New prefill tokens (this prompt's uncached ones and those queued there) times batch size: the LMETRIC rule."""
    return [(c.prompt.tokens - c.hit + c.load.queued_tokens) * batch_size(c.load) for c in candidates]


def batch_size(load: Load) -> int:
    """Requests in the engine, this one included. A scrape counts ours too, so the larger, not the sum."""
    return max(load.running + load.waiting, load.in_flight) + 1


def prefix_hash(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Rank by the hash of the prompt's beginning; endpoints at their load bound come last, as in SGLang's prefix_hash.

    Rendezvous hashing (Thaler and Ravishankar 1998): every endpoint draws a number from the hash of the prompt's first
    tokens and its own name, and the largest wins, so a removed endpoint moves only its own prompts. Bounded load
    (Mirrokni, Thorup and Zadimoghaddam 2016): at most LOAD_FACTOR times the mean.
    """
    n = len(candidates)
    key = prefix_key(candidates[0].prompt.blocks, sequence)
    bound = ceil(LOAD_FACTOR * (sum(c.load.in_flight for c in candidates) + 1) / n)
    order = sorted(range(n), key=lambda i: tie_break(key, candidates[i].endpoint.id), reverse=True)
    rank = {i: position for position, i in enumerate(order)}
    return [float(rank[i] + (n if c.load.in_flight >= bound else 0)) for i, c in enumerate(candidates)]


def prefix_key(blocks: PrefixBlocks, default: int) -> int:
    """Chained hash of the first HASHED_TOKENS, or of all full blocks of a shorter prompt; `default` without any."""
    count = min(max(HASHED_TOKENS // blocks.size, 1), len(blocks.hashes))
    return blocks.hashes[count - 1] if count else default


def token_load(candidates: Sequence[CandidateInput], sequence: int) -> list[float]:
    """Uncached prompt tokens in flight, this prompt's included: llm-d's token load with prefix affinity.

    Endpoints that hold at least STICKY of the prompt come before all others, unless the best of them is predicted to
    be more than PATIENCE slower than the best of the others.
    """
    tokens = [c.load.queued_tokens + c.prompt.tokens - c.hit for c in candidates]
    sticky = [c.hit >= STICKY * c.prompt.tokens for c in candidates]
    if not any(sticky) or all(sticky) or _affinity_too_slow(candidates, sticky):
        return tokens
    behind = max(tokens) + 1
    return [count if kept else count + behind for count, kept in zip(tokens, sticky, strict=True)]


def _affinity_too_slow(candidates: Sequence[CandidateInput], sticky: Sequence[bool]) -> bool:
    best = {True: FOREVER, False: FOREVER}
    for candidate, kept in zip(candidates, sticky, strict=True):
        best[kept] = min(best[kept], candidate.forecast.p50)
    return best[True] - best[False] > PATIENCE
