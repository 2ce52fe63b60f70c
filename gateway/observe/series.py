"""Counters and histograms of one thread: a dictionary look-up and an addition, without a lock.

The library's own take a lock for each addition and walk the buckets: 23 us a Record. These are
written on the event loop alone and handed to the library as they are when Prometheus asks, which
is on the event loop too. What was never counted is not shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Child = TypeVar("Child")
Labels = tuple[str, ...]


class Count:
    """A counter's value for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Tally:
    """A histogram's buckets for one set of labels; `bounds` are upper and inclusive, +Inf is implied."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Children(dict[Labels, Child]):
    """`children[label values]`, made the first time and kept."""

    def __init__(self, new: Callable[[], Child]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, values: Labels) -> Child:
        child = self[values] = self._new()
        return child


class Series(Collector, Generic[Child]):
    """One metric. `of` has its children by label values, in the order of `labels`."""

    def __init__(self, name: str, doc: str, labels: Sequence[str], new: Callable[[], Child]) -> None:
        self.name, self.doc, self.labels = name, doc, labels
        self.of = Children(new)


class Counter(Series[Count]):
    """Its name is written without `_total`, which the exposition adds."""

    def __init__(self, name: str, doc: str, *labels: str) -> None:
        super().__init__(name, doc, labels, Count)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.doc, labels=self.labels)
        for values, child in self.of.items():
            family.add_metric(values, child.value)
        yield family


class Histogram(Series[Tally]):
    """`bounds`: ascending upper bounds, in the metric's unit."""

    def __init__(self, name: str, doc: str, *labels: str, bounds: Sequence[float]) -> None:
        super().__init__(name, doc, labels, lambda: Tally(bounds))
        self.bounds = bounds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.doc, labels=self.labels)
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for values, child in self.of.items():
            if any(child.counts):
                buckets = list(zip(bounds, accumulate(child.counts), strict=True))
                family.add_metric(values, buckets=buckets, sum_value=child.sum)
        yield family
