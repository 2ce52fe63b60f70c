"""Registry; collectors that read values at scrape time; counts by route for live views (GET /routes).

Rules:
- No series here is updated per request.
- Counts by route are read from the metrics, since the start; a viewer takes differences. So no state is kept per
  viewer.
- Names are those of /metrics. Of several workers the collected metrics are summed; of this process, with callers on
  the same loop, counters are read directly, in a tenth of the time. Missing metrics are left out.
- Times in counts by route are milliseconds, as in all JSON of the admin port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.bottleneck import BOUND_VALUES, pool_bottleneck
from gateway.lost_promises import LostPromises
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.request_metrics import OBJECTIVES, RequestMetrics
from gateway.observe.metrics.series import HistogramCounts, Series, gauge
from policies.fleet.engine_load import EngineLoad, EngineRates
from policies.routes.route import Route
from policies.types import Health, Load, Pool

RATES: Mapping[str, Callable[[EngineRates], float | None]] = {
    "preemptions_per_second": lambda rates: rates.preemptions_per_s,
    "rejections_per_second": lambda rates: rates.rejections_per_s,
    "evictions_per_second": lambda rates: rates.evictions_per_s,
    "speculative_acceptance_ratio": lambda rates: rates.acceptance,
}
STATES = {Health.UP: 1.0, Health.PROBING: 0.5, Health.DOWN: 0.0, Health.ASLEEP: 2.0, Health.DRAINING: 3.0}


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


class GatewayCollector(Collector):
    """Values of this process: version, routes, pools, queues, requests in progress.

    `depth`: queued requests by route; `promises`: TPOT budgets that no engine keeps.
    """

    def __init__(
        self,
        routes: Callable[[], Iterable[Route]],
        pools: Callable[[], Mapping[str, Pool]] = dict,
        *,
        promises: LostPromises | None = None,
        depth: Callable[[], Mapping[str, int]] = dict,
        live: Callable[[], int] = lambda: 0,
    ) -> None:
        self.routes, self.pools = routes, pools
        self.promises = promises or LostPromises()
        self.depth = depth
        self.live = live
        self.version = running_version()

    def collect(self) -> Iterable[Metric]:
        routes, depth = list(self.routes()), self.depth()
        promised = [((route.name,), route.ttft) for route in routes if route.ttft is not None]
        yield gauge("firsttoken_build_info", [((self.version,), 1)])
        yield gauge("firsttoken_requests_in_progress", [((), self.live())])
        yield gauge("firsttoken_queue_depth", [((route.name,), depth.get(route.name, 0)) for route in routes])
        yield gauge("firsttoken_route_ttft_budget_seconds", [(labels, ttft.budget) for labels, ttft in promised])
        yield gauge("firsttoken_route_ttft_target_ratio", [(labels, ttft.target) for labels, ttft in promised])
        external = [((pool.name,), 0.0 if pool.local else 1.0) for pool in self.pools().values()]
        yield gauge("firsttoken_pool_external", external)
        pairs = [(route.name, pool) for route in routes if route.tpot for pool in dict.fromkeys(route.pools)]
        lost = self.promises.is_lost
        yield gauge("firsttoken_tpot_unattainable", [(pair, int(lost.get(pair, False))) for pair in pairs])


@cache
def running_version() -> str:
    """Version of the installed distribution, read once, or `unknown` in a source tree."""
    try:
        return version("firsttoken")
    except PackageNotFoundError:
        return "unknown"


@dataclass(eq=False)
class EndpointCollector(Collector):
    """firsttoken_endpoint_* and firsttoken_pool_bound. `loads`: by the gateway's own counts; `reported`, `rates`: by
    recent scrapes of engines; `rtts`: by the connections."""

    pool_of: Callable[[str], str]
    loads: Callable[[], Mapping[str, Load]]
    reported: Callable[[], Mapping[str, EngineLoad]] = dict
    rates: Callable[[], Mapping[str, EngineRates]] = dict
    rtts: Callable[[], Mapping[str, float]] = dict

    def collect(self) -> Iterable[Metric]:
        loads, reported = self.loads(), self.reported()
        yield self._gauge("in_flight", {name: load.in_flight for name, load in loads.items()})
        yield self._gauge("uncached_tokens_ahead", {name: load.queued_tokens for name, load in loads.items()})
        yield self._gauge("state", {name: STATES[load.health] for name, load in loads.items()})
        yield self._gauge("rtt_seconds", self.rtts())
        yield self._gauge("running", {name: engine.running for name, engine in reported.items()})
        yield self._gauge("waiting", {name: engine.waiting for name, engine in reported.items()})
        yield self._gauge("kv_usage_ratio", {name: engine.kv_usage for name, engine in reported.items()})
        rates = self.rates()
        for metric, rate in RATES.items():
            found = {name: rate(each) for name, each in rates.items()}
            if any(value is not None for value in found.values()):  # few engines tell all of them
                yield self._gauge(metric, found)
        yield gauge("firsttoken_pool_bound", self._bounds(loads, rates))

    def _bounds(self, loads: Mapping[str, Load], rates: Mapping[str, EngineRates]) -> list[tuple[tuple[str], float]]:
        """Bottleneck of each pool whose engines report their load."""
        engines = defaultdict[str, list[tuple[Load, float | None]]](list)
        for name, each in rates.items():
            if name in loads:
                engines[self.pool_of(name)].append((loads[name], each.preemptions_per_s))
        return [((pool,), BOUND_VALUES[pool_bottleneck(found)]) for pool, found in engines.items()]

    def _gauge(self, metric: str, values: Mapping[str, float | None]) -> Metric:
        """`values`: by endpoint id."""
        known = [((self.pool_of(name), name), value) for name, value in values.items() if value is not None]
        return gauge(f"firsttoken_endpoint_{metric}", known)


# -- counts by route -----------------------------------------------------------------------

Key = tuple[str, str]  # family, route

TTFT, SLO, STAGE = "firsttoken_ttft_seconds", "firsttoken_slo", "firsttoken_stage_seconds"
REQUESTS, QUEUE, ON_SCREEN = "firsttoken_requests", "firsttoken_queue_depth", "firsttoken_ttft_on_screen_seconds"
LAG, STALLS, BUILD = "firsttoken_loop_lag_seconds", "firsttoken_loop_stalls", "firsttoken_build_info"
TPOT, GAP, CAUSES = "firsttoken_tpot_seconds", "firsttoken_longest_gap_seconds", "firsttoken_slow"
TOKENS, CACHED, COST = "firsttoken_tokens", "firsttoken_cached_tokens", "firsttoken_cost_usd"
# Of the gateway as a whole, where there is such a metric: shown name, family.
GAUGES = (
    ("in_progress", "firsttoken_requests_in_progress"),
    ("workers", "firsttoken_workers"),
    ("replicas", "firsttoken_replicas"),
    ("redis_up", "firsttoken_redis_up"),
    ("config_loaded_at", "firsttoken_config_loaded_timestamp_seconds"),
)
OF_ROUTES = {TTFT, TPOT, GAP, SLO, STAGE, REQUESTS, QUEUE, ON_SCREEN, CAUSES, TOKENS, CACHED, COST}
SHOWN = {*OF_ROUTES, LAG, STALLS, BUILD, *(family for _, family in GAUGES)}


class RouteCounts:
    """Counts by family and route; the route is "" for metrics without that label.

    `samples`: labels and values of counters and gauges, and sums of histograms. `totals`: cumulative buckets of
    histograms by upper bound.
    """

    def __init__(self) -> None:
        self.families: set[str] = set()
        self.samples: dict[Key, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        self.totals: dict[Key, dict[float, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, metric: Metric) -> None:
        """Add a collected metric."""
        name = metric.name
        self.families.add(name)
        for sample in metric.samples:
            key, end = (name, sample.labels.get("route", "")), sample.name[len(name) :]
            if end == "_bucket":
                self.totals[key][float(sample.labels["le"])] += sample.value
            elif end in ("", "_total", "_sum"):
                self.samples[key].append((sample.labels, sample.value))

    def read(self, series: Series[Any]) -> None:
        """Add a series directly, without collecting."""
        self.families.add(series.name)
        for values, child in series.of.items():
            labels = dict(zip(series.labels, values, strict=True))
            key = series.name, labels.get("route", "")
            if not isinstance(child, HistogramCounts):
                self.samples[key].append((labels, child.value))
            elif any(child.counts):
                self.samples[key].append((labels, child.sum))
                for bound, count in zip((*child.bounds, inf), accumulate(child.counts), strict=True):
                    self.totals[key][bound] += count

    def total(self, family: str, route: str = "") -> float:
        """Of a gauge, or a counter."""
        return sum(value for _, value in self.samples.get((family, route), ()))

    def by(self, family: str, label: str, route: str = "", **where: str) -> dict[str, float]:
        """Sums by the values of a label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get((family, route), ()):
            if all(labels.get(name) == wanted for name, wanted in where.items()):
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def histogram(self, family: str, route: str = "") -> dict[str, list[float]]:
        """Upper bounds and separate counts of the buckets; the last bucket has no bound."""
        totals = sorted(self.totals.get((family, route), {}).items())
        before = [0.0, *(total for _, total in totals)]
        counts = [total - less for (_, total), less in zip(totals, before, strict=False)]
        return {"le": [round(bound * 1e3, 6) for bound, _ in totals[:-1]], "counts": counts}


def counts_of(metrics: Iterable[Metric | Series[Any]]) -> RouteCounts:
    """Reads the collected metrics of a registry, or series."""
    known = RouteCounts()
    for metric in metrics:
        if metric.name in SHOWN:
            known.add(metric) if isinstance(metric, Metric) else known.read(metric)
    return known


def counts_in_place(collectors: Iterable[Collector]) -> RouteCounts:
    """Reads the gateway's own collectors in place, series directly. Resets nothing."""
    return counts_of(
        metric
        for collector in collectors
        if type(collector).__module__.startswith("gateway.")
        for metric in list(_series(collector)) or collector.collect()
    )


def _series(collector: Collector) -> Iterator[Series[Any]]:
    """Series of a collector and of the collectors inside."""
    if isinstance(collector, RequestMetrics):
        collector.flush()
    for part in vars(collector).values():
        if isinstance(part, Series):
            yield part
        elif isinstance(part, LoopLag):
            yield from _series(part)


def route_stats(known: RouteCounts, routes: Sequence[Route], wall: float) -> dict[str, Any]:
    """Ready for JSON. `wall`: now, as Unix time."""
    gateway: dict[str, Any] = {name: known.total(family) for name, family in GAUGES if family in known.families}
    gateway["version"] = next(iter(known.by(BUILD, "version")), None)
    gateway["loop_stalls"] = known.total(STALLS)
    gateway["loop_lag_ms"] = known.histogram(LAG)
    return {"at": wall, "gateway": gateway, "routes": [_route(route, known) for route in routes]}


def _route(route: Route, known: RouteCounts) -> dict[str, Any]:
    name = route.name
    stages = known.by(STAGE, "stage", name)
    return {
        "route": name,
        "workload": route.workload,
        "ttft_budget_ms": round(route.ttft.budget * 1e3, 3) if route.ttft else None,
        "ttft_budget_grows": route.budget_grows,
        "ttft_target": route.ttft.target if route.ttft else None,
        "requests": known.by(REQUESTS, "outcome", name),
        "pools": known.by(REQUESTS, "pool", name),
        "held": known.total(QUEUE, name),
        "ttft_ms": known.histogram(TTFT, name),
        "tpot_ms": known.histogram(TPOT, name),
        "longest_gap_ms": known.histogram(GAP, name),
        "on_screen_ms": known.histogram(ON_SCREEN, name),
        "slo": {objective: known.by(SLO, "met", name, objective=objective) for objective in OBJECTIVES},
        "causes": known.by(CAUSES, "cause", name),
        "tokens": {**known.by(TOKENS, "direction", name), "cached": known.total(CACHED, name)},
        "cost_usd": known.total(COST, name),
        "stages_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in stages.items()},
    }
