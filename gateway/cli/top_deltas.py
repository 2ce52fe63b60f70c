"""Differences between two replies of GET /routes. Pure.

Rules:
- Counts only grow. A smaller count belongs to a new process, which began at zero: the whole count is new.
- A quantile is interpolated linearly within a bucket, as in Prometheus; beyond the last bound the bound is the
  result.
  Units are milliseconds, as in the reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

SHED, FAILED = ("shed",), ("failed", "upstream_broke", "internal", "unavailable")
Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouteView:
    """A route. Rates per second; shares from 0 to 1; None without any request."""

    route: str
    per_second: float
    p50: float | None
    p95: float | None
    p99: float | None
    budget: float | None
    target: float | None
    attainment: float | None
    pools: Counts  # shares
    held: int
    shed: float
    failed: float


@dataclass(frozen=True, slots=True)
class GatewayView:
    """`lag`: upper bound in ms of the loop's longest stall; None: not measured."""

    lag: float | None
    stalls: int
    said: Mapping[str, float]  # those present of workers, replicas, redis_up, in_progress


def routes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[RouteView]:
    """In the order of the configuration."""
    seconds = max(after["at"] - before["at"], 1e-3)
    known = {route["route"]: route for route in before["routes"]}
    return [_route(known.get(route["route"], {}), route, seconds) for route in after["routes"]]


def _route(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> RouteView:
    outcomes = grown(before.get("requests", {}), after["requests"])
    pools = {pool: count for pool, count in grown(before.get("pools", {}), after["pools"]).items() if pool != "-"}
    met = grown(before.get("slo", {}).get("ttft", {}), after["slo"]["ttft"])
    judged, placed = sum(met.values()), sum(pools.values())
    bounds, counts = buckets(before.get("ttft_ms"), after["ttft_ms"])
    p50, p95, p99 = (quantile(bounds, counts, q) for q in (0.5, 0.95, 0.99))
    return RouteView(
        after["route"],
        sum(outcomes.values()) / seconds,
        p50,
        p95,
        p99,
        after["ttft_budget_ms"],
        after["ttft_target"],
        met.get("true", 0.0) / judged if judged else None,
        {pool: count / placed for pool, count in sorted(pools.items(), key=lambda p: -p[1]) if count},
        int(after["held"]),
        _rate(outcomes, SHED, seconds),
        _rate(outcomes, FAILED, seconds),
    )


def gateway(before: Mapping[str, Any], after: Mapping[str, Any]) -> GatewayView:
    was, now = before["gateway"], after["gateway"]
    bounds, counts = buckets(was["loop_lag_ms"], now["loop_lag_ms"])
    seen = [i for i, count in enumerate(counts) if count]
    lag = None if not seen else (*bounds, float("inf"))[seen[-1]]
    stalls = grown({"": was["loop_stalls"]}, {"": now["loop_stalls"]})[""]
    names = ("in_progress", "workers", "replicas", "redis_up")
    return GatewayView(lag, int(stalls), {name: now[name] for name in names if name in now})


def grown(before: Counts, after: Counts) -> Counts:
    return {name: value - was if value >= (was := before.get(name, 0.0)) else value for name, value in after.items()}


def buckets(
    before: Mapping[str, Sequence[float]] | None, after: Mapping[str, Sequence[float]]
) -> tuple[Sequence[float], Sequence[float]]:
    """Upper bounds, and the new counts of each bucket; the last bucket has no bound."""
    bounds, counts = after["le"], after["counts"]
    if before is None or not before["counts"]:
        return bounds, counts
    if before["le"] != bounds:  # another configuration: new and old counts cannot be separated
        return bounds, [0.0] * len(counts)
    since = [now - was for now, was in zip(counts, before["counts"], strict=True)]
    return bounds, counts if min(since) < 0 else since


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """None where nothing was counted."""
    cumulated = list(accumulate(counts))
    if not bounds or not cumulated or not cumulated[-1]:
        return None
    rank = q * cumulated[-1]
    at = next(i for i, total in enumerate(cumulated) if total >= rank and counts[i])
    if at == len(bounds):
        return bounds[-1]
    low, below = (bounds[at - 1], cumulated[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / counts[at]


def _rate(outcomes: Counts, which: Sequence[str], seconds: float) -> float:
    return sum(outcomes.get(outcome, 0.0) for outcome in which) / seconds
