"""A Decision in words and milliseconds.

Every endpoint of every tier is said once per tier: `candidates` in the order in which they would be tried, the others
under `rejected`. All numbers are those that were decided on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from policies.types import FOREVER, Candidate, Decision, Pool, PromptEstimate, Rejection


def explain(
    decision: Decision, estimate: PromptEstimate, held: Mapping[str, int], pools: Mapping[str, Pool]
) -> dict[str, Any]:
    """Everything that the decision weighed, ready for JSON. `held`: requests held back now, by route."""
    left = None if decision.deadline == FOREVER else round((decision.deadline - decision.at) * 1e3, 2)
    chosen = decision.chosen
    return {
        "outcome": decision.outcome.value,
        "reason": decision.reason,
        "scorer": decision.scorer,
        "budget_left_ms": left,
        "retry_after_s": decision.retry_after or None,
        "prompt_tokens": {pool: found.tokens for pool, found in estimate.pools.items()},
        "expected_output_tokens": estimate.output_tokens,
        "held_now": dict(held),
        "candidates": [_candidate(rank, each, each is chosen) for rank, each in enumerate(decision.ranked, 1)],
        "rejected": [said for rejection in decision.rejected for said in _rejected(rejection, pools)],
    }


def _candidate(rank: int, candidate: Candidate, chosen: bool) -> dict[str, Any]:
    load = candidate.load
    return {
        "rank": rank,
        "chosen": chosen,
        "endpoint": candidate.endpoint.id,
        "pool": candidate.endpoint.pool,
        "tier": candidate.tier + 1,
        "ttft_p50_ms": round(candidate.forecast.p50 * 1e3, 2),
        "ttft_p90_ms": round(candidate.forecast.p90 * 1e3, 2),
        "tpot_ms": round(candidate.forecast.tpot * 1e3, 2),
        "chance": round(candidate.probability, 4),
        "prompt_tokens": candidate.prompt_tokens,
        "hit_tokens": candidate.hit,
        "tokens_ahead": round(load.queued_tokens),
        "running": load.running,
        "waiting": load.waiting,
        "price_usd": candidate.price,
        "score": candidate.score,
        "samples": candidate.forecast.samples,
        "reason": candidate.reason,
    }


def _rejected(rejection: Rejection, pools: Mapping[str, Pool]) -> Iterator[dict[str, Any]]:
    """A pool that is out as a whole is said endpoint by endpoint."""
    said = {"pool": rejection.pool, "endpoint": rejection.endpoint or None, "tier": rejection.tier + 1}
    pool = pools.get(rejection.pool)
    names = [endpoint.id for endpoint in pool.endpoints] if pool is not None and not rejection.endpoint else [None]
    for name in names:
        yield {**said, "endpoint": name or said["endpoint"], "reason": rejection.reason}
