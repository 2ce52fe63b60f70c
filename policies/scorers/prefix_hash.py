"""The endpoint that the prompt's beginning hashes to, unless it holds more than its share.

Rendezvous hashing (Thaler and Ravishankar 1998): every endpoint draws a number from the hash of
the prompt's first tokens and its own name, and the largest wins; so an endpoint that leaves moves
only its own prompts. Bounded load (Mirrokni, Thorup and Zadimoghaddam 2016): an endpoint that
would hold more than LOAD_FACTOR times the mean is passed over, as in SGLang's `prefix_hash`.
A prompt without a full block has no prefix to follow and is spread by the request's ordinal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from policies.scorers.scorer import CandidateInput, Context, tie_break
from policies.types import PrefixBlocks

PREFIX = 256  # tokens that decide: a system prompt's worth; SGLang's default
LOAD_FACTOR = 1.25  # of the mean number of requests in flight


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """The rank in the draw, plus the number of endpoints for those that are full."""
    n = len(prospects)
    draw = key(prospects[0].prompt.blocks, context.seed)
    bound = ceil(LOAD_FACTOR * (sum(p.load.in_flight for p in prospects) + 1) / n)
    order = sorted(range(n), key=lambda i: tie_break(draw, prospects[i].endpoint.id), reverse=True)
    rank = {i: position for position, i in enumerate(order)}
    return [float(rank[i] + (n if p.load.in_flight >= bound else 0)) for i, p in enumerate(prospects)]


def key(blocks: PrefixBlocks, otherwise: int) -> int:
    """The chained hash of the first PREFIX tokens, or of as many full blocks as there are."""
    count = min(max(PREFIX // blocks.size, 1), len(blocks.hashes))
    return blocks.hashes[count - 1] if count else otherwise
