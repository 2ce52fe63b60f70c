"""Record to Prometheus series. Label values come from the config only, never from a caller.

Names, units and meaning: docs/metrics.md. Each route's TTFT budget is one of the buckets, so
that attainment can be read exactly from the histogram.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.looplag import LoopLag
from gateway.observe.record import STAGE_NAMES, AttemptRecord, Record
from gateway.observe.series import Counter, Histogram, Tally
from policies.facts import AttemptKind, Ending, Health, Load
from policies.route import Route

log = logging.getLogger("firsttoken")

BATCH = 16  # Records
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TPOT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STAGE_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
ERROR_BUCKETS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
RATIO_BUCKETS = tuple(i / 10 for i in range(11))


def ttft_buckets(routes: Iterable[Route]) -> tuple[float, ...]:
    """The usual buckets and every route's budget."""
    return tuple(sorted({*TTFT_BUCKETS, *(route.ttft.budget for route in routes if route.ttft is not None)}))


class Metrics(Collector):
    """A sink of Records. `loop_lag` is exported with them; whoever has the loop starts it."""

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
        self.loop_lag = LoopLag()
        self._all: list[Collector] = list(vars(self).values())
        self._by_route: dict[str, list[Tally]] = {}  # of `stage`
        self._waiting: list[Record] = []
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Every Record that was given is in it."""
        self.count()
        for series in self._all:
            yield from series.collect()

    def __call__(self, record: Record) -> None:
        """Counted a few at a time: 4 us less each than one by one, when none of it is in the processor's caches."""
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self.count()

    def count(self) -> None:
        """All that wait. A Record that cannot be counted is our bug, and its own loss."""
        records, self._waiting = self._waiting, []
        for record in records:
            try:
                self._count(record)
            except Exception:
                log.exception("a Record could not be counted")

    def _count(self, record: Record) -> None:
        route, pool = record.route, record.pool
        self.requests.of[route, pool, record.end].value += 1
        for tally, spent in zip(self._stages_of(route), record.spent, strict=True):
            if spent is not None:  # `tally.observe(spent)`, without the eleven calls: 0.6 us
                tally.counts[bisect_left(STAGE_BUCKETS, spent)] += 1
                tally.sum += spent
        for objective, met in (("ttft", record.ttft_met), ("tpot", record.tpot_met), ("total", record.total_met)):
            if met is not None:
                self.slo.of[route, objective, "true" if met else "false"].value += 1
        for attempt in record.attempts:
            self.attempts.of[attempt.pool, attempt.kind._value_, attempt.ending._value_].value += 1
            if attempt.kind is AttemptKind.HEDGE:
                self.hedges.of[route, _result(record, attempt)].value += 1
        if record.ttft is not None:
            self._answered(record, record.ttft, route, pool)

    def _stages_of(self, route: str) -> list[Tally]:
        tallies = self._by_route.get(route)
        if tallies is None:
            tallies = self._by_route[route] = [self.stage.of[route, name] for name in STAGE_NAMES]
        return tallies

    def _answered(self, record: Record, ttft: float, route: str, pool: str) -> None:
        pair = route, pool
        self.ttft.of[pair].observe(ttft)
        if record.stream and record.ttft_predicted_p50 is not None:
            self.error.of[(pool,)].observe(ttft - record.ttft_predicted_p50)
        if record.tpot is not None:
            self.tpot.of[pair].observe(record.tpot)
        estimated, reported = record.prompt_tokens_estimated or 0, record.prompt_tokens_reported
        self.tokens.of[route, pool, "input"].value += estimated if reported is None else reported
        self.tokens.of[route, pool, "output"].value += record.output_tokens or 0
        self.cost.of[pair].value += record.cost_usd
        if estimated and record.cached_tokens_predicted is not None:
            self.hit.of[pool, "predicted"].observe(record.cached_tokens_predicted / estimated)
        if reported and record.cached_tokens_reported is not None:
            self.hit.of[pool, "reported"].observe(record.cached_tokens_reported / reported)


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
