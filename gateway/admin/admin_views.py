"""JSON views of a Decision, of an endpoint and of a Record: POST /explain, GET /fleet, GET /requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from gateway.admission.route_table import RoutedName
from gateway.api.inference_request import InferenceRequest
from gateway.bottleneck import engine_bottleneck, pool_bottleneck
from gateway.observe.part_notes import DIAGNOSIS
from gateway.observe.record import Record
from gateway.observe.record_columns import RECORD
from policies.fleet.beliefs import ALL, LIMITS, Belief
from policies.fleet.endpoint_state import EndpointStatistics
from policies.fleet.engine_load import EngineRates
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest
from policies.routing.reasons import reason_of, terms_of
from policies.types import (
    FOREVER,
    NEVER,
    Candidate,
    Completion,
    Decision,
    Health,
    Load,
    Pool,
    PromptEstimate,
    Rejection,
)

HALF_OPEN = "half_open"  # state of a circuit breaker
TOLD_BY_WHY = ("unknown_variants", "on_trial", "doubted", "wake_s", "kv_room")
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
    decision: Decision,
    estimate: PromptEstimate,
    held: Mapping[str, int],
    pools: Mapping[str, Pool],
    beliefs: Mapping[str, Sequence[Belief]],
    hold: Hold | None = None,
) -> dict[str, Any]:
    """All inputs and results of a decision. `held`: requests queued now, by route; `beliefs`: by endpoint;
    `uncached_tokens`: only where the TTFT budget grows with these; `hold`: what would hold the request in the queue.

    Each endpoint of each tier appears once: `candidates` in the order of attempts, the others under `rejected`.
    """
    asked = {each.id for pool in estimate.pools.keys() & pools.keys() for each in pools[pool].endpoints}
    left = None if decision.deadline == FOREVER else round((decision.deadline - decision.at) * 1e3, 2)
    return {
        "outcome": decision.outcome.value,
        "reason": decision.reason or _placed(decision),
        "scorer": decision.scorer,
        "budget_left_ms": left,
        "uncached_tokens": estimate.uncached_tokens or None,
        "retry_after_s": decision.retry_after or None,
        "prompt_tokens": {pool: found.tokens for pool, found in estimate.pools.items()},
        "expected_output_tokens": estimate.output_tokens,
        "held_now": dict(held),
        "held_by": None
        if hold is None
        else {"rule": str(hold.rule), "endpoint": hold.endpoint, "freed_by": hold.rule.freed_by},
        "candidates": [
            {
                "rank": rank,
                "chosen": candidate is decision.chosen,
                **_candidate(decision, candidate),
                **_completion(decision.completion(candidate)),
            }
            for rank, candidate in enumerate(decision.ranked, 1)
        ],
        "rejected": [
            {
                "pool": each.pool,
                "endpoint": endpoint,
                "tier": each.tier + 1,
                "kind": each.kind.value,
                "reason": each.reason,
            }
            for each in decision.rejected
            for endpoint in _rejected(each, pools)
        ],
        "believed": {
            endpoint: believed_view(found, decision.at) for endpoint, found in beliefs.items() if endpoint in asked
        },
    }


def _placed(decision: Decision) -> str:
    first = decision.ranked[0]
    return f"tier {first.tier + 1}: {reason_of(decision, first)}"


def left_out_view(request: InferenceRequest) -> dict[str, Any]:
    """Members that the request would lose, by pool."""
    return {"left_out": {pool: sorted(body.left_out) for pool, body in request.translated.items() if body.left_out}}


def named_view(asked: str, found: RoutedName) -> dict[str, Any]:
    """The route of the name that a caller has sent, and the alias, pattern or model of a pool that led there."""
    return {"asked": asked, "route": found.route.name, "via": found.via or None}


def believed_view(beliefs: Iterable[Belief], now: float) -> list[dict[str, Any]]:
    """Beliefs that keep requests away from an endpoint, by reason. `callers`: number affected, or "all"."""
    return [
        {
            "what": each.what,
            "why": each.why,
            "for_s": _seconds_until(each.until, now),
            "callers": "all" if each.callers == ALL else each.callers,
        }
        for each in beliefs
    ]


def holds_view(held: Iterable[QueuedRequest], now: float) -> dict[str, list[dict[str, Any]]]:
    """Queued requests by endpoint and hold rule."""
    since: dict[tuple[str, HoldRule], list[float]] = {}
    for queued in held:
        if (hold := queued.hold) is not None:
            since.setdefault((hold.endpoint, hold.rule), []).append(hold.since)
    view: dict[str, list[dict[str, Any]]] = {}
    for (endpoint, rule), times in since.items():
        longest = round(now - min(times), 3)
        found = {"rule": str(rule), "requests": len(times), "longest_s": longest, "freed_by": rule.freed_by}
        view.setdefault(endpoint, []).append(found)
    return view


def _candidate(decision: Decision, candidate: Candidate) -> dict[str, Any]:
    load, forecast = candidate.load, candidate.forecast
    return {
        "endpoint": candidate.endpoint.id,
        "pool": candidate.endpoint.pool,
        "tier": candidate.tier + 1,
        "region": candidate.endpoint.locality or None,
        "rtt_ms": round(candidate.rtt * 1e3, 3) or None,
        "ttft_p50_ms": round(forecast.p50 * 1e3, 2),
        "ttft_p90_ms": round(forecast.p90 * 1e3, 2),
        "tpot_ms": round(forecast.tpot * 1e3, 2),
        "chance": round(candidate.probability, 4),
        "prompt_tokens": candidate.prompt_tokens,
        "hit_tokens": candidate.hit,
        "hit_tokens_to_load": candidate.hit_tiers,
        "tokens_ahead": round(load.queued_tokens),
        "running": load.running,
        "waiting": load.waiting,
        "price_usd": candidate.price,
        "value": round(candidate.value, 4),
        "terms": {name: round(term, 4) for name, term in terms_of(decision, candidate).items()},
        "samples": forecast.samples,
        "reason": reason_of(decision, candidate),
    }


def _completion(found: Completion | None) -> dict[str, float | None]:
    """The whole answer; None where the route does not weigh it, or too little is known."""
    p50, p90 = (None, None) if found is None else (round(found.p50 * 1e3, 2), round(found.p90 * 1e3, 2))
    return {"total_p50_ms": p50, "total_p90_ms": p90}


def _rejected(rejection: Rejection, pools: Mapping[str, Pool]) -> list[str] | list[None]:
    """Ids of the endpoints: all of a pool rejected as a whole; None for a removed pool."""
    if rejection.endpoint:
        return [rejection.endpoint]
    return [endpoint.id for endpoint in pools[rejection.pool].endpoints] if rejection.pool in pools else [None]


def endpoint_view(endpoint: EndpointStatistics, now: float) -> dict[str, Any]:
    """Statistics of one endpoint; moments of the monotonic clock become seconds from now."""
    view: dict[str, Any] = msgspec.to_builtins(endpoint, enc_hook=repr)
    shown_endpoint = view["endpoint"]
    view["adapters"], shown_endpoint["region"] = view.pop("variants"), shown_endpoint.pop("locality")
    del view["until"], shown_endpoint["account"]
    load, limits = endpoint.load, view["load"].pop("limits")
    shown = {LOAD_NAMES.get(name, name): value for name, value in view["load"].items() if name not in TOLD_BY_WHY}
    return {
        **view,
        "load": {**shown, "blocked_until": limits["blocked_until"], "limits": limits["buckets"]},
        "why": _why(endpoint, now),
        "believed": believed_view(endpoint.believed, now),
        "tried_again_in_s": _seconds_until(endpoint.until, now) if load.health is Health.DOWN else None,
        "limited_for_s": _seconds_until(max((each.until for each in _limits(endpoint)), default=NEVER), now),
        "scraped_s_ago": _seconds_since(load.scraped_at, now),
        "heard_s_ago": _seconds_since(load.last_token_at, now),
    }


def bounds_view(
    loads: Mapping[str, Load], rates: Mapping[str, EngineRates], pool_of: Callable[[str], str]
) -> dict[str, dict[str, Any]]:
    """Bottleneck and rates of each engine with a load report, and the pool's bottleneck, by endpoint."""
    known = {name: (loads[name], rate.preemptions_per_s) for name, rate in rates.items() if name in loads}
    pools = defaultdict[str, list[tuple[Load, float | None]]](list)
    for name, engine in known.items():
        pools[pool_of(name)].append(engine)
    of_pools = {pool: pool_bottleneck(engines).value for pool, engines in pools.items()}
    return {
        name: {
            "bound": engine_bottleneck(*engine).value,
            "pool_bound": of_pools[pool_of(name)],
            "preemptions_per_s": rates[name].preemptions_per_s,
            "rejections_per_s": rates[name].rejections_per_s,
            "evictions_per_s": rates[name].evictions_per_s,
            "speculative_acceptance": rates[name].acceptance,
        }
        for name, engine in known.items()
    }


def _why(endpoint: EndpointStatistics, now: float) -> str | None:
    """Reasons for which the endpoint gets no requests, or fewer than its share."""
    reasons = [endpoint.why] if endpoint.why else []
    if endpoint.breaker == HALF_OPEN:
        reasons.append("one request at a time may try it")
    for each in _limits(endpoint):
        whom = "" if each.callers == ALL else f" for {each.callers} of the callers"
        reasons.append(f"{each.what} for {each.until - now:.1f} s more{whom}: {each.why}")
    if endpoint.load.warming:
        reasons.append("it is given its cache back")
    some = (each for each in endpoint.believed if each.callers != ALL and each.what not in LIMITS)
    reasons += [f"{each.what} for {each.callers} of the callers: {each.why}" for each in some]
    if lacking := [name for name, until in (endpoint.load.unknown_variants or {}).items() if until > now]:
        reasons.append(f"it does not know the model {', '.join(lacking)}")
    return "; ".join(reasons) or None


def _limits(endpoint: EndpointStatistics) -> list[Belief]:
    return [each for each in endpoint.believed if each.what in LIMITS]


def _seconds_until(moment: float, now: float) -> float | None:
    return round(moment - now, 3) if moment > now else None


def _seconds_since(moment: float, now: float) -> float | None:
    return None if moment == NEVER else round(now - moment, 3)


# -- endpoints of several workers ----------------------------------------------------------


def merge_endpoints(by_worker: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    views = defaultdict[str, dict[int, Mapping[str, Any]]](dict)
    for worker, entries in by_worker.items():
        for entry in entries:
            views[entry["endpoint"]["id"]][worker] = entry
    return [_merged_view(found) for found in views.values()]


def _merged_view(by_worker: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """An endpoint as seen by the worker with the most samples, its health in each, and what all believe and hold."""
    worker = max(by_worker, key=lambda number: by_worker[number]["samples"])
    views = by_worker.values()
    believed = {(each["what"], each["why"]): each for each in chain(*(view["believed"] for view in views))}
    held: dict[str, dict[str, Any]] = {}
    for each in chain(*(view["held"] for view in views)):
        before = held.get(each["rule"], {"requests": 0, "longest_s": 0.0})
        longest = max(before["longest_s"], each["longest_s"])
        held[each["rule"]] = {**each, "requests": before["requests"] + each["requests"], "longest_s": longest}
    return {
        **by_worker[worker],
        "worker": worker,
        "why": next((view["why"] for view in (by_worker[worker], *views) if view.get("why")), None),
        "limited_for_s": max((view["limited_for_s"] for view in views if view.get("limited_for_s")), default=None),
        "health_by_worker": {str(number): view["load"]["health"] for number, view in by_worker.items()},
        "believed": [*believed.values()],
        "held": [*held.values()],
    }


def request_view(record: Record) -> dict[str, Any]:
    """A Record in the answer of GET /requests: as in the access log, and `why` of a slow request."""
    view = RECORD.view(record)
    if (found := DIAGNOSIS.of(record)) is not None:
        view["why"] = found.as_json()
    return view
