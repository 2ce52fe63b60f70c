"""POST /quote/v1/...: what a request would get now: its TTFT by tier, its price, and whether its budget can be met.

The body, the headers and the key are those of the request, which is read like any other and goes no further than the
queue's decision: nothing is sent, no tokens are reserved, and no prompt waits to be counted. Names of pools are shown,
as in the headers of an answer; endpoints and other callers' requests are not. What a prompt has cached is looked up in
the caller's own cache group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from backends.interface import Operation
from gateway.admission.auth import Tenant
from gateway.api.paths import QUOTE
from gateway.downstream.http_request import HttpRequest
from gateway.request_reader import STATEFUL, RequestReader
from gateway.scheduler import RequestQueue
from gateway.strict_json import encode
from policies.queue.queued_request import QueuedRequest
from policies.queue.quotes import RequestQuote, TierQuote
from policies.types import FOREVER, Placement

_QUOTED = (Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES, Operation.MESSAGES)  # those with a first token
QUOTED: Mapping[str, Operation] = {QUOTE + operation.value: operation for operation in _QUOTED}
NO_ENDPOINT = (Placement.UNAVAILABLE, Placement.RATE_LIMITED)


async def quote_reply(
    reader: RequestReader, queue: RequestQueue, http: HttpRequest, tenant: Tenant, request_id: str
) -> bytes:
    """Raises ApiError for a request that is refused before the queue."""
    runtime = reader.runtime.current
    request = await reader.parse(http, QUOTED[http.path], request_id, runtime)
    route = reader.named_route(http, request, runtime, tenant).route
    request = await reader.decider.repaired(http, request, route) if route.repair else request
    request.caller = reader.caller(http, tenant)
    if request.operation in STATEFUL:
        await reader.open_state(request, runtime, route, tenant)
    estimate = await reader.estimate(http, request, runtime, route, tenant, is_sent=False)
    queued = queue.queued(request, route, estimate, tenant)
    quote = queue.quote(queued)
    if quote.chosen is None and runtime is not reader.runtime.current:  # a reload has removed its endpoints
        return await quote_reply(reader, queue, http, tenant, request_id)
    return encode({"object": "quote", "model": request.model, **quote_view(queued, quote)})


def quote_view(queued: QueuedRequest, quote: RequestQuote) -> dict[str, Any]:
    """A quote in milliseconds from the arrival of the request; tiers are counted from 1."""
    decision = quote.decision
    budget = queued.route.ttft_budget(queued.request.ttft_budget, queued.estimate.uncached_tokens)
    is_met = None if queued.deadline == FOREVER else quote.chance >= queued.route.target
    waited = decision.at - queued.request.arrival
    return {
        "route": queued.route.name,
        "outcome": decision.outcome.value,
        "reason": decision.reason if quote.chosen is None else None,
        "ttft_budget_ms": None if budget == FOREVER else round(budget * 1e3, 2),
        "budget_met": is_met,
        "again_in_s": _again_in(quote, bool(is_met)),
        **(_NONE if quote.chosen is None else _tier_view(quote.chosen, queued, waited)),
        "expected_output_tokens": queued.estimate.output_tokens,
        "tiers": sorted(
            [*(_tier_view(each, queued, waited) for each in quote.tiers), *_closed_tiers(quote)],
            key=itemgetter("tier"),
        ),
    }


def _again_in(quote: RequestQuote, is_met: bool) -> float | None:
    """Seconds until the whole budget can be made; None: no budget, or never for a prompt of this length."""
    decision = quote.decision
    if is_met:
        return 0.0
    if decision.outcome in NO_ENDPOINT:
        return round(decision.retry_after, 3)
    return None if quote.again_in is None else round(max(quote.again_in, decision.retry_after), 3)


def _tier_view(found: TierQuote, queued: QueuedRequest, waited: float) -> dict[str, Any]:
    candidate, quote = found.candidate, found.quote
    return {
        "tier": candidate.tier + 1,
        "pool": candidate.endpoint.pool,
        "ttft_p50_ms": _in_ms(quote.p50, waited),
        "ttft_p90_ms": _in_ms(quote.p90, waited),
        "chance": round(found.chance(queued, quote.at), 4),
        "held_by": None if found.rule is None else found.rule.value,
        "prompt_tokens": candidate.prompt_tokens,
        "cached_tokens": candidate.hit,
        "price_usd": candidate.price,
    }


_NONE = dict.fromkeys(
    ("tier", "pool", "ttft_p50_ms", "ttft_p90_ms", "chance", "held_by", "prompt_tokens", "cached_tokens", "price_usd")
)


def _closed_tiers(quote: RequestQuote) -> Iterator[dict[str, Any]]:
    """Tiers without an endpoint that could take the request, each with the first reason."""
    seen = {each.candidate.tier for each in quote.tiers}
    for rejection in quote.decision.rejected:
        if rejection.tier not in seen:
            seen.add(rejection.tier)
            yield {**_NONE, "tier": rejection.tier + 1, "pool": rejection.pool, "reason": rejection.reason}


def _in_ms(seconds: float | None, waited: float) -> float | None:
    return None if seconds is None else round((seconds + waited) * 1e3, 1)
