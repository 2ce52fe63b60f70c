"""Registry; collectors that read values at scrape time; counts by route for live views (GET /routes).

Rules:
- No series here is updated per request.
- Numbers count since the start, as metrics do; a viewer takes differences. So no state is kept per viewer.
- Names are those of /metrics. Of several workers the collected metrics are summed; of this process, with callers on
  its loop, counters are read directly, in a tenth of the time. Missing metrics are left out.
- Times are in milliseconds, as in all JSON of the admin port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import add
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import HistogramCounts, LoopLag, RequestMetrics, Series, gauge, total
from policies.routes.route import Route
from policies.types import EngineLoad, Health, Load

STATES = {Health.UP: 1.0, Health.PROBING: 0.5, Health.DOWN: 0.0}


class Registry(CollectorRegistry):
    """Lists the collectors in order of registration: reading some directly is cheaper than collecting."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)

    def unregister(self, collector: Collector) -> None:
        super().unregister(collector)
        self.collectors.remove(collector)


class RouteCollector(Collector):
    """Time-to-first-token budget and target of each route."""

    def __init__(self, routes: Callable[[], Iterable[Route]]) -> None:
        self.routes = routes

    def collect(self) -> Iterable[Metric]:
        promised = [(route.name, route.ttft) for route in self.routes() if route.ttft is not None]
        yield gauge("firsttoken_route_ttft_budget_seconds", [((name,), ttft.budget) for name, ttft in promised])
        yield gauge("firsttoken_route_ttft_target_ratio", [((name,), ttft.target) for name, ttft in promised])


class QueueCollector(Collector):
    """firsttoken_queue_depth."""

    def __init__(self, routes: Callable[[], Iterable[Route]], depth: Callable[[], Mapping[str, int]]) -> None:
        self.routes, self.depth = routes, depth

    def collect(self) -> Iterable[Metric]:
        depth = self.depth()
        yield gauge("firsttoken_queue_depth", [((route.name,), depth.get(route.name, 0)) for route in self.routes()])


class EndpointCollector(Collector):
    """firsttoken_endpoint_*. `loads`: by the gateway's own counts; `reported`: by recent scrapes of engines."""

    def __init__(
        self, loads: Callable[[], Mapping[str, Load]], reported: Callable[[], Mapping[str, EngineLoad]] = dict
    ) -> None:
        self.loads, self.reported = loads, reported

    def collect(self) -> Iterable[Metric]:
        loads, reported = self.loads(), self.reported()
        yield _by_endpoint("in_flight", {name: load.in_flight for name, load in loads.items()})
        yield _by_endpoint("uncached_tokens_ahead", {name: load.queued_tokens for name, load in loads.items()})
        yield _by_endpoint("state", {name: STATES[load.health] for name, load in loads.items()})
        yield _by_endpoint("running", {name: engine.running for name, engine in reported.items()})
        yield _by_endpoint("waiting", {name: engine.waiting for name, engine in reported.items()})
        yield _by_endpoint("kv_usage_ratio", {name: engine.kv_usage for name, engine in reported.items()})


def _by_endpoint(metric: str, values: Mapping[str, float | None]) -> Metric:
    """`values`: by endpoint id, which begins with the pool's name."""
    known = [((name.partition("/")[0], name), value) for name, value in values.items() if value is not None]
    return gauge(f"firsttoken_endpoint_{metric}", known)


class OwnCollector(Collector):
    """Version, requests in progress and lost access log lines of this process."""

    def __init__(self, live: Callable[[], int], lost: Callable[[], int] | None) -> None:
        self.live = live
        self.lost = lost
        self.version = running_version()

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_build_info", [((self.version,), 1)])
        yield gauge("firsttoken_requests_in_progress", [((), self.live())])
        if self.lost is not None:
            yield from total("firsttoken_access_log_lines_lost_total", self.lost())


class ReplicasCollector(Collector):
    """Number of gateways that share state; 1 without shared state."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_replicas", [((), self.count())])


def running_version() -> str:
    """Version of the installed distribution, or `unknown` in a source tree."""
    try:
        return version("firsttoken")
    except PackageNotFoundError:
        return "unknown"


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
