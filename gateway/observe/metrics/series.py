"""Counters and histograms for one thread, the event loop: a dictionary look-up and an addition, without a lock.

The instruments of prometheus-client lock for each addition and walk the buckets: 23 us a Record. Series without a
count are not shown. A scrape copies the numbers at once (0.3 ms for a thousand series); samples of prometheus-client
take a hundred times as long, and are made of the copy on access, in a thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from gateway.observe.metrics.metric_family import Family, MetricKind
from gateway.observe.metrics.metric_table import CATALOG

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


Observed = list[tuple[HistogramCounts, float]]


def observe_all(observed: Observed) -> None:
    """Observe the values of one request, which go into twenty histograms, in one pass."""
    for child, value in observed:
        child.counts[bisect_left(child.bounds, value)] += 1
        child.sum += value


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


def totals(name: str, values: Iterable[tuple[Labels, float]]) -> Iterable[Metric]:
    """Present values of a counter, counted elsewhere."""
    series = counter(name)
    for labels, value in values:
        series.of[labels].value = value
    return series.collect()


def gauge(name: str, values: Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """Present values of a gauge."""
    row = _row(name, MetricKind.GAUGE)
    family = GaugeMetricFamily(row.family, row.help, labels=row.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family
