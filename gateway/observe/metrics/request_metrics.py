"""Counts Records in Prometheus series. Label values come from the configuration, never from callers.

Names, units and meaning are in `gateway.observe.metrics.metric_table`. Each route's TTFT budget is a bucket, so
attainment can be read exactly from the histogram.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.series import counter, histogram
from gateway.observe.record import STAGE_NAMES, AttemptRecord, Record
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome

log = logging.getLogger("firsttoken")

BATCH = 16  # Records
STAGES_AND_PARTS = (*STAGE_NAMES, "engine_queue", "engine_prefill")  # the last two are parts of `upstream`
SIZES = (1_000, 4_000, 16_000, 64_000)  # tokens of prompt from which the next class begins
PROMPTS = ("<1k", "1k-4k", "4k-16k", "16k-64k", ">64k")


def budgets(routes: Iterable[Route]) -> tuple[float, ...]:
    """TTFT budgets of the routes."""
    return tuple(sorted({route.ttft.budget for route in routes if route.ttft is not None}))


class RequestMetrics(Collector):
    """Sink of Records. `loop_lag` is exported too; the owner of the event loop starts it."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[Route]) -> None:
        within = budgets(routes)
        self.requests = counter("firsttoken_requests_total")
        self.ttft = histogram("firsttoken_ttft_seconds", within)
        self.by_prompt = histogram("firsttoken_ttft_by_prompt_seconds", within)
        self.tpot = histogram("firsttoken_tpot_seconds")
        self.stage = histogram("firsttoken_stage_seconds")
        self.slo = counter("firsttoken_slo_total")
        self.predicted = histogram("firsttoken_ttft_predicted_seconds")
        self.error = histogram("firsttoken_ttft_prediction_error_seconds")
        self.covered = counter("firsttoken_ttft_prediction_covered_total")
        self.hit = histogram("firsttoken_prefix_hit_ratio")
        self.attempts = counter("firsttoken_attempts_total")
        self.hedges = counter("firsttoken_hedges_total")
        self.tokens = counter("firsttoken_tokens_total")
        self.cost = counter("firsttoken_cost_usd_total")
        self.loop_lag = LoopLag()
        self._all: list[Collector] = list(vars(self).values())
        self._waiting: list[Record] = []
        registry.register(self)

    def promise(self, routes: Iterable[Route]) -> None:
        """Add the budgets of other routes as buckets; existing buckets stay."""
        self.count()
        within = budgets(routes)
        self.ttft.refine(within)
        self.by_prompt.refine(within)

    def collect(self) -> Iterable[Metric]:
        """Includes every Record passed in so far."""
        self.count()
        for series in self._all:
            yield from series.collect()

    def __call__(self, record: Record) -> None:
        """Queue a Record: counting in batches saves 4 us each while the series are not in the processor's caches."""
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self.count()

    def count(self) -> None:
        """Count all queued Records. A bug in counting loses one Record only."""
        records, self._waiting = self._waiting, []
        for record in records:
            try:
                self._count(record)
            except Exception:
                log.exception("record could not be counted")

    def _count(self, record: Record) -> None:
        route, pool = record.route, record.pool
        self.requests.of[route, pool, record.end._value_].value += 1  # an enumeration's own hash is Python
        for stage, spent in zip(
            STAGES_AND_PARTS, (*record.spent, record.engine_queue, record.engine_prefill), strict=True
        ):
            if spent is not None:
                self.stage.of[route, stage].observe(spent)
        for objective, met in (("ttft", record.ttft_met), ("tpot", record.tpot_met), ("total", record.total_met)):
            if met is not None:
                self.slo.of[route, objective, "true" if met else "false"].value += 1
        for attempt in record.attempts:
            self.attempts.of[attempt.pool, attempt.kind._value_, attempt.ending._value_].value += 1
            if attempt.kind is AttemptKind.HEDGE:
                self.hedges.of[route, _result(record, attempt)].value += 1
        if record.ttft is not None:
            self._answered(record, record.ttft, route, pool)

    def _answered(self, record: Record, ttft: float, route: str, pool: str) -> None:
        pair = route, pool
        tally = self.ttft.of[pair]
        tally.observe(ttft)
        if record.trace_id and ((trace := record.trace) is None or trace.sampled or record.ttft_met is False):
            tally.examples[bisect_left(tally.bounds, ttft)] = record.trace_id, ttft, record.wall + ttft
        if record.tpot is not None:
            self.tpot.of[pair].observe(record.tpot)
        estimated, reported = record.prompt_tokens_estimated or 0, record.prompt_tokens_reported
        prompt = estimated if reported is None else reported
        self.tokens.of[route, pool, "input"].value += prompt
        self.tokens.of[route, pool, "output"].value += record.output_tokens or 0
        self.cost.of[pair].value += record.cost_usd
        if estimated and record.cached_tokens_predicted is not None:
            self.hit.of[pool, "predicted"].observe(record.cached_tokens_predicted / estimated)
        if reported and record.cached_tokens_reported is not None:
            self.hit.of[pool, "reported"].observe(record.cached_tokens_reported / reported)
        if record.stream:
            self.by_prompt.of[route, PROMPTS[bisect_right(SIZES, prompt)]].observe(ttft)
            self._predicted(record, ttft, pool)

    def _predicted(self, record: Record, ttft: float, pool: str) -> None:
        """Compare TTFT with the prediction for the attempt that answered. For streams only: without streaming the
        first byte comes with the last."""
        p50, p90 = record.ttft_predicted_p50, record.ttft_predicted_p90
        if p50 is not None:
            by_pool = (pool,)
            self.predicted.of[by_pool].observe(p50)
            self.error.of[by_pool].observe(ttft - p50)
            self.covered.of[pool, "p50", "true" if ttft <= p50 else "false"].value += 1
        if p90 is not None:
            self.covered.of[pool, "p90", "true" if ttft <= p90 else "false"].value += 1


def _result(record: Record, hedge: AttemptRecord) -> str:
    """Result of a hedge; the last attempt of a Record is the one that answered."""
    if record.ttft is not None and hedge is record.attempts[-1]:
        return "won"
    return "lost" if hedge.ending is AttemptOutcome.CANCELLED else "failed"
