"""Metrics of several workers as those of one gateway.

Rules:
- Counters and histograms are added up, over running and exited workers: a total never decreases. The latest exemplar
  of a bucket stays.
- A gauge is merged as the metric table says. Queue depths add up: every worker has a queue. Every worker reports the
  load of all endpoints, with different delays: the largest value stands. Of endpoint states the worst stands: workers
  detect failures at different times.
- Metrics of a process (`process_*`, `python_*`) stay apart, by worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import add

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from gateway.observe.metrics.metric_table import BY_FAMILY, Merge

ADDED = ("counter", "histogram")
OF_PROCESS = ("process_", "python_")
MERGE: Mapping[Merge, Callable[[float, float], float]] = {Merge.SUM: add, Merge.MAX: max, Merge.MIN: min}


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
