"""The endpoint, pool or caller that a slow or failed request is laid to, where its evidence names no other."""

from __future__ import annotations

from policies.diagnosis.causes import Cause, CauseFound
from policies.diagnosis.facts import RequestFacts

CALLERS = frozenset({Cause.CACHE_BROKEN, Cause.LONG_PROMPT, Cause.MODEL_THINKS, Cause.CALLER_SLOW})
ENDPOINTS = frozenset(
    {
        Cause.COLD_CACHE,
        Cause.EVICTED_SESSION,
        Cause.KV_FULL,
        Cause.DECODE_BOUND,
        Cause.CONNECTION,
        Cause.ENDPOINT_FAILED,
    }
)
POOLS = frozenset({Cause.QUEUED, Cause.RATE_LIMIT})
NOBODY = ("", "-")


def culprit(found: CauseFound, facts: RequestFacts) -> str:
    """Empty: nobody is named."""
    if found.culprit:
        return found.culprit
    if found.cause in CALLERS:
        return of_caller(facts.tenant)
    if found.cause is Cause.SLOW_REGION:
        return f"region {facts.region}"
    if found.cause is Cause.GATEWAY_STALLED:
        return "the gateway"
    named = facts.endpoint if found.cause in ENDPOINTS else ""
    if named in NOBODY and found.cause in ENDPOINTS | POOLS:
        named = facts.pool
    return "" if named in NOBODY else named


def own_work_of(found: CauseFound, facts: RequestFacts) -> str:
    """The caller, where its own work or prompt is the reason; empty otherwise."""
    return of_caller(facts.tenant) if found.own or found.cause in CALLERS else ""


def of_caller(tenant: str) -> str:
    """The name of a caller among those of endpoints and pools; empty: callers have no keys."""
    return "" if tenant in NOBODY else f"caller {tenant}"
