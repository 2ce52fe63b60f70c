"""Counts the GenAI metrics of OpenTelemetry from Records, and exports them as sums since the start.

`gen_ai.server.*` is what callers saw, once per request; `gen_ai.client.*` is what endpoints did, once per attempt.
Attribute values come from the configuration only: a model that a caller named (passthrough) is left out. Nothing is
measured per chunk: the mean of an answer stands for each of its gaps. Counting here instead of in the SDK's instruments
costs a tenth of their 13 us per value; the exporter and its values are the SDK's.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import time_ns

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.observe.otel import semconv as names
from gateway.observe.otel.spans import NO_ENGINE_ERROR, ServedEndpoint, error_type
from gateway.observe.record import UPSTREAM, AttemptRecord, Record

log = logging.getLogger("firsttoken")

CUMULATIVE = AggregationTemporality.CUMULATIVE
INTERVAL = 60_000  # ms between two exports, unless OTEL_METRIC_EXPORT_INTERVAL is set

Attributes = tuple[tuple[str, str | int], ...]


@dataclass(slots=True)
class ValueCounts:
    """One series of a histogram: values by bucket, with their sum and range."""

    counts: list[int]
    sum: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")


@dataclass(slots=True)
class CumulativeHistogram:
    """A histogram of OpenTelemetry: one ValueCounts per set of attributes."""

    name: str
    unit: str
    bounds: tuple[float, ...]
    series: dict[Attributes, ValueCounts] = field(default_factory=dict)

    def observe(self, attributes: Attributes, value: float, times: int = 1) -> None:
        found = self.series.get(attributes)
        if found is None:
            found = self.series[attributes] = ValueCounts([0] * (len(self.bounds) + 1))
        found.counts[bisect_left(self.bounds, value)] += times
        found.sum += value * times
        found.least = min(found.least, value)
        found.most = max(found.most, value)

    def metric(self, start: int, now: int) -> Metric:
        points = [
            HistogramDataPoint(
                attributes=dict(attributes),
                start_time_unix_nano=start,
                time_unix_nano=now,
                count=sum(found.counts),
                sum=found.sum,
                bucket_counts=tuple(found.counts),
                explicit_bounds=self.bounds,
                min=found.least,
                max=found.most,
            )
            for attributes, found in list(self.series.items())
        ]
        return Metric(self.name, "", self.unit, Histogram(points, CUMULATIVE))


@dataclass(slots=True)
class CumulativeCounter:
    """A monotonic sum of OpenTelemetry, by attributes."""

    name: str
    unit: str
    series: dict[Attributes, int] = field(default_factory=dict)

    def add(self, attributes: Attributes, amount: int) -> None:
        self.series[attributes] = self.series.get(attributes, 0) + amount

    def metric(self, start: int, now: int) -> Metric:
        points = [
            NumberDataPoint(attributes=dict(attributes), start_time_unix_nano=start, time_unix_nano=now, value=value)
            for attributes, value in list(self.series.items())
        ]
        return Metric(self.name, "", self.unit, Sum(points, CUMULATIVE, is_monotonic=True))


class GenAiMetrics:
    """`count` each Record; `metrics` returns everything since the start. `endpoints` may grow at a reload."""

    def __init__(self, called: names.MetricNames, endpoints: Mapping[str, ServedEndpoint]) -> None:
        self._endpoints = endpoints
        self._start = time_ns()
        self.server_duration = CumulativeHistogram(names.SERVER_DURATION, "s", names.DURATION_BUCKETS)
        self.server_ttft = CumulativeHistogram(names.SERVER_TTFT, "s", names.SERVER_TTFT_BUCKETS)
        self.server_tpot = CumulativeHistogram(names.SERVER_TPOT, "s", names.TPOT_BUCKETS)
        self.duration = CumulativeHistogram(called.duration, "s", names.DURATION_BUCKETS)
        self.first_chunk = CumulativeHistogram(called.first_chunk, "s", names.DURATION_BUCKETS)
        self.per_chunk = CumulativeHistogram(called.per_chunk, "s", names.DURATION_BUCKETS)
        self.usage = CumulativeHistogram(called.usage, "{token}", names.TOKEN_BUCKETS) if called.usage else None
        self.counts = {kind: CumulativeCounter(name, "{token}") for kind, name in called.counts.items()}
        self.sizes = {
            kind: CumulativeHistogram(name, "{token}", names.TOKEN_BUCKETS) for kind, name in called.sizes.items()
        }
        self._attributes: dict[tuple[object, ...], Attributes] = {}

    def metrics(self) -> list[Metric]:
        """All metrics that have a value."""
        now = time_ns()
        return [each.metric(self._start, now) for each in self._every() if each.series]

    def _every(self) -> Iterator[CumulativeHistogram | CumulativeCounter]:
        yield from (self.server_duration, self.server_ttft, self.server_tpot)
        yield from (self.duration, self.first_chunk, self.per_chunk)
        if self.usage is not None:
            yield self.usage
        yield from self.counts.values()
        yield from self.sizes.values()

    def count(self, record: Record) -> None:
        of_request = self._of_request(record)
        self.server_duration.observe(of_request, record.total)
        if record.ttft is not None and record.stream:
            self.server_ttft.observe(of_request, record.ttft)
        if record.tpot is not None:
            self.server_tpot.observe(of_request, record.tpot)
        for attempt in record.attempts:
            self.duration.observe(self._of_attempt(record, attempt), attempt.ended - attempt.opened)
        if record.ttft is not None and record.attempts:
            self._count_answer(record, record.attempts[-1])

    def _count_answer(self, record: Record, attempt: AttemptRecord) -> None:
        attributes = self._of_attempt(record, attempt)
        if record.stream:
            first_token_in = sum(seconds for seconds in record.spent[: UPSTREAM + 1] if seconds is not None)
            self.first_chunk.observe(attributes, first_token_in - attempt.opened)
        if record.tpot is not None and record.output_tokens is not None and record.output_tokens > 1:
            self.per_chunk.observe(attributes, record.tpot, times=record.output_tokens - 1)
        used = {
            "input": record.prompt_tokens_reported,
            "output": record.output_tokens,
            "cache_read": record.cached_tokens_reported,
        }
        for kind, tokens in used.items():
            if tokens is not None:
                self._count_tokens(attributes, kind, tokens)

    def _count_tokens(self, attributes: Attributes, kind: str, tokens: int) -> None:
        if self.usage is not None and kind != "cache_read":  # a type that this histogram does not have
            self.usage.observe((*attributes, (names.TOKEN_TYPE, kind)), tokens)
        if kind in self.counts:
            self.counts[kind].add(attributes, tokens)
        if kind in self.sizes:
            self.sizes[kind].observe(attributes, tokens)

    def _of_request(self, record: Record) -> Attributes:
        key = record.operation, record.route, record.endpoint, record.end, record.status
        found = self._attributes.get(key)
        if found is None:
            endpoint = self._endpoints.get(record.endpoint)
            found = self._attributes[key] = _known(
                {
                    names.OPERATION: names.OPERATIONS.get(record.operation, record.operation),
                    names.PROVIDER: "firsttoken" if endpoint is None else endpoint.provider,
                    names.REQUEST_MODEL: record.route,
                    names.RESPONSE_MODEL: "" if endpoint is None else endpoint.model,
                    names.ERROR_TYPE: error_type(record),
                }
            )
        return found

    def _of_attempt(self, record: Record, attempt: AttemptRecord) -> Attributes:
        key = record.operation, attempt.endpoint, attempt.ending
        found = self._attributes.get(key)
        if found is None:
            endpoint = self._endpoints.get(attempt.endpoint) or ServedEndpoint("", "", "", 0)
            found = self._attributes[key] = _known(
                {
                    names.OPERATION: names.OPERATIONS.get(record.operation, record.operation),
                    names.PROVIDER: endpoint.provider,
                    names.REQUEST_MODEL: endpoint.model,
                    names.RESPONSE_MODEL: endpoint.model,
                    names.SERVER_ADDRESS: endpoint.address,
                    names.SERVER_PORT: endpoint.port or None,
                    names.ERROR_TYPE: None if attempt.ending in NO_ENGINE_ERROR else attempt.ending.value,
                }
            )
        return found


def _known(attributes: Mapping[str, str | int | None]) -> Attributes:
    return tuple((name, value) for name, value in attributes.items() if value is not None and value not in ("", "-"))


class GenAiReader:
    """Exports GenAiMetrics every OTEL_METRIC_EXPORT_INTERVAL milliseconds and at shutdown, in a thread of its own."""

    def __init__(
        self, exporter: MetricExporter, metrics: GenAiMetrics, resource: Resource, scope: InstrumentationScope
    ) -> None:
        self.exporter = exporter
        self.metrics = metrics
        self.resource = resource
        self.scope = scope
        interval = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
        self._seconds = (int(interval) if interval.isdecimal() and int(interval) else INTERVAL) / 1e3
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._export()
        self._export()

    def _export(self) -> None:
        """A failure is logged by the exporter; the next export has the same sums and more."""
        try:
            if metrics := self.metrics.metrics():
                of_scope = ScopeMetrics(self.scope, metrics, schema_url="")
                self.exporter.export(MetricsData([ResourceMetrics(self.resource, [of_scope], schema_url="")]))
        except Exception:
            log.exception("the metric exporter failed")

    def shutdown(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.exporter.shutdown()
