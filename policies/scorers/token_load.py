"""llm-d's token load: stay with endpoints that hold the prefix, then the fewest uncached tokens in flight.

Endpoints that hold at least STICKY of the prompt are kept to themselves, unless the best of them
is predicted to be more than PATIENCE slower than the best of the others. Among those kept, the
fewest uncached prompt tokens in flight, this prompt's own included.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.scorers.scorer import CandidateInput, Context

STICKY = 0.8  # share of the prompt that is cached
PATIENCE = 18.0  # s of predicted TTFT that affinity is worth


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Tokens in flight; all those kept come before all others."""
    tokens = [p.load.queued_tokens + p.prompt.tokens - p.hit for p in prospects]
    sticky = [p.hit >= STICKY * p.prompt.tokens for p in prospects]
    if not any(sticky) or all(sticky) or too_slow(prospects, sticky):
        return tokens
    behind = max(tokens) + 1
    return [count if held else count + behind for count, held in zip(tokens, sticky, strict=True)]


def too_slow(prospects: Sequence[CandidateInput], sticky: Sequence[bool]) -> bool:
    """Whether affinity would cost more than PATIENCE."""
    best = {True: float("inf"), False: float("inf")}
    for p, held in zip(prospects, sticky, strict=True):
        best[held] = min(best[held], p.p50)
    return best[True] - best[False] > PATIENCE
