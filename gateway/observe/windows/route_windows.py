"""Figures of each route in a window, from the history of the counts that GET /routes shows.

GET /windows has the counts of a window in the form in which GET /routes has those since the start. Besides it has the
figures that viewers show, and a curve of the TTFT.
Quantiles are computed of histograms, as Prometheus computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any

from gateway.observe.metrics.request_metrics import OBJECTIVES
from gateway.observe.windows.count_history import CountHistory, Key, Slot, Span, Window


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Interpolated linearly within a bucket; beyond the last bound the bound is the result.

    `counts`: of each bucket; the last has no bound. None: nothing was counted.
    """
    cumulated = list(accumulate(counts))
    if not bounds or not cumulated or not cumulated[-1]:
        return None
    rank = q * cumulated[-1]
    at = next(i for i, total in enumerate(cumulated) if total >= rank and counts[i])
    if at == len(bounds):
        return bounds[-1]
    low, below = (bounds[at - 1], cumulated[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / counts[at]


BY_LABEL = ("requests", "pools", "tokens", "causes")  # members of a route: counts by a label
BY_OBJECTIVE = "slo"  # counts by two labels
HISTOGRAMS = ("ttft_ms", "tpot_ms", "longest_gap_ms")
TOTALS = ("cost_usd",)
LAG, STALLS = "loop_lag_ms", "loop_stalls"  # members of the gateway: a histogram, a total
GATEWAY = ""  # in place of the name of a route
FAILED = ("failed", "upstream_broke", "internal", "unavailable")  # outcomes

Columns = Mapping[str, Mapping[Key, int]]  # of one route, by member and labels
Point = tuple[float | None, float | None, float]


def totals(stats: Mapping[str, Any]) -> dict[Key, float]:
    """Counts of the answer of GET /routes, by route, member and labels."""
    gateway = stats["gateway"]
    found: dict[Key, float] = {(GATEWAY, STALLS): gateway[STALLS], **_bucket_counts(GATEWAY, LAG, gateway[LAG])}
    for route in stats["routes"]:
        name = route["route"]
        for member in BY_LABEL:
            found.update({(name, member, label): count for label, count in route[member].items()})
        for objective, judged in route[BY_OBJECTIVE].items():
            found.update({(name, BY_OBJECTIVE, objective, met): count for met, count in judged.items()})
        for member in HISTOGRAMS:
            found.update(_bucket_counts(name, member, route[member]))
        found.update({(name, member): route[member] for member in TOTALS})
    return found


def _bucket_counts(name: str, member: str, histogram: Mapping[str, Sequence[float]]) -> Mapping[Key, float]:
    bounds = [*histogram["le"], inf]
    return {(name, member, str(le)): count for le, count in zip(bounds, histogram["counts"], strict=False)}


def windows_view(history: CountHistory, span: Span, stats: Mapping[str, Any], wall: float) -> dict[str, Any]:
    """Ready for JSON. `stats`: the present answer of GET /routes, whose routes are shown."""
    window, by_route = history.window(span, wall), history.by_route
    routes = []
    for route in stats["routes"]:
        columns = by_route.get(route["route"], {})
        curve = _points(window, columns, route["route"])
        counts = _counts(window, columns)
        told = {"figures": _figures(counts, max(window.covered, 1e-3)), "points": curve}
        routes.append({**route, **counts, **told})
    shown = {"window": span.name, "window_s": span.seconds, "slot_s": window.span.slot_s}
    gateway = {**stats["gateway"], **_gateway_counts(window, by_route.get(GATEWAY, {}))}
    return {"at": wall, **shown, "covered_s": round(window.covered, 3), "gateway": gateway, "routes": routes}


def _figures(counts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Of one route in `seconds`. None: nothing was counted."""
    outcomes, tokens, slo = counts["requests"], counts["tokens"], counts[BY_OBJECTIVE]
    asked, good = sum(outcomes.values()), slo["goodput"].get("true", 0.0)
    answered = {pool: count for pool, count in counts["pools"].items() if pool != "-" and count}
    return {
        "requests_per_s": asked / seconds,
        "good_per_s": good / seconds,
        "shed_per_s": outcomes.get("shed", 0.0) / seconds,
        "failed_per_s": sum(outcomes.get(outcome, 0.0) for outcome in FAILED) / seconds,
        "tokens_per_s": (tokens.get("input", 0.0) + tokens.get("output", 0.0)) / seconds,
        "met": _part(slo["ttft"].get("true", 0.0), slo["ttft"].values()),
        "goodput": _part(good, slo["goodput"].values()),
        "hit": _part(tokens.get("cached", 0.0), [tokens.get("input", 0.0)]),
        "usd_per_1000": 1000 * counts["cost_usd"] / asked if asked else None,
        "ttft_ms": {f"p{q:.0f}": _quantile(counts["ttft_ms"], q / 100) for q in (50, 95, 99)},
        "tpot_p95_ms": _quantile(counts["tpot_ms"], 0.95),
        "longest_gap_p95_ms": _quantile(counts["longest_gap_ms"], 0.95),
        "pools": {
            pool: _part(answered[pool], answered.values())
            for pool in sorted(answered, key=lambda pool: -answered[pool])
        },
    }


def _part(part: float, counts: Iterable[float]) -> float | None:
    whole = sum(counts)
    return part / whole if whole else None


def _quantile(histogram: Mapping[str, Sequence[float]], q: float) -> float | None:
    return quantile(histogram["le"], histogram["counts"], q)


def _counts(window: Window, columns: Columns) -> dict[str, Any]:
    """Members of a route as in GET /routes, of the window alone."""
    grown, slo = window.totals, dict[str, dict[str, float]]((objective, {}) for objective in OBJECTIVES)
    for (objective, met), column in columns.get(BY_OBJECTIVE, {}).items():
        slo.setdefault(objective, {})[met] = grown[column]
    return {
        **{member: {key[0]: grown[column] for key, column in columns.get(member, {}).items()} for member in BY_LABEL},
        BY_OBJECTIVE: slo,
        **{member: _total(window, columns, member) for member in TOTALS},
        **{member: _histogram(window, columns, member) for member in HISTOGRAMS},
    }


def _gateway_counts(window: Window, columns: Columns) -> dict[str, Any]:
    return {LAG: _histogram(window, columns, LAG), STALLS: _total(window, columns, STALLS)}


def _total(window: Window, columns: Columns, member: str) -> float:
    return sum(window.totals[column] for column in columns.get(member, {}).values())


def _histogram(window: Window, columns: Columns, member: str) -> dict[str, list[float]]:
    bounds, places = _buckets(columns, member)
    return {"le": bounds, "counts": [window.totals[place] for place in places]}


def _buckets(columns: Columns, member: str) -> tuple[list[float], list[int]]:
    """Ascending bounds, and the columns of their buckets; the last bucket has no bound."""
    known = sorted((float(bound), at) for (bound,), at in columns.get(member, {}).items())
    return [bound for bound, _ in known if bound != inf], [at for _, at in known]


def _points(window: Window, columns: Columns, route: str) -> list[Point | None]:
    """p50 and p95 of the TTFT in ms, and requests, of each slot of the span; None: a slot without samples."""
    bounds, places = _buckets(columns, "ttft_ms")
    asked = [*columns.get("requests", {}).values()]
    points: list[Point | None] = [None] * window.span.slots
    for slot in window.slots:
        at = min(slot.number - window.first, window.span.slots - 1)
        point = slot.curves.get(route)
        if point is None:
            point = _point(slot, bounds, places, asked)
            if slot is not window.slots[-1]:
                slot.curves[route] = point
        points[at] = point
    return points


def _point(slot: Slot, bounds: Sequence[float], places: Sequence[int], asked: Sequence[int]) -> Point:
    counts = [slot.counts[place] for place in places]
    p50, p95 = quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.95)
    return p50, p95, sum(slot.counts[at] for at in asked)
