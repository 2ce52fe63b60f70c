"""JSON views of a Decision (POST /explain, `firsttoken explain`) and of one endpoint (GET /fleet)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from policies.fleet.endpoint_state import EndpointStatistics
from policies.types import FOREVER, NEVER, Candidate, Decision, Health, Pool, PromptEstimate, Rejection

HALF_OPEN = "half_open"  # state of a circuit breaker
LOAD_NAMES = {  # public JSON names of renamed fields of `Load`
    "queued_tokens": "ahead",
    "backlog_s": "busy",
    "expected_tpot_misses": "harm",
    "tpot_pressure": "strain",
    "reopens_in": "closed",
    "prefill_utilization": "duty",
    "last_token_at": "heard_at",
}


def explain(
    decision: Decision, estimate: PromptEstimate, held: Mapping[str, int], pools: Mapping[str, Pool]
) -> dict[str, Any]:
    """All inputs and results of a decision. `held`: requests queued now, by route.

    Each endpoint of each tier appears once: `candidates` in the order of attempts, the others under `rejected`.
    """
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
        "rejected": [entry for rejection in decision.rejected for entry in _rejected(rejection, pools)],
    }


def _candidate(rank: int, candidate: Candidate, chosen: bool) -> dict[str, Any]:
    load, forecast = candidate.load, candidate.forecast
    return {
        "rank": rank,
        "chosen": chosen,
        "endpoint": candidate.endpoint.id,
        "pool": candidate.endpoint.pool,
        "tier": candidate.tier + 1,
        "ttft_p50_ms": round(forecast.p50 * 1e3, 2),
        "ttft_p90_ms": round(forecast.p90 * 1e3, 2),
        "tpot_ms": round(forecast.tpot * 1e3, 2),
        "chance": round(candidate.probability, 4),
        "prompt_tokens": candidate.prompt_tokens,
        "hit_tokens": candidate.hit,
        "tokens_ahead": round(load.queued_tokens),
        "running": load.running,
        "waiting": load.waiting,
        "price_usd": candidate.price,
        "score": candidate.score,
        "samples": forecast.samples,
        "reason": candidate.reason,
    }


def _rejected(rejection: Rejection, pools: Mapping[str, Pool]) -> Iterator[dict[str, Any]]:
    """An entry per endpoint, also for a pool rejected as a whole."""
    endpoints: list[str | None] = [rejection.endpoint or None]
    if not rejection.endpoint and rejection.pool in pools:
        endpoints = [endpoint.id for endpoint in pools[rejection.pool].endpoints]
    for endpoint in endpoints:
        yield {
            "pool": rejection.pool,
            "endpoint": endpoint,
            "tier": rejection.tier + 1,
            "reason": rejection.reason,
        }


def endpoint_view(endpoint: EndpointStatistics, now: float) -> dict[str, Any]:
    """Statistics of one endpoint; moments of the monotonic clock become seconds from now."""
    view: dict[str, Any] = msgspec.to_builtins(endpoint, enc_hook=repr)
    del view["until"]
    load = endpoint.load
    return {
        **view,
        "load": {LOAD_NAMES.get(name, name): value for name, value in view["load"].items()},
        "why": _why(endpoint, now),
        "tried_again_in_s": _seconds_until(endpoint.until, now) if load.health is Health.DOWN else None,
        "limited_for_s": _seconds_until(load.blocked_until, now),
        "scraped_s_ago": _seconds_since(load.scraped_at, now),
        "heard_s_ago": _seconds_since(load.last_token_at, now),
    }


def _why(endpoint: EndpointStatistics, now: float) -> str | None:
    """Reasons for which the endpoint gets no requests, or fewer than its share."""
    reasons = [endpoint.why] if endpoint.why else []
    if endpoint.breaker == HALF_OPEN:
        reasons.append("one request at a time may try it")
    if endpoint.load.blocked_until > now:
        reasons.append(f"its provider limits us for {endpoint.load.blocked_until - now:.1f} s more")
    if endpoint.load.warming:
        reasons.append("it is given its cache back")
    return "; ".join(reasons) or None


def _seconds_until(moment: float, now: float) -> float | None:
    return round(moment - now, 3) if moment > now else None


def _seconds_since(moment: float, now: float) -> float | None:
    return None if moment == NEVER else round(now - moment, 3)
