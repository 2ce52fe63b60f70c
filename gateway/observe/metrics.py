"""Record to Prometheus series. Label values come from the config only, never from a caller.

Names, units and meaning: docs/metrics.md. Each route's TTFT budget is one of the buckets, so
that attainment can be read exactly from the histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.record import AttemptRecord, Record
from gateway.observe.series import Counter, Histogram
from policies.facts import AttemptKind, Ending, Health, Load
from policies.route import Route

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TPOT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STAGE_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
ERROR_BUCKETS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
RATIO_BUCKETS = tuple(i / 10 for i in range(11))


def ttft_buckets(routes: Iterable[Route]) -> tuple[float, ...]:
    """The usual buckets and every route's budget."""
    return tuple(sorted({*TTFT_BUCKETS, *(route.ttft.budget for route in routes if route.ttft is not None)}))


class Metrics:
    """A sink of Records. Children of labels are looked up once per (route, pool) and kept."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[Route]) -> None:
        self.requests = Counter("firsttoken_requests", "Requests by how they ended", "route", "pool", "outcome")
        self.ttft = Histogram(
            "firsttoken_ttft_seconds", "Arrival to first token out (streams: content; otherwise: first byte)",
            "route", "pool", bounds=ttft_buckets(routes),
        )  # fmt: skip
        self.tpot = Histogram(
            "firsttoken_tpot_seconds", "Time per output token after the first", "route", "pool", bounds=TPOT_BUCKETS
        )
        self.stage = Histogram(
            "firsttoken_stage_seconds", "Where the time went, by stage", "route", "stage", bounds=STAGE_BUCKETS
        )
        self.slo = Counter("firsttoken_slo", "Objectives met and missed", "route", "objective", "met")
        self.error = Histogram(
            "firsttoken_ttft_prediction_error_seconds", "Actual minus predicted p50 TTFT", "pool", bounds=ERROR_BUCKETS
        )
        self.hit = Histogram(
            "firsttoken_prefix_hit_ratio", "Share of prompt tokens cached, by source", "pool", "source",
            bounds=RATIO_BUCKETS,
        )  # fmt: skip
        self.attempts = Counter("firsttoken_attempts", "Attempts by kind and how they ended", "pool", "kind", "outcome")
        self.hedges = Counter("firsttoken_hedges", "Hedges by what came of them", "route", "result")
        self.tokens = Counter("firsttoken_tokens", "Tokens as reported, or estimated", "route", "pool", "direction")
        self.cost = Counter("firsttoken_cost_usd", "USD by the prices in the config", "route", "pool")
        for series in vars(self).values():
            registry.register(series)

    def __call__(self, record: Record) -> None:
        route, pool = record.route, record.pool
        self.requests(route, pool, record.end.value).inc()
        self._times(record, route, pool)
        for objective, met in (("ttft", record.ttft_met), ("tpot", record.tpot_met), ("total", record.total_met)):
            if met is not None:
                self.slo(route, objective, "true" if met else "false").inc()
        for attempt in record.attempts:
            self.attempts(attempt.pool, attempt.kind.value, attempt.ending.value).inc()
            if attempt.kind is AttemptKind.HEDGE:
                self.hedges(route, _result(record, attempt)).inc()
        if record.ttft is not None:
            self._tokens(record, route, pool)

    def _times(self, record: Record, route: str, pool: str) -> None:
        for stage, seconds in record.stages.items():
            self.stage(route, stage.value).observe(seconds)
        if record.ttft is not None:
            self.ttft(route, pool).observe(record.ttft)
            if record.stream and record.ttft_predicted_p50 is not None:
                self.error(pool).observe(record.ttft - record.ttft_predicted_p50)
        if record.tpot is not None:
            self.tpot(route, pool).observe(record.tpot)

    def _tokens(self, record: Record, route: str, pool: str) -> None:
        estimated, reported = record.prompt_tokens_estimated or 0, record.prompt_tokens_reported
        self.tokens(route, pool, "input").inc(estimated if reported is None else reported)
        self.tokens(route, pool, "output").inc(record.output_tokens or 0)
        self.cost(route, pool).inc(record.cost_usd)
        if estimated and record.cached_tokens_predicted is not None:
            self.hit(pool, "predicted").observe(record.cached_tokens_predicted / estimated)
        if reported and record.cached_tokens_reported is not None:
            self.hit(pool, "reported").observe(record.cached_tokens_reported / reported)


def _result(record: Record, hedge: AttemptRecord) -> str:
    """The attempt that answered is the last of a Record."""
    if record.ttft is not None and hedge is record.attempts[-1]:
        return "won"
    return "lost" if hedge.ending is Ending.CANCELLED else "failed"


class QueueCollector(Collector):
    """firsttoken_queue_depth: read from the line when Prometheus asks."""

    def __init__(self, routes: Iterable[Route], depth: Callable[[], Mapping[str, int]]) -> None:
        self.routes = [route.name for route in routes]
        self.depth = depth

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("firsttoken_queue_depth", "Requests held back now", labels=["route"])
        depth = self.depth()
        for route in self.routes:
            family.add_metric([route], depth.get(route, 0))
        yield family


class EndpointCollector(Collector):
    """firsttoken_endpoint_*: read from the fleet when Prometheus asks."""

    def __init__(self, loads: Callable[[], Mapping[str, Load]]) -> None:
        self.loads = loads

    def collect(self) -> Iterable[Metric]:
        loads = self.loads()
        yield _family("firsttoken_endpoint_in_flight", "Attempts open", {k: v.in_flight for k, v in loads.items()})
        yield _family(
            "firsttoken_endpoint_uncached_tokens_ahead",
            "Uncached prompt tokens sent that have no first token yet",
            {k: v.ahead for k, v in loads.items()},
        )
        up = {Health.UP: 1.0, Health.PROBING: 0.5, Health.DOWN: 0.0}
        yield _family(
            "firsttoken_endpoint_state", "1 up, 0.5 being tried, 0 down", {k: up[v.health] for k, v in loads.items()}
        )


def _family(name: str, doc: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=["pool", "endpoint"])
    for endpoint, value in values.items():
        family.add_metric([endpoint.partition("/")[0], endpoint], value)
    return family
