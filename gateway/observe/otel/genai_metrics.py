"""The GenAI metrics of OpenTelemetry, counted from Records and told to a collector as sums since the start.

`gen_ai.server.*` is what callers saw, once for each request; `gen_ai.client.*` is what endpoints did, once for each
attempt. Attributes come from the configuration only: a model that a caller named (passthrough) is left out. Nothing is
measured for each chunk: the mean of an answer stands for each of its gaps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping

from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Histogram,
    ScopeMetrics,
    Sum,
)

from gateway.observe.metrics.series import Count, HistogramCounts
from gateway.observe.otel import semconv as names
from gateway.observe.otel.spans import WANTED, Served, attribute, error_type
from gateway.observe.record import UPSTREAM, AttemptRecord, Record

CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
Attributes = tuple[tuple[str, str | int], ...]


class _Histogram:
    def __init__(self, name: str, unit: str, bounds: tuple[float, ...]) -> None:
        self.name, self.unit, self.bounds = name, unit, bounds
        self.of: defaultdict[Attributes, HistogramCounts] = defaultdict(lambda: HistogramCounts(bounds))

    def fill(self, told: ScopeMetrics, since: int, now: int) -> Iterator[None]:
        if not self.of:
            return
        data = Histogram(aggregation_temporality=CUMULATIVE)
        points = told.metrics.add(name=self.name, unit=self.unit, histogram=data).histogram.data_points
        for attributes, tally in list(self.of.items()):
            points.add(
                attributes=[attribute(*one) for one in attributes],
                start_time_unix_nano=since,
                time_unix_nano=now,
                count=sum(tally.counts),
                sum=tally.sum,
                bucket_counts=tally.counts,
                explicit_bounds=self.bounds,
            )
            yield


class _Counter:
    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.of: defaultdict[Attributes, Count] = defaultdict(Count)

    def fill(self, told: ScopeMetrics, since: int, now: int) -> Iterator[None]:
        if not self.of:
            return
        data = Sum(aggregation_temporality=CUMULATIVE, is_monotonic=True)
        points = told.metrics.add(name=self.name, unit=self.unit, sum=data).sum.data_points
        for attributes, count in list(self.of.items()):
            points.add(
                attributes=[attribute(*one) for one in attributes],
                start_time_unix_nano=since,
                time_unix_nano=now,
                as_int=int(count.value),
            )
            yield


class GenAi:
    """`count` each Record; `fill` puts what there is into a message."""

    def __init__(self, called: names.SemanticNames, served: Mapping[str, Served]) -> None:
        self._served = served
        self.server_duration = _Histogram(names.SERVER_DURATION, "s", names.DURATION_BUCKETS)
        self.server_ttft = _Histogram(names.SERVER_TTFT, "s", names.SERVER_TTFT_BUCKETS)
        self.server_tpot = _Histogram(names.SERVER_TPOT, "s", names.TPOT_BUCKETS)
        self.duration = _Histogram(called.duration, "s", names.DURATION_BUCKETS)
        self.first_chunk = _Histogram(called.first_chunk, "s", names.DURATION_BUCKETS)
        self.per_chunk = _Histogram(called.per_chunk, "s", names.DURATION_BUCKETS)
        self.usage = _Histogram(called.usage, "{token}", names.TOKEN_BUCKETS) if called.usage else None
        self.counts = {type: _Counter(name, "{token}") for type, name in called.counts.items()}
        self.sizes = {type: _Histogram(name, "{token}", names.TOKEN_BUCKETS) for type, name in called.sizes.items()}
        self._kept: dict[tuple[object, ...], Attributes] = {}

    def fill(self, told: ScopeMetrics, since: int, now: int) -> Iterator[None]:
        """A point at a time, so that others get their turn between two. Times as Unix time in ns."""
        asked = (self.duration, self.first_chunk, self.per_chunk, *([self.usage] if self.usage is not None else []))
        seen = (self.server_duration, self.server_ttft, self.server_tpot)
        every: tuple[_Histogram | _Counter, ...] = (*seen, *asked, *self.counts.values(), *self.sizes.values())
        for series in every:
            yield from series.fill(told, since, now)

    def count(self, record: Record) -> None:
        of_request = self._of_request(record)
        self.server_duration.of[of_request].observe(record.total)
        if record.ttft is not None and record.stream:
            self.server_ttft.of[of_request].observe(record.ttft)
        if record.tpot is not None:
            self.server_tpot.of[of_request].observe(record.tpot)
        for attempt in record.attempts:
            self.duration.of[self._of_attempt(record, attempt)].observe(attempt.ended - attempt.opened)
        if record.ttft is not None and record.attempts:
            self._answered(record, record.attempts[-1])

    def _answered(self, record: Record, attempt: AttemptRecord) -> None:
        attributes = self._of_attempt(record, attempt)
        if record.stream:
            first_in = sum(spent for spent in record.spent[: UPSTREAM + 1] if spent is not None)
            self.first_chunk.of[attributes].observe(first_in - attempt.opened)
        if record.tpot is not None and record.output_tokens is not None:
            gaps, tally = record.output_tokens - 1, self.per_chunk.of[attributes]
            tally.counts[bisect_left(tally.bounds, record.tpot)] += gaps
            tally.sum += gaps * record.tpot
        for type, tokens in (
            ("input", record.prompt_tokens_reported),
            ("output", record.output_tokens),
            ("cache_read", record.cached_tokens_reported),
        ):
            if tokens is not None:
                self._tokens(attributes, type, tokens)

    def _tokens(self, attributes: Attributes, type: str, tokens: int) -> None:
        if self.usage is not None and type != "cache_read":  # which that histogram has no type for
            self.usage.of[(*attributes, (names.TOKEN_TYPE, type))].observe(tokens)
        if type in self.counts:
            self.counts[type].of[attributes].value += tokens
        if type in self.sizes:
            self.sizes[type].of[attributes].observe(tokens)

    # -- attributes -----------------------------------------------------------------------

    def _of_request(self, record: Record) -> Attributes:
        key = record.operation, record.route, record.endpoint, record.end, record.status
        found = self._kept.get(key)
        if found is None:
            served = self._served.get(record.endpoint)
            found = self._kept[key] = _said(
                (names.OPERATION, names.OPERATIONS.get(record.operation, record.operation)),
                (names.PROVIDER, "firsttoken" if served is None else served.provider),
                (names.REQUEST_MODEL, record.route),
                (names.RESPONSE_MODEL, "" if served is None else served.model),
                (names.ERROR_TYPE, error_type(record)),
            )
        return found

    def _of_attempt(self, record: Record, attempt: AttemptRecord) -> Attributes:
        key = record.operation, attempt.endpoint, attempt.ending
        found = self._kept.get(key)
        if found is None:
            served = self._served.get(attempt.endpoint)
            model = "" if served is None else served.model
            found = self._kept[key] = _said(
                (names.OPERATION, names.OPERATIONS.get(record.operation, record.operation)),
                (names.PROVIDER, "" if served is None else served.provider),
                (names.REQUEST_MODEL, model),
                (names.RESPONSE_MODEL, model),
                (names.SERVER_ADDRESS, "" if served is None else served.address),
                (names.SERVER_PORT, None if served is None else served.port),
                (names.ERROR_TYPE, None if attempt.ending in WANTED else attempt.ending.value),
            )
        return found


def _said(*told: tuple[str, str | int | None]) -> Attributes:
    return tuple((name, value) for name, value in told if value not in ("", "-", None))
