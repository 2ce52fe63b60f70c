"""New prefill tokens times batch size: the LMETRIC rule, which has no knob.

The tokens are those that must be computed before this prompt's first one: its own uncached, and
those sent there that have produced no token yet. The batch is what they would share steps with.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.scorers.scorer import CandidateInput, Context
from policies.types import Load


def score(prospects: Sequence[CandidateInput], context: Context) -> list[float]:
    """Tokens times requests."""
    return [(p.prompt.tokens - p.hit + p.load.queued_tokens) * batch(p.load) for p in prospects]


def batch(load: Load) -> int:
    """Requests in the engine, this one included. A scrape counts ours too, so the larger, not the sum."""
    return max(load.running + load.waiting, load.in_flight) + 1
