"""Counts by route for live views (GET /routes), read from the metrics.

Rules:
- Numbers count since the start, as metrics do; a viewer takes differences. So no state is kept per viewer.
- Names are those of /metrics. Of several workers the collected metrics are summed; of this process, with callers on
  its loop, counters are read directly, in a tenth of the time. Missing metrics are left out.
- Times are in milliseconds, as in all JSON of the admin port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.request_metrics import RequestMetrics
from gateway.observe.metrics.series import HistogramCounts, Series
from policies.routes.route import Route

Key = tuple[str, str]  # family, route

TTFT, SLO, STAGE = "firsttoken_ttft_seconds", "firsttoken_slo", "firsttoken_stage_seconds"
REQUESTS, QUEUE, ON_SCREEN = "firsttoken_requests", "firsttoken_queue_depth", "firsttoken_ttft_on_screen_seconds"
LAG, STALLS, BUILD = "firsttoken_loop_lag_seconds", "firsttoken_loop_stalls", "firsttoken_build_info"
OBJECTIVES = ("ttft", "tpot", "total")
# Of the gateway as a whole, where there is such a thing: shown name, family.
GAUGES = (
    ("in_progress", "firsttoken_requests_in_progress"),
    ("workers", "firsttoken_workers"),
    ("replicas", "firsttoken_replicas"),
    ("redis_up", "firsttoken_redis_up"),
    ("config_loaded_at", "firsttoken_config_loaded_timestamp_seconds"),
)
SHOWN = {TTFT, SLO, STAGE, REQUESTS, QUEUE, ON_SCREEN, LAG, STALLS, BUILD, *(family for _, family in GAUGES)}


class RouteCounts:
    """Counts by family and route; the route is "" for metrics without that label.

    `samples`: labels and values of counters and gauges, and sums of histograms. `totals`: cumulative buckets of
    histograms by upper bound; or `tallies`: buckets with separate counts.
    """

    def __init__(self) -> None:
        self.families: set[str] = set()
        self.samples: dict[Key, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        self.totals: dict[Key, dict[float, float]] = defaultdict(dict)
        self.tallies: dict[Key, HistogramCounts] = {}

    def add(self, metric: Metric) -> None:
        """Add a collected metric."""
        name = metric.name
        self.families.add(name)
        for sample in metric.samples:
            key, end = (name, sample.labels.get("route", "")), sample.name[len(name) :]
            if end == "_bucket":
                totals, bound = self.totals[key], float(sample.labels["le"])
                totals[bound] = totals.get(bound, 0.0) + sample.value
            elif end in ("", "_total", "_sum"):
                self.samples[key].append((sample.labels, sample.value))

    def read(self, series: Series[Any]) -> None:
        """Add a series directly, without collecting."""
        self.families.add(series.name)
        for values, child in series.of.items():
            if isinstance(child, HistogramCounts) and not any(child.counts):
                continue
            labels = dict(zip(series.labels, values, strict=True))
            key = series.name, labels.get("route", "")
            if isinstance(child, HistogramCounts):
                tally = self.tallies.setdefault(key, HistogramCounts(child.bounds))
                tally.counts = list(map(add, tally.counts, child.counts))
            self.samples[key].append((labels, child.sum if isinstance(child, HistogramCounts) else child.value))

    def total(self, family: str, route: str = "") -> float:
        """Of a gauge, or a counter."""
        return sum(value for _, value in self.samples.get((family, route), ()))

    def by(self, family: str, label: str, route: str = "", **where: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get((family, route), ()):
            if all(labels.get(name) == wanted for name, wanted in where.items()):
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def histogram(self, family: str, route: str = "") -> dict[str, list[float]]:
        """Upper bounds and separate counts of the buckets; the last bucket has no bound."""
        if (tally := self.tallies.get((family, route))) is not None:
            return {"le": [round(bound * 1e3, 6) for bound in tally.bounds], "counts": list(map(float, tally.counts))}
        totals = sorted(self.totals.get((family, route), {}).items())
        before = [0.0, *(total for _, total in totals)]
        counts = [total - less for (_, total), less in zip(totals, before, strict=False)]
        return {"le": [round(bound * 1e3, 6) for bound, _ in totals[:-1]], "counts": counts}


def counts_of(metrics: Iterable[Metric]) -> RouteCounts:
    """Reads the metrics that a registry collects."""
    known = RouteCounts()
    for metric in metrics:
        if metric.name in SHOWN:
            known.add(metric)
    return known


def counts_in_place(collectors: Iterable[Collector]) -> RouteCounts:
    """Reads the gateway's own collectors in place, series directly. Resets nothing."""
    known = RouteCounts()
    for collector in collectors:
        if not type(collector).__module__.startswith("gateway."):
            continue
        if isinstance(collector, RequestMetrics):
            collector.count()
        if series := _series(collector):
            for one in series:
                if one.name in SHOWN:
                    known.read(one)
        else:
            for metric in collector.collect():
                if metric.name in SHOWN:
                    known.add(metric)
    return known


def _series(collector: object) -> list[Series[Any]]:
    """Series of a collector and of the collectors inside."""
    if isinstance(collector, Series):
        return [collector]
    parts = vars(collector).values()
    return [one for part in parts if isinstance(part, Series | LoopLag) for one in _series(part)]


def route_stats(known: RouteCounts, routes: Sequence[Route], wall: float) -> dict[str, Any]:
    """Ready for JSON. `wall`: now, as Unix time."""
    return {"at": wall, "gateway": _gateway(known), "routes": [_route(route, known) for route in routes]}


def _gateway(known: RouteCounts) -> dict[str, Any]:
    said: dict[str, Any] = {name: known.total(family) for name, family in GAUGES if family in known.families}
    said["version"] = next(iter(known.by(BUILD, "version")), None)
    return {**said, "loop_stalls": known.total(STALLS), "loop_lag_ms": known.histogram(LAG)}


def _route(route: Route, known: RouteCounts) -> dict[str, Any]:
    name = route.name
    stages = known.by(STAGE, "stage", name)
    return {
        "route": name,
        "workload": route.workload,
        "ttft_budget_ms": round(route.ttft.budget * 1e3, 3) if route.ttft else None,
        "ttft_target": route.ttft.target if route.ttft else None,
        "requests": known.by(REQUESTS, "outcome", name),
        "pools": known.by(REQUESTS, "pool", name),
        "held": known.total(QUEUE, name),
        "ttft_ms": known.histogram(TTFT, name),
        "on_screen_ms": known.histogram(ON_SCREEN, name),
        "slo": {objective: known.by(SLO, "met", name, objective=objective) for objective in OBJECTIVES},
        "stages_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in stages.items()},
    }
