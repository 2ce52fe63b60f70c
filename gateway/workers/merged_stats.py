"""Merges metrics and endpoint views of several workers. Pure. (Recent requests: `gateway.admin.admin_views`.)

Rules for metrics:
- Counters and histograms are added up, over running and exited workers: a total never decreases. The latest exemplar
  of a bucket stays.
- A gauge is merged as the metric table says. Queue depths add up: every worker has its own queue. Every worker
  reports
  the load of all endpoints, with different delays: the largest value stands. Of endpoint states the worst stands:
  workers detect failures at different times.
- Metrics of a process (`process_*`, `python_*`) stay apart, by worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample

from gateway.observe.metrics.metric_table import BY_FAMILY, Merge

COUNTS = "/counts"  # path on a worker's private port: its metrics as `families`
ADDED = ("counter", "histogram")
OF_PROCESS = ("process_", "python_")
MERGE: Mapping[Merge, Callable[[float, float], float]] = {Merge.SUM: add, Merge.MAX: max, Merge.MIN: min}

Labels = tuple[tuple[str, str], ...]
Families = list[dict[str, Any]]


def families(metrics: Iterable[Metric]) -> Families:
    """Metrics as JSON values."""
    return [
        {
            "name": metric.name,
            "help": metric.documentation,
            "type": metric.type,
            "samples": [_sample(sample) for sample in metric.samples],
        }
        for metric in metrics
    ]


def _sample(sample: Sample) -> list[Any]:
    values = [sample.name, dict(sample.labels), sample.value]
    if (exemplar := sample.exemplar) is not None:
        values.append([dict(exemplar.labels), exemplar.value, exemplar.timestamp])
    return values


class MergedFamily:
    """One metric family over all workers."""

    def __init__(self, name: str, help: str, type: str) -> None:
        self.name = name
        self.help = help
        self.type = type
        self._values: dict[tuple[str, Labels], float] = {}  # by name of the sample and labels
        self._exemplars: dict[tuple[str, Labels], Exemplar] = {}
        row = BY_FAMILY.get(name)
        self._merge = MERGE[Merge.SUM if type in ADDED else Merge.MAX if row is None else row.merge]

    def add(self, samples: Iterable[Sequence[Any]], worker: int | None) -> None:
        for name, labelled, value, *exemplar in samples:
            labels = tuple(labelled.items())
            if self.name.startswith(OF_PROCESS):
                labels = (*labels, ("worker", str(worker)))
            key = name, labels
            self._values[key] = value if key not in self._values else self._merge(self._values[key], value)
            if exemplar:
                found = Exemplar(*exemplar[0])
                known = self._exemplars.get(key, found)
                self._exemplars[key] = max(known, found, key=lambda each: float(each.timestamp or 0.0))

    def metric(self) -> Metric:
        made = Metric(self.name, self.help, self.type)
        for key, value in self._values.items():
            made.add_sample(key[0], dict(key[1]), value, exemplar=self._exemplars.get(key))
        return made


def merge_families(by_worker: Mapping[int | None, Families]) -> list[Metric]:
    """`by_worker`: by worker number; None: all exited workers. Names and labels keep their first order."""
    merged: dict[str, MergedFamily] = {}
    for worker, found in by_worker.items():
        for family in found:
            name = family["name"]
            if name not in merged:
                merged[name] = MergedFamily(name, family["help"], family["type"])
            merged[name].add(family["samples"], worker)
    return [family.metric() for family in merged.values()]


def add_retired(retired: Families, last: Families) -> Families:
    """Totals of exited workers, with the last counters of one more."""
    counters = [
        family for family in (*retired, *last) if family["type"] in ADDED and not family["name"].startswith(OF_PROCESS)
    ]
    return families(merge_families({None: counters}))


def keep_maxima(before: Families, now: Families) -> Families:
    """`now`, with each `*_max_*` gauge at least as in `before`: workers reset such gauges at each read."""
    maxima = {family["name"]: family for family in before if family["type"] == "gauge" and "_max_" in family["name"]}
    return [
        families(merge_families({1: [maxima[family["name"]], family]}))[0] if family["name"] in maxima else family
        for family in now
    ]


def merge_endpoints(by_worker: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each endpoint from the worker with the most samples, and its health from each: breakers differ."""
    best: dict[str, dict[str, Any]] = {}
    health: dict[str, dict[str, str]] = {}
    for worker, entries in by_worker.items():
        for entry in entries:
            name = entry["endpoint"]["id"]
            health.setdefault(name, {})[str(worker)] = entry["load"]["health"]
            if name not in best or entry["samples"] > best[name]["samples"]:
                best[name] = {**entry, "worker": worker}
    return [{**entry, "health_by_worker": health[name]} for name, entry in best.items()]
