"""JSON views of a Decision, of an endpoint and of recent requests: POST /explain, GET /fleet, GET /requests.

Rules for the query of GET /requests:
- Unknown filters and values are refused with the known ones: an empty answer to a misspelt name would be misleading.
- Of all matches the latest `last` remain; `slowest` keeps those streams with the longest wait for a first token.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any
from urllib.parse import urlencode

import msgspec

from gateway.admission.route_table import RoutedName
from gateway.api.api_error import bad_request
from gateway.config.config_errors import did_you_mean
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.timeline import RECENT
from policies.diagnosis.slow_counts import KEPT
from policies.fleet.beliefs import ALL, Belief
from policies.fleet.endpoint_state import EndpointStatistics
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest
from policies.types import FOREVER, NEVER, Candidate, Decision, Health, Pool, PromptEstimate, Rejection

HALF_OPEN = "half_open"  # state of a circuit breaker
TOLD_BY_WHY = ("unknown_adapters", "on_trial")
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
        "reason": decision.reason,
        "scorer": decision.scorer,
        "budget_left_ms": left,
        "uncached_tokens": estimate.uncached_tokens or None,
        "retry_after_s": decision.retry_after or None,
        "prompt_tokens": {pool: found.tokens for pool, found in estimate.pools.items()},
        "expected_output_tokens": estimate.output_tokens,
        "held_now": dict(held),
        "held_by": None
        if hold is None
        else {"rule": hold.rule.value, "endpoint": hold.endpoint, "freed_by": hold.rule.freed_by},
        "candidates": [
            {"rank": rank, "chosen": candidate is decision.chosen, **_candidate(candidate)}
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


def named_view(asked: str, found: RoutedName) -> dict[str, Any]:
    """The route of the name that a caller has sent, and the alias, pattern or model of a pool that led there."""
    return {"asked": asked, "route": found.route.name, "via": found.via or None}


def believed_view(beliefs: Iterable[Belief], now: float) -> list[dict[str, Any]]:
    """Beliefs that keep requests away from an endpoint, by reason; `callers`: whose requests, a number or "all"."""
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
    """Requests in the gateway's queue by endpoint, and by the rule that holds them."""
    since: dict[tuple[str, HoldRule], list[float]] = {}
    for queued in held:
        if (hold := queued.hold) is not None:
            since.setdefault((hold.endpoint, hold.rule), []).append(hold.since)
    view: dict[str, list[dict[str, Any]]] = {}
    for (endpoint, rule), times in since.items():
        longest = round(now - min(times), 3)
        found = {"rule": rule.value, "requests": len(times), "longest_s": longest, "freed_by": rule.freed_by}
        view.setdefault(endpoint, []).append(found)
    return view


def _candidate(candidate: Candidate) -> dict[str, Any]:
    load, forecast = candidate.load, candidate.forecast
    return {
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


def _rejected(rejection: Rejection, pools: Mapping[str, Pool]) -> list[str] | list[None]:
    """Ids of the endpoints: all of a pool rejected as a whole; None for a removed pool."""
    if rejection.endpoint:
        return [rejection.endpoint]
    return [endpoint.id for endpoint in pools[rejection.pool].endpoints] if rejection.pool in pools else [None]


def endpoint_view(endpoint: EndpointStatistics, now: float) -> dict[str, Any]:
    """Statistics of one endpoint; moments of the monotonic clock become seconds from now."""
    view: dict[str, Any] = msgspec.to_builtins(endpoint, enc_hook=repr)
    del view["until"]
    load, limits = endpoint.load, view["load"].pop("limits")
    shown = {LOAD_NAMES.get(name, name): value for name, value in view["load"].items() if name not in TOLD_BY_WHY}
    return {
        **view,
        "load": {**shown, "blocked_until": limits["blocked_until"], "limits": limits["buckets"]},
        "why": _why(endpoint, now),
        "believed": believed_view(endpoint.believed, now),
        "tried_again_in_s": _seconds_until(endpoint.until, now) if load.health is Health.DOWN else None,
        "limited_for_s": _seconds_until(load.limits.blocked_until, now),
        "scraped_s_ago": _seconds_since(load.scraped_at, now),
        "heard_s_ago": _seconds_since(load.last_token_at, now),
    }


def _why(endpoint: EndpointStatistics, now: float) -> str | None:
    """Reasons for which the endpoint gets no requests, or fewer than its share."""
    reasons = [endpoint.why] if endpoint.why else []
    if endpoint.breaker == HALF_OPEN:
        reasons.append("one request at a time may try it")
    if (limited := endpoint.load.limits.blocked_until - now) > 0:
        reasons.append(f"its provider limits us for {limited:.1f} s more")
    if endpoint.load.warming:
        reasons.append("it is given its cache back")
    if lacking := [name for name, until in (endpoint.load.unknown_adapters or {}).items() if until > now]:
        reasons.append(f"it does not know the adapter {', '.join(lacking)}")
    return "; ".join(reasons) or None


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
        "health_by_worker": {str(number): view["load"]["health"] for number, view in by_worker.items()},
        "believed": [*believed.values()],
        "held": [*held.values()],
    }


def request_view(record: Record) -> dict[str, Any]:
    """A Record in the answer of GET /requests: as in the access log, and `why` of a slow request."""
    view = record.as_json()
    if record.diagnosis is not None:
        view["why"] = record.diagnosis.as_json()
    return view


# -- query of GET /requests ----------------------------------------------------------------

DEFAULT_LAST = 200  # Records
LONGEST_WINDOW = KEPT // 2  # minutes of GET /causes, which compares with the window before
UNKNOWN = "-"  # route and pool of requests refused before routing
REQUEST_ID = re.compile(r"[0-9A-Za-z\-_.:]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Empty and None match everything."""

    last: int = DEFAULT_LAST
    slowest: int | None = None
    route: str = ""
    pool: str = ""
    outcome: str = ""
    slow: bool = False  # missed the TTFT budget
    id: str = ""

    def select(self, recent: Iterable[Record]) -> list[Record]:
        """The newest last; with `slowest`, the slowest first."""
        found = list(deque((record for record in recent if self._matches(record)), self.last))
        if self.slowest is None:
            return found
        return sorted((r for r in found if r.stream), key=_waited, reverse=True)[: self.slowest]

    def merge(self, by_worker: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Merge the answers of several workers, in the order in which requests ended."""
        found = [{**record, "worker": worker} for worker, records in by_worker.items() for record in records]
        if self.slowest is not None:
            return sorted(found, key=_waited_ms, reverse=True)[: self.slowest]
        found.sort(key=lambda record: record["wall"] + record["total_ms"] / 1e3)
        return list(deque(found, self.last))

    def url(self) -> str:
        """The same query for another admin port."""
        filters = {**asdict(self), "slow": int(self.slow) or None}
        return "/requests?" + urlencode({name: value for name, value in filters.items() if value not in ("", None)})

    def _matches(self, record: Record) -> bool:
        return (
            (not self.route or record.route == self.route)
            and (not self.pool or record.pool == self.pool)
            and (not self.outcome or record.end == self.outcome)
            and (not self.id or record.request_id == self.id)
            and (not self.slow or record.ttft_met is False)
        )


def parse_query(query: Mapping[str, str], routes: Collection[str], pools: Collection[str]) -> RequestQuery:
    """Raises ApiError. `routes`, `pools`: the configured names."""
    filters = [field.name for field in fields(RequestQuery)]
    for name in query:
        if name not in filters:
            hint = did_you_mean(name[:100], filters)
            raise bad_request(_sentence(f"There is no filter '{name[:100]}'{hint}"), param=name[:100])
    slowest, last = _number(query, "slowest"), _number(query, "last")
    request_id = query.get("id", "")
    if "id" in query and not REQUEST_ID.fullmatch(request_id):
        raise bad_request("id must be a request id: up to 128 letters, digits and -_.:", param="id")
    return RequestQuery(
        last=last if last is not None else DEFAULT_LAST if slowest is None else RECENT,
        slowest=slowest,
        route=_one_of(query, "route", {*routes, UNKNOWN}),
        pool=_one_of(query, "pool", {*pools, UNKNOWN}),
        outcome=_one_of(query, "outcome", list(RequestOutcome)),
        slow=_one_of(query, "slow", ("1",)) == "1",
        id=request_id,
    )


def parse_window(query: Mapping[str, str], routes: Collection[str]) -> tuple[str, int]:
    """Route and minutes of GET /causes. Raises ApiError."""
    route, minutes = _one_of(query, "route", routes), _number(query, "minutes") or 0
    if not route:
        raise bad_request("Name a route.", param="route")
    if not 1 <= minutes <= LONGEST_WINDOW:
        raise bad_request(f"minutes must be a whole number from 1 to {LONGEST_WINDOW}.", param="minutes")
    return route, minutes


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise bad_request(f"{name} must be a whole number.", param=name)
    return int(text)


def _one_of(query: Mapping[str, str], name: str, known: Collection[str]) -> str:
    text = query.get(name, "")
    if name in query and text not in known:
        hint = did_you_mean(text[:100], sorted(known))
        raise bad_request(_sentence(f"{name} '{text[:100]}' is unknown{hint}"), param=name)
    return text


def _waited(record: Record) -> float:
    """Seconds until the first token, or until the end without one."""
    return record.total if record.ttft is None else record.ttft


def _waited_ms(record: Mapping[str, Any]) -> Any:
    return record["total_ms"] if record["ttft_ms"] is None else record["ttft_ms"]


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text + "."
