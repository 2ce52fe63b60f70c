"""Counters and histograms for one thread, the event loop: a dictionary look-up and an addition, without a lock.

The instruments of prometheus-client lock for each addition and walk the buckets: 23 us a Record. Series without a
count are not shown. A scrape copies the numbers at once (0.3 ms for a thousand series); samples of prometheus-client,
which take a hundred times as long, are made of the copy on access, in a thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from gateway.observe.metrics.metric_table import CATALOG, Family, MetricKind

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

    def copy(self) -> HistogramCounts:
        made = HistogramCounts(self.bounds)
        made.counts = self.counts.copy()
        made.examples = self.examples.copy()
        made.sum = self.sum
        return made

    def refine(self, bounds: Sequence[float]) -> None:
        """Adds bounds. Earlier observations stay in the bucket of the next old bound."""
        counts, examples = [0] * (len(bounds) + 1), {}
        ends = [*self.bounds, float("inf")]
        for place, end in enumerate(ends):
            now_at = bisect_left(bounds, end)
            counts[now_at] = self.counts[place]
            if place in self.examples:
                examples[now_at] = self.examples[place]
        self.bounds = bounds
        self.counts = counts
        self.examples = examples


class CollectedFamily(Metric):
    """Copy of a family at collection time. Any thread may read the samples."""

    def __init__(self, name: str, doc: str, type: str, made: Callable[[], Metric]) -> None:
        self._made = made
        super().__init__(name, doc, type)

    @property
    def samples(self) -> list[Sample]:
        return self._samples

    @samples.setter
    def samples(self, _: object) -> None:
        """The library's own constructor begins with none."""

    @cached_property
    def _samples(self) -> list[Sample]:
        return self._made().samples


class Children(dict[Labels, Child]):
    """`children[label values]`, made the first time and kept."""

    def __init__(self, new: Callable[[], Child]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, values: Labels) -> Child:
        child = self[values] = self._new()
        return child


class Series(Collector, Generic[Child]):
    """One metric. `of`: children by label values, in the order of `labels`."""

    def __init__(self, name: str, doc: str, labels: Sequence[str], new: Callable[[], Child]) -> None:
        self.name = name
        self.doc = doc
        self.labels = labels
        self.of = Children(new)


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
        """These as well, from now on."""
        self.bounds = tuple(sorted({*self.bounds, *bounds}))
        for tally in self.of.values():
            tally.refine(self.bounds)

    def collect(self) -> Iterable[Metric]:
        upper = self.bounds
        tallies = [(values, child.copy()) for values, child in self.of.items() if any(child.counts)]

        def made() -> Metric:
            family = HistogramMetricFamily(self.name, self.doc, labels=self.labels)
            bounds = [*map(floatToGoString, upper), "+Inf"]
            for values, tally in tallies:
                family.add_metric(values, buckets=list(_buckets(bounds, tally)), sum_value=tally.sum)
            return family

        yield CollectedFamily(self.name, self.doc, "histogram", made)


def _buckets(
    bounds: Sequence[str], tally: HistogramCounts
) -> Iterable[tuple[str, float] | tuple[str, float, Exemplar]]:
    for place, (bound, count) in enumerate(zip(bounds, accumulate(tally.counts), strict=True)):
        if place in tally.examples:
            trace_id, value, at = tally.examples[place]
            yield bound, count, Exemplar({"trace_id": trace_id}, value, at)
        else:
            yield bound, count


# -- of the catalogue ----------------------------------------------------------------------


def counter(name: str) -> Counter:
    """`name` as in the catalogue: with `_total`."""
    row = _row(name, MetricKind.COUNTER)
    return Counter(row.family, row.help, *row.labels)


def histogram(name: str, bounds: Iterable[float] = ()) -> Histogram:
    """`bounds`: more than the catalogue's."""
    row = _row(name, MetricKind.HISTOGRAM)
    return Histogram(row.family, row.help, *row.labels, bounds=tuple(sorted({*row.bounds, *bounds})))


def total(name: str, value: float) -> Iterable[Metric]:
    """Present value of a counter without labels, counted elsewhere."""
    series = counter(name)
    series.of[()].value = value
    return series.collect()


def gauge(name: str, values: Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """As of now."""
    row = _row(name, MetricKind.GAUGE)
    family = GaugeMetricFamily(row.family, row.help, labels=row.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _row(name: str, kind: MetricKind) -> Family:
    row = CATALOG[name]
    assert row.kind is kind, f"{name} is a {row.kind}"
    return row
