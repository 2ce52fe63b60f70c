"""Counts the GenAI metrics of OpenTelemetry from Records, and exports them as sums since the start.

`gen_ai.server.*` is the callers' view, once per request; `gen_ai.client.*` is the endpoints' work, once per attempt.
The conventions are in development and renamed the client metrics once: the operator selects the set by OpenTelemetry's
own variable, and the default is the older set, known to dashboards.

Attribute values come from the configuration only: a model that a caller named (passthrough) is left out. Nothing is
measured per chunk: the mean of an answer stands for each gap; the SDK's instruments cannot record a value several
times at once, and take 13 us per value, ten times as long as counting here. The exporter is the SDK's.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from time import time_ns
from typing import Protocol

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import AttributeValue

from gateway.observe.otel.spans import UNKNOWN, ServedEndpoint, attempt_attributes, known, request_attributes
from gateway.observe.record import UPSTREAM, AttemptRecord, Record

log = logging.getLogger("firsttoken")

OPT_IN, LATEST = "OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental"
CUMULATIVE = AggregationTemporality.CUMULATIVE
INTERVAL = 60_000  # ms between two exports, unless OTEL_METRIC_EXPORT_INTERVAL is set

# Bucket bounds of the conventions: s, s, s, tokens.
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = tuple(float(4**n) for n in range(14))

Attributes = tuple[tuple[str, AttributeValue], ...]


def latest_names(environ: Mapping[str, str]) -> bool:
    """True if the operator selects the newer names by OTEL_SEMCONV_STABILITY_OPT_IN, a list."""
    return LATEST in {name.strip() for name in environ.get(OPT_IN, "").split(",")}


@dataclass(slots=True)
class ValueCounts:
    """One series of a histogram: values by bucket, with sum and range."""

    counts: list[int]
    sum: float = 0.0
    least: float = inf
    most: float = -inf


@dataclass(slots=True)
class CumulativeHistogram:
    """A histogram of OpenTelemetry: one ValueCounts per set of attributes."""

    name: str
    bounds: tuple[float, ...]
    unit: str = "s"
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
    """A monotonic sum of tokens, by attributes."""

    name: str
    series: dict[Attributes, int] = field(default_factory=dict)

    def add(self, attributes: Attributes, amount: int) -> None:
        self.series[attributes] = self.series.get(attributes, 0) + amount

    def metric(self, start: int, now: int) -> Metric:
        points = [
            NumberDataPoint(attributes=dict(attributes), start_time_unix_nano=start, time_unix_nano=now, value=value)
            for attributes, value in list(self.series.items())
        ]
        return Metric(self.name, "", "{token}", Sum(points, CUMULATIVE, is_monotonic=True))


class GenAiMetrics:
    """`count` each Record; `metrics` returns everything since the start. `endpoints` may grow at a reload.

    Tokens are counted by type in one histogram by the older names, in a counter and a histogram per type by the
    `latest`.
    """

    def __init__(self, endpoints: Mapping[str, ServedEndpoint], *, latest: bool = False) -> None:
        self._endpoints = endpoints
        self._latest = latest
        self._start = time_ns()
        client = "gen_ai.client.inference" if latest else "gen_ai.client.operation"
        self.server_duration = CumulativeHistogram("gen_ai.server.request.duration", DURATION_BUCKETS)
        self.server_ttft = CumulativeHistogram("gen_ai.server.time_to_first_token", TTFT_BUCKETS)
        self.server_tpot = CumulativeHistogram("gen_ai.server.time_per_output_token", TPOT_BUCKETS)
        self.duration = CumulativeHistogram(f"{client}.duration", DURATION_BUCKETS)
        self.first_chunk = CumulativeHistogram(f"{client}.time_to_first_chunk", DURATION_BUCKETS)
        self.per_chunk = CumulativeHistogram(f"{client}.time_per_output_chunk", DURATION_BUCKETS)
        self.usage = CumulativeHistogram("gen_ai.client.token.usage", TOKEN_BUCKETS, "{token}")
        kinds = {"input": "input_tokens", "output": "output_tokens", "cache_read": "cache_read.input_tokens"}
        self.counts = {kind: CumulativeCounter(f"{client}.usage.{name}") for kind, name in kinds.items()}
        self.sizes = {
            kind: CumulativeHistogram(f"{client}.operation.{kinds[kind]}", TOKEN_BUCKETS, "{token}")
            for kind in ("input", "output")
        }
        self._requests: dict[str, dict[tuple[object, ...], Attributes]] = {}  # attributes, by endpoint
        self._attempts: dict[str, dict[tuple[object, ...], Attributes]] = {}

    def metrics(self) -> list[Metric]:
        """All metrics that have a value."""
        of_requests, now = (self.server_duration, self.server_ttft, self.server_tpot), time_ns()
        return [each.metric(self._start, now) for each in (*of_requests, *self._of_attempts()) if each.series]

    def _of_attempts(self) -> Iterator[CumulativeHistogram | CumulativeCounter]:
        yield from (self.duration, self.first_chunk, self.per_chunk, self.usage)
        yield from self.sizes.values()
        yield from self.counts.values()

    def forget(self, gone: Collection[str]) -> None:
        """Drop the series of attempts at endpoints, unless another has the same attributes: a pod with the address of
        an earlier one. Those of requests name no endpoint."""
        lost = [each for name in gone for each in self._attempts.pop(name, {}).values()]
        for name in gone:
            self._requests.pop(name, None)
        in_use = {each for known in self._attempts.values() for each in known.values()}
        dropped = {*lost} - in_use
        if not dropped:
            return
        for each in self._of_attempts():
            for attributes in [key for key in each.series if key in dropped or key[:-1] in dropped]:
                del each.series[attributes]

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
            if tokens is None:
                continue
            if self._latest:
                self.counts[kind].add(attributes, tokens)
            if kind in self.sizes:
                histogram = self.sizes[kind] if self._latest else self.usage
                typed = attributes if self._latest else (*attributes, ("gen_ai.token.type", kind))
                histogram.observe(typed, tokens)

    def _of_request(self, record: Record) -> Attributes:
        key = record.operation, record.route, record.end, record.status
        of_endpoint = self._requests.setdefault(record.endpoint, {})
        if (found := of_endpoint.get(key)) is None:
            endpoint = self._endpoints.get(record.endpoint)
            model = known({"gen_ai.response.model": None if endpoint is None else endpoint.model})
            found = of_endpoint[key] = (*request_attributes(record, endpoint).items(), *model.items())
        return found

    def _of_attempt(self, record: Record, attempt: AttemptRecord) -> Attributes:
        key = record.operation, attempt.ending
        of_endpoint = self._attempts.setdefault(attempt.endpoint, {})
        if (found := of_endpoint.get(key)) is None:
            endpoint = self._endpoints.get(attempt.endpoint, UNKNOWN)
            model = known({"gen_ai.response.model": endpoint.model})
            found = of_endpoint[key] = (*attempt_attributes(record, attempt, endpoint).items(), *model.items())
        return found


class ExportReason(Protocol):
    """Of the latest failure of an exporter."""

    @property
    def text(self) -> str: ...


class GenAiReader:
    """Exports GenAiMetrics every OTEL_METRIC_EXPORT_INTERVAL milliseconds and at shutdown, in a thread of its own."""

    def __init__(
        self,
        exporter: MetricExporter,
        metrics: GenAiMetrics,
        resource: Resource,
        scope: InstrumentationScope,
        reason: ExportReason,
    ) -> None:
        self.failed = 0  # exports
        self._is_failing = False
        self._reason = reason
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
        """After a failure the next export has the same sums and more."""
        result = MetricExportResult.SUCCESS
        try:
            if metrics := self.metrics.metrics():
                of_scope = ScopeMetrics(self.scope, metrics, schema_url="")
                data = MetricsData([ResourceMetrics(self.resource, [of_scope], schema_url="")])
                result = self.exporter.export(data)
        except Exception:
            log.exception("the metric exporter failed")
            result = MetricExportResult.FAILURE
        is_failing = result is not MetricExportResult.SUCCESS
        self.failed += is_failing
        if is_failing and not self._is_failing:
            log.warning("metric export fails: the collector gets no GenAI metrics (%s)", self._reason.text)
        elif self._is_failing and not is_failing:
            log.warning("metric export works again")
        self._is_failing = is_failing

    def shutdown(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.exporter.shutdown()
