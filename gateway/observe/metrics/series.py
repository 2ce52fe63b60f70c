"""Counters and histograms for one thread, the event loop: a dictionary look-up and an addition, without a lock.

The instruments of prometheus-client lock for each addition and walk the buckets: 23 us a Record. Series without a
count are not shown. A scrape copies the numbers at once (0.3 ms for a thousand series); samples of prometheus-client
take a hundred times as long, and are made of the copy on access, in a thread.

`RequestMetrics` counts Records. Label values come from the configuration, never from callers. Each route's TTFT budget
is a bucket, so attainment can be read exactly from the histogram.

`LoopLag` measures the lateness of the event loop, which delays every answer in progress. A timer due every PERIOD
measures the own lateness, the delay of any event at that moment. Stalls shorter than PERIOD may go unseen, longer
stalls cannot. Below a millisecond the lateness is the resolution of the timer. A request is charged with the longest
stall ending between arrival (or shortly before, with bytes in the socket) and first token. The stall is part of
the stages in which it fell, not a stage.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from gateway.observe.metrics.metric_table import CATALOG, Family, MetricKind
from gateway.observe.record import STAGE_NAMES, AttemptRecord, Record
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome

log = logging.getLogger("firsttoken")

Child = TypeVar("Child")
Labels = tuple[str, ...]
Example = tuple[str, float, float]  # trace id, value, Unix time


class Count:
    """Value of a counter for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class HistogramCounts:
    """Buckets of a histogram for one set of labels; `bounds` are inclusive upper bounds, +Inf is implied.

    `examples`: the latest exemplar of each bucket.
    """

    __slots__ = ("bounds", "counts", "examples", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.examples: dict[int, Example] = {}
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def with_bounds(self, bounds: Sequence[float]) -> HistogramCounts:
        """A copy with these bounds, the present ones among them.

        Earlier observations stay in the bucket of the next old bound.
        """
        made = HistogramCounts(bounds)
        made.sum = self.sum
        for place, end in enumerate([*self.bounds, inf]):
            moved = bisect_left(bounds, end)
            made.counts[moved] = self.counts[place]
            if place in self.examples:
                made.examples[moved] = self.examples[place]
        return made

    def buckets(self) -> Iterable[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Cumulative counts by upper bound, for prometheus-client."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for place, (bound, count) in enumerate(zip(bounds, accumulate(self.counts), strict=True)):
            if place in self.examples:
                trace_id, value, at = self.examples[place]
                yield bound, count, Exemplar({"trace_id": trace_id}, value, at)
            else:
                yield bound, count


class CollectedFamily(Metric):
    """Copy of a family at collection time. Any thread may read the samples."""

    def __init__(self, name: str, doc: str, type: str, made: Callable[[], Metric]) -> None:
        super().__init__(name, doc, type)
        del self.samples  # the empty list of the library's constructor
        self._made = made

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        return self._made().samples


class Series(Generic[Child]):
    """One metric. `of`: children by label values, in the order of `labels`; made at the first access and kept."""

    def __init__(self, name: str, doc: str, labels: Sequence[str], new: Callable[[], Child]) -> None:
        self.name = name
        self.doc = doc
        self.labels = labels
        self.of: dict[Labels, Child] = defaultdict(new)


class Counter(Series[Count]):
    """Named without `_total`, which the exposition adds."""

    def __init__(self, name: str, doc: str, *labels: str) -> None:
        super().__init__(name, doc, labels, Count)

    def collect(self) -> Iterable[Metric]:
        counts = [(values, child.value) for values, child in self.of.items()]

        def made() -> Metric:
            family = CounterMetricFamily(self.name, self.doc, labels=self.labels)
            for values, count in counts:
                family.add_metric(values, count)
            return family

        yield CollectedFamily(self.name, self.doc, "counter", made)


class Histogram(Series[HistogramCounts]):
    """`bounds`: ascending upper bounds, in the metric's unit."""

    def __init__(self, name: str, doc: str, *labels: str, bounds: Sequence[float]) -> None:
        super().__init__(name, doc, labels, lambda: HistogramCounts(self.bounds))
        self.bounds = bounds

    def refine(self, bounds: Sequence[float]) -> None:
        """Add bounds."""
        self.bounds = tuple(sorted({*self.bounds, *bounds}))
        for values, child in self.of.items():
            self.of[values] = child.with_bounds(self.bounds)

    def collect(self) -> Iterable[Metric]:
        copies = [(values, child.with_bounds(child.bounds)) for values, child in self.of.items() if any(child.counts)]

        def made() -> Metric:
            family = HistogramMetricFamily(self.name, self.doc, labels=self.labels)
            for values, copy in copies:
                family.add_metric(values, buckets=list(copy.buckets()), sum_value=copy.sum)
            return family

        yield CollectedFamily(self.name, self.doc, "histogram", made)


# -- of the table of metrics ---------------------------------------------------------------


def _row(name: str, kind: MetricKind) -> Family:
    row = CATALOG[name]
    assert row.kind is kind, f"{name} is a {row.kind}"
    return row


def counter(name: str) -> Counter:
    """`name` as in the table: with `_total`."""
    row = _row(name, MetricKind.COUNTER)
    return Counter(row.family, row.help, *row.labels)


def histogram(name: str, bounds: Iterable[float] = ()) -> Histogram:
    """`bounds`: more than the table's."""
    row = _row(name, MetricKind.HISTOGRAM)
    return Histogram(row.family, row.help, *row.labels, bounds=tuple(sorted({*row.bounds, *bounds})))


def total(name: str, value: float) -> Iterable[Metric]:
    """Present value of a counter without labels, counted elsewhere."""
    series = counter(name)
    series.of[()].value = value
    return series.collect()


def gauge(name: str, values: Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """Present values of a gauge."""
    row = _row(name, MetricKind.GAUGE)
    family = GaugeMetricFamily(row.family, row.help, labels=row.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


# -- the event loop ------------------------------------------------------------------------

PERIOD = 0.05  # s
STALL = 0.005  # s of lateness from which a stall is counted
LOG_INTERVAL = 60.0  # s between two log lines
SETTLING = 10.0  # s after the start without one: first connections and late imports stall, and are counted
BEFORE = 0.005  # s between the end of a stall and the reading of bytes that arrived meanwhile
KEPT = 600.0  # s of history; longer than a first token may take


class LoopLag:
    """Measures one event loop from `start` to `close`. Exports histogram, stalls and greatest lateness."""

    def __init__(self) -> None:
        self.seconds = histogram("firsttoken_loop_lag_seconds")
        self.stalls = counter("firsttoken_loop_stalls_total")
        self._stalled = self.stalls.of[()]  # shown from the start
        self._greatest = 0.0  # since the last scrape
        self._due = inf
        self._logged_at = -inf
        # Ends and sizes of past latenesses not exceeded later: `_late` descends.
        self._ended: list[float] = []
        self._late: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._logged_at = monotonic() + SETTLING - LOG_INTERVAL
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = monotonic() + PERIOD
        self._timer = loop.call_later(PERIOD, self._tick, loop)

    def close(self) -> None:
        self._due = inf
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = monotonic()
        self.saw(max(now - self._due, 0.0), now)
        self._schedule(loop)

    def saw(self, late: float, now: float) -> None:
        """Record a lateness of the timer, in seconds."""
        self.seconds.of[()].observe(late)
        self._greatest = max(self._greatest, late)
        while self._late and self._late[-1] <= late:
            self._late.pop()
            self._ended.pop()
        self._late.append(late)
        self._ended.append(now)
        if self._ended[0] < now - KEPT:
            del self._late[0], self._ended[0]
        if late >= STALL:
            self._stalled.value += 1
            if now - self._logged_at >= LOG_INTERVAL:
                self._logged_at = now
                log.warning("event loop stalled for %.1f ms (stall %d)", late * 1e3, self._stalled.value)

    def since(self, arrival: float, now: float) -> float:
        """Longest stall that may have delayed a request since `arrival`, a present stall included."""
        first = bisect_left(self._ended, arrival - BEFORE)
        past = self._late[first] if first < len(self._late) else 0.0
        return max(past, now - self._due)

    def collect(self) -> Iterable[Metric]:
        yield from self.seconds.collect()
        yield from self.stalls.collect()
        yield gauge("firsttoken_loop_lag_max_seconds", [((), self._greatest)])
        self._greatest = 0.0


# -- requests ------------------------------------------------------------------------------

BATCH = 16  # Records
STAGES_AND_PARTS = (*STAGE_NAMES, "engine_queue", "engine_prefill")  # the last two are parts of `upstream`
SIZES = (1_000, 4_000, 16_000, 64_000)  # tokens of prompt from which the next class begins
PROMPTS = ("<1k", "1k-4k", "4k-16k", "16k-64k", ">64k")


def budgets(routes: Iterable[Route]) -> tuple[float, ...]:
    """TTFT budgets of the routes."""
    return tuple(sorted({route.ttft.budget for route in routes if route.ttft is not None}))


class RequestMetrics:
    """Sink of Records. `loop_lag` is exported too; the owner of the event loop starts it."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[Route]) -> None:
        within = budgets(routes)
        self.requests = counter("firsttoken_requests_total")
        self.ttft = histogram("firsttoken_ttft_seconds", within)
        self.reasoning = histogram("firsttoken_first_reasoning_seconds", within)
        self.answer = histogram("firsttoken_first_answer_seconds", within)
        self.by_prompt = histogram("firsttoken_ttft_by_prompt_seconds", within)
        self.tpot = histogram("firsttoken_tpot_seconds")
        self.stage = histogram("firsttoken_stage_seconds")
        self.slo = counter("firsttoken_slo_total")
        self.slow = counter("firsttoken_slow_total")
        self.predicted = histogram("firsttoken_ttft_predicted_seconds")
        self.error = histogram("firsttoken_ttft_prediction_error_seconds")
        self.covered = counter("firsttoken_ttft_prediction_covered_total")
        self.hit = histogram("firsttoken_prefix_hit_ratio")
        self.size_error = histogram("firsttoken_prompt_tokens_error_ratio")
        self.attempts = counter("firsttoken_attempts_total")
        self.hedges = counter("firsttoken_hedges_total")
        self.external_refused = counter("firsttoken_external_refused_total")
        self.escalations = counter("firsttoken_escalations_total")
        self.left_out = counter("firsttoken_left_out_total")
        self.rescues = counter("firsttoken_rescues_total")
        self.cached = counter("firsttoken_answer_cache_total")
        self.junk = counter("firsttoken_junk_events_total")
        self.tokens = counter("firsttoken_tokens_total")
        self.cost = counter("firsttoken_cost_usd_total")
        self.tagged = counter("firsttoken_tagged_requests_total")
        self.tagged_tokens = counter("firsttoken_tagged_tokens_total")
        self.tagged_cost = counter("firsttoken_tagged_cost_usd_total")
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
        self.reasoning.refine(within)
        self.answer.refine(within)

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
        route, pool, ttft_met = record.route, record.pool, record.ttft_met
        self.requests.of[route, pool, record.end._value_].value += 1  # an enumeration's own hash is Python
        times = (*record.spent, record.engine_queue, record.engine_prefill)
        stages = self.stage.of
        for stage, spent in zip(STAGES_AND_PARTS, times, strict=True):
            if spent is not None:
                stages[route, stage].observe(spent)
        for objective, met in (("ttft", ttft_met), ("tpot", record.tpot_met), ("total", record.total_met)):
            if met is not None:
                self.slo.of[route, objective, "true" if met else "false"].value += 1
        if record.diagnosis is not None:
            self.slow.of[route, record.cause].value += 1
        for attempt in record.attempts:
            self.attempts.of[attempt.pool, attempt.kind._value_, attempt.ending._value_].value += 1
            self.cost.of[route, attempt.pool].value += attempt.cost_usd
            if attempt.junk:
                self.junk.of[(attempt.pool,)].value += attempt.junk
            if attempt.kind is AttemptKind.HEDGE:
                self.hedges.of[route, _result(record, attempt)].value += 1
        if record.external_refused:
            self.external_refused.of[(route,)].value += 1
        if record.escalated:
            self.escalations.of[route, record.escalated].value += 1
        for tag in record.tags:
            self.tagged.of[tag, record.end._value_].value += 1
            self.tagged_tokens.of[(tag,)].value += sum(attempt.tokens for attempt in record.attempts)
            self.tagged_cost.of[(tag,)].value += record.cost_usd
        if record.cache:
            self.cached.of[route, record.cache].value += 1
        for member in set(record.left_out.values()):
            self.left_out.of[route, pool, member].value += 1
        if record.rescue:
            self.rescues.of[route, record.rescue].value += 1
        if (ttft := record.ttft) is not None:
            tally = self.ttft.of[route, pool]
            tally.observe(ttft)
            if record.trace_id and ((trace := record.trace) is None or trace.sampled or ttft_met is False):
                tally.examples[bisect_left(tally.bounds, ttft)] = record.trace_id, ttft, record.wall + ttft
            if record.first_reasoning is not None:
                self.reasoning.of[route, pool].observe(record.first_reasoning)
            if record.first_answer is not None:
                self.answer.of[route, pool].observe(record.first_answer)
            self._count_answer(record, ttft, route, pool)

    def _count_answer(self, record: Record, ttft: float, route: str, pool: str) -> None:
        if record.tpot is not None:
            self.tpot.of[route, pool].observe(record.tpot)
        estimated, reported = record.prompt_tokens_estimated or 0, record.prompt_tokens_reported
        prompt = estimated if reported is None else reported
        self.tokens.of[route, pool, "input"].value += prompt
        self.tokens.of[route, pool, "output"].value += record.output_tokens or 0
        if estimated and reported:
            self.size_error.of[(pool,)].observe(abs(estimated / reported - 1.0))
        if estimated and record.cached_tokens_predicted is not None:
            self.hit.of[pool, "predicted"].observe(record.cached_tokens_predicted / estimated)
        if reported and record.cached_tokens_reported is not None:
            self.hit.of[pool, "reported"].observe(record.cached_tokens_reported / reported)
        if not record.stream:  # the first byte comes with the last: nothing to compare with a prediction
            return
        self.by_prompt.of[route, PROMPTS[bisect_right(SIZES, prompt)]].observe(ttft)
        p50, p90 = record.ttft_predicted_p50, record.ttft_predicted_p90
        if p50 is not None:
            self.predicted.of[(pool,)].observe(p50)
            self.error.of[(pool,)].observe(ttft - p50)
            self.covered.of[pool, "p50", "true" if ttft <= p50 else "false"].value += 1
        if p90 is not None:
            self.covered.of[pool, "p90", "true" if ttft <= p90 else "false"].value += 1


def _result(record: Record, hedge: AttemptRecord) -> str:
    """Result of a hedge; the last attempt of a Record has answered."""
    if record.ttft is not None and hedge is record.attempts[-1]:
        return "won"
    return "lost" if hedge.ending is AttemptOutcome.CANCELLED else "failed"
