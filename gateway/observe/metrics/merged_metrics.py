"""Metrics of several workers as those of one gateway.

Rules:
- Counters and histograms are added up, over running and exited workers: a total never decreases. The latest exemplar
  of a bucket stays.
- A gauge is merged as the metric table says. Queue depths add up: every worker has a queue. Every worker reports the
  load of all endpoints, with different delays: the largest value stands. Of endpoint states the worst stands: workers
  detect failures at different times.
- Metrics of a process (`process_*`, `python_*`) stay apart, by worker.
- Of a worker that does not answer the last known counters stand; those of an exited one are added to its successor's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import add

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from gateway.observe.metrics.metric_family import Merge
from gateway.observe.metrics.metric_table import BY_FAMILY
from gateway.observe.metrics.series import gauge, totals

ADDED = ("counter", "histogram")
OF_PROCESS = ("process_", "python_")
MERGE: Mapping[Merge, Callable[[float, float], float]] = {Merge.SUM: add, Merge.MAX: max, Merge.MIN: min}

Counts = tuple[int, list[Metric]]  # starts of a worker so far, which tell a process from its predecessor; its metrics


class MergedMetrics(Collector):
    """Metrics of all workers, as of the last update. `retired`: of exited processes; `keep` is given these when one
    more has exited."""

    def __init__(self, retired: list[Metric], keep: Callable[[list[Metric]], object]) -> None:
        self._retired, self._keep = retired, keep
        self._starts: dict[int, int] = {}  # of the process that answered last, by worker number
        self._last: dict[int | None, list[Metric]] = {}  # and the metrics of that process
        self._answered = 0  # workers, in the last update
        self._exposed = False  # since then

    def update(self, found: Mapping[int, Counts]) -> None:
        """Takes the counts of the workers that have answered, by number."""
        for number, (starts, metrics) in found.items():
            if self._starts.get(number, starts) != starts:
                self._retired = add_retired(self._retired, self._last[number])
                self._keep(self._retired)
            before = [] if self._exposed else self._last.get(number, [])
            self._starts[number] = starts
            self._last[number] = keep_maxima(before, metrics)
        self._answered = len(found)
        self._exposed = False

    def on_exposed(self) -> None:
        """Prometheus has read the last update: maxima begin again."""
        self._exposed = True

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_workers", [((), self._answered)])
        starts = (((str(number),), count) for number, count in sorted(self._starts.items()))
        yield from totals("firsttoken_worker_starts_total", starts)
        yield from merge_metrics({None: self._retired, **self._last})


def encode_counts(starts: int, metrics: Iterable[Metric]) -> bytes:
    fields = [(metric.name, metric.documentation, metric.type, metric.samples) for metric in metrics]
    return msgspec.msgpack.encode((starts, fields))


def decode_counts(encoded: bytes) -> Counts:
    starts, fields = msgspec.msgpack.decode(encoded)
    metrics = []
    for name, documentation, type, samples in fields:
        metrics.append(metric := Metric(name, documentation, type))
        for sample_name, labels, value, _, exemplar, *_ in samples:
            metric.add_sample(sample_name, labels, value, exemplar=exemplar and Exemplar(*exemplar))
    return starts, metrics


def merge_metrics(by_worker: Mapping[int | None, Iterable[Metric]]) -> list[Metric]:
    """`by_worker`: by worker number; None: all exited workers. Names and labels keep their first order."""
    metrics: dict[str, Metric] = {}
    merged = defaultdict[str, dict[tuple[object, ...], Sample]](dict)
    for worker, found in by_worker.items():
        for metric in found:
            metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            combine, samples = _merge_of(metric), merged[metric.name]
            for sample in _labelled(metric, worker):
                key = sample.name, *sample.labels.items()
                samples[key] = _merged(samples[key], sample, combine) if key in samples else sample
    for name, metric in metrics.items():
        metric.samples = [*merged[name].values()]
    return [*metrics.values()]


def _merge_of(metric: Metric) -> Callable[[float, float], float]:
    if metric.type in ADDED:
        return add
    row = BY_FAMILY.get(metric.name)
    return max if row is None else MERGE[row.merge]


def _labelled(metric: Metric, worker: int | None) -> Iterable[Sample]:
    if not metric.name.startswith(OF_PROCESS):
        return metric.samples
    return [sample._replace(labels={**sample.labels, "worker": str(worker)}) for sample in metric.samples]


def _merged(one: Sample, other: Sample, combine: Callable[[float, float], float]) -> Sample:
    exemplars = [sample.exemplar for sample in (one, other) if sample.exemplar]
    latest = max(exemplars, key=lambda exemplar: float(exemplar.timestamp or 0.0), default=None)
    return Sample(one.name, one.labels, combine(one.value, other.value), exemplar=latest)


def add_retired(retired: Iterable[Metric], last: Iterable[Metric]) -> list[Metric]:
    """Totals of exited workers, with the last counters of one more."""
    counters = [
        metric for metric in (*retired, *last) if metric.type in ADDED and not metric.name.startswith(OF_PROCESS)
    ]
    return merge_metrics({None: counters})


def keep_maxima(before: Iterable[Metric], now: Iterable[Metric]) -> list[Metric]:
    """`now`, with each `*_max_*` gauge at least as in `before`: workers reset such gauges at each read."""
    maxima = {metric.name: metric for metric in before if metric.type == "gauge" and "_max_" in metric.name}
    return [merge_metrics({1: [maxima[metric.name], metric]})[0] if metric.name in maxima else metric for metric in now]
