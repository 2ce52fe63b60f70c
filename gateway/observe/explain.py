"""A Decision in words and milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.facts import FOREVER, Candidate, Decision, PromptEstimate, Rejection


def explain(decision: Decision, estimate: PromptEstimate, held: Mapping[str, int]) -> dict[str, Any]:
    """Everything that the decision weighed, ready for JSON. `held`: requests held back now, by route."""
    left = None if decision.deadline == FOREVER else round((decision.deadline - decision.at) * 1e3, 2)
    return {
        "outcome": decision.outcome.value,
        "reason": decision.reason,
        "scorer": decision.scorer,
        "budget_left_ms": left,
        "retry_after_s": decision.retry_after or None,
        "prompt_tokens": {pool: found.tokens for pool, found in estimate.pools.items()},
        "expected_output_tokens": estimate.output_tokens,
        "held_now": dict(held),
        "candidates": [_candidate(rank, candidate) for rank, candidate in enumerate(decision.ranked, 1)],
        "rejected": [_rejection(rejection) for rejection in decision.rejected],
    }


def _candidate(rank: int, candidate: Candidate) -> dict[str, Any]:
    return {
        "rank": rank,
        "endpoint": candidate.endpoint.id,
        "tier": candidate.tier + 1,
        "ttft_p50_ms": round(candidate.forecast.p50 * 1e3, 2),
        "ttft_p90_ms": round(candidate.forecast.p90 * 1e3, 2),
        "tpot_ms": round(candidate.forecast.tpot * 1e3, 2),
        "chance": round(candidate.chance, 4),
        "prompt_tokens": candidate.prompt_tokens,
        "hit_tokens": candidate.hit,
        "price_usd": candidate.price,
        "score": candidate.score,
        "samples": candidate.forecast.samples,
        "reason": candidate.reason,
    }


def _rejection(rejection: Rejection) -> dict[str, Any]:
    return {
        "pool": rejection.pool,
        "endpoint": rejection.endpoint or None,
        "tier": rejection.tier + 1,
        "reason": rejection.reason,
    }
