"""Reasons for which a request waited, in the gateway's queue or in the engine's: who was served before it.

`culprit` is the endpoint, pool or caller that a slow or failed request is laid to, where its evidence names no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from policies.diagnosis.causes import Cause, CauseFound
from policies.diagnosis.facts import Neighbour, RequestFacts, ms
from policies.diagnosis.usual import Usual

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


DOMINANT = 0.6  # share of the tokens before a request from which one caller is the reason
LARGE = 3.0  # times the usual prompt
FULL = 0.95  # of the KV cache
RATE_LIMIT = "rate_limit"  # rule of the queue, and stage


def queue_cause(facts: RequestFacts, usual: Usual) -> CauseFound:
    """Of time in the gateway's own queue."""
    rule, held = max(facts.held.items(), key=lambda found: found[1], default=("", 0.0))
    if rule == RATE_LIMIT:
        return rate_limit_cause(facts)
    waited = facts.stages.get("queue", 0.0)
    told = f"{ms(waited)} in the gateway's queue" + (f", {ms(held)} of it by the rule `{rule}`" if rule else "")
    if not rule and facts.forecast is not None:
        told = f"refused at once, with a forecast of {ms(facts.forecast)} at best"
    ahead = [each for each in facts.neighbours if each.prefill]
    noisy = noisy_neighbour(facts, ahead, usual)
    if noisy is not None:
        return replace(noisy, evidence=f"{told}; {noisy.evidence}")
    return CauseFound(Cause.QUEUED, f"{told}, behind {behind(ahead)}", own=_own_work(facts, ahead))


def rate_limit_cause(facts: RequestFacts) -> CauseFound:
    waited = facts.stages.get(RATE_LIMIT, 0.0)
    refused = next((lost.endpoint for lost in facts.attempts if lost.status == 429), "")
    told = f"{ms(waited)} held back by a rate limit" if waited else "refused: every endpoint is held by a rate limit"
    return CauseFound(Cause.RATE_LIMIT, told + (f"; {refused} answered 429" if refused else ""), refused)


def engine_wait_cause(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """Of time in the engine's queue; None: nobody is known to have been there. An API has no queue that is known."""
    if not facts.local:
        return None
    queue = facts.engine.queue
    told = "" if queue is None else f"{ms(queue)} in the engine's queue; "
    if facts.engine.kv_usage >= FULL:
        return CauseFound(Cause.KV_FULL, f"{told}its KV cache was {facts.engine.kv_usage:.0%} full at the decision")
    ahead = [each for each in facts.neighbours if each.prefill]
    if (noisy := noisy_neighbour(facts, ahead, usual)) is not None:
        return replace(noisy, evidence=told + noisy.evidence)
    if ahead:
        evidence = f"{told}at {facts.endpoint} behind {behind(ahead)}"
        return CauseFound(Cause.QUEUED, evidence, own=_own_work(facts, ahead))
    if facts.engine.waiting:
        return CauseFound(Cause.QUEUED, f"{told}{facts.engine.waiting} requests of other traffic waited in the engine")
    return None


def noisy_neighbour(facts: RequestFacts, others: Iterable[Neighbour], usual: Usual) -> CauseFound | None:
    """One other caller whose prompts are most of the work there, and large beside the usual."""
    tenant, tokens, total = _busiest(others)
    if tenant == facts.tenant or tokens < DOMINANT * total or tokens < LARGE * max(usual.computed.p50, 1.0):
        return None
    told = f"the caller {tenant} had {tokens:,} of the {total:,} prompt tokens computed at {facts.endpoint} meanwhile"
    return CauseFound(Cause.NOISY_NEIGHBOUR, told, of_caller(tenant))


def _own_work(facts: RequestFacts, ahead: Iterable[Neighbour]) -> bool:
    """True if most of the work before this request is of its own caller."""
    tenant, tokens, total = _busiest(ahead)
    return tokens > 0 and tenant == facts.tenant and tokens >= DOMINANT * total


def _busiest(others: Iterable[Neighbour]) -> tuple[str, int, int]:
    """The caller with most prompt tokens to compute, its tokens, and those of all callers."""
    by_tenant: dict[str, int] = defaultdict(int)
    for each in others:
        by_tenant[each.tenant] += each.computed
    tenant, tokens = max(by_tenant.items(), key=lambda found: found[1], default=("", 0))
    return tenant, tokens, sum(by_tenant.values())


def behind(ahead: Sequence[Neighbour]) -> str:
    """The requests before this one, in words."""
    if not ahead:
        return "requests whose answers were in progress"
    tokens = sum(each.computed for each in ahead)
    return f"{len(ahead)} {'request' if len(ahead) == 1 else 'requests'} with {tokens:,} prompt tokens to compute"
