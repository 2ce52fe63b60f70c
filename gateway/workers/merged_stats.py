"""What several workers say, as one: metrics and endpoints. Pure. (Of recent requests: `gateway.admin.request_query`.)

Rules for metrics:
- Counters and histograms are added up, over the living and the dead: a total never goes back. Of a bucket's
  exemplars the latest stays.
- A gauge is joined as the catalogue says. The queue is added up: every worker holds its own. Of endpoints every worker
  tells the load of all of them, some a little later than others: the largest holds. Of their state the worst holds: one
  worker may have found out first.
- What describes a process (`process_*`, `python_*`) stays apart, by worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample

from gateway.observe.metrics.metric_family import Merge
from gateway.observe.metrics.metric_table import BY_FAMILY

ADDED = ("counter", "histogram")
OF_PROCESS = ("process_", "python_")
JOINED: Mapping[Merge, Callable[[float, float], float]] = {Merge.SUM: add, Merge.MAX: max, Merge.MIN: min}

Labels = tuple[tuple[str, str], ...]
Families = list[dict[str, Any]]
Values = dict[tuple[str, Labels], float]  # by name of the sample and labels


def families(metrics: Iterable[Metric]) -> Families:
    """As JSON can say them."""
    return [
        {
            "name": metric.name,
            "help": metric.documentation,
            "type": metric.type,
            "samples": [_told(sample) for sample in metric.samples],
        }
        for metric in metrics
    ]


def _told(sample: Sample) -> list[Any]:
    told = [sample.name, dict(sample.labels), sample.value]
    if (example := sample.exemplar) is not None:
        told.append([dict(example.labels), example.value, example.timestamp])
    return told


class Total:
    """One family, over workers."""

    def __init__(self, name: str, help: str, type: str) -> None:
        self.name, self.help, self.type = name, help, type
        self.values: Values = {}
        self.examples: dict[tuple[str, Labels], Exemplar] = {}
        row = BY_FAMILY.get(name)
        self.merge = Merge.SUM if type in ADDED else Merge.MAX if row is None else row.merge

    def add(self, samples: Iterable[Sequence[Any]], worker: int | None) -> None:
        """`worker` None: of one that is no more."""
        for name, labelled, value, *example in samples:
            labels = tuple(labelled.items())
            if self.name.startswith(OF_PROCESS):
                labels = (*labels, ("worker", str(worker)))
            known = self.values.get((name, labels))
            self.values[name, labels] = value if known is None else JOINED[self.merge](known, value)
            if example:
                self._show(name, labels, Exemplar(*example[0]))

    def _show(self, name: str, labels: Labels, example: Exemplar) -> None:
        """The latest."""
        known = self.examples.get((name, labels))
        if known is None or float(known.timestamp or 0.0) < float(example.timestamp or 0.0):
            self.examples[name, labels] = example

    def metric(self) -> Metric:
        made = Metric(self.name, self.help, self.type)
        for (name, labels), value in self.values.items():
            made.add_sample(name, dict(labels), value, exemplar=self.examples.get((name, labels)))
        return made


def merged(by_worker: Mapping[int | None, Families]) -> list[Metric]:
    """None: the dead. Names and labels in the order in which they are first told."""
    totals: dict[str, Total] = {}
    for worker, found in by_worker.items():
        for family in found:
            total = totals.get(family["name"])
            if total is None:
                total = totals[family["name"]] = Total(family["name"], family["help"], family["type"])
            total.add(family["samples"], worker)
    return [total.metric() for total in totals.values()]


def add_retired(retired: Families, last: Families) -> Families:
    """What is left of the dead: their counts, with those of one more."""
    return families(merged({None: [family for told in (retired, last) for family in told if counts(family)]}))


def kept(before: Families, told: Families) -> Families:
    """What was largest since somebody asked: a worker's own `*_max_*` begins anew whenever it is read."""
    largest = {family["name"]: family for family in before if is_largest(family)}
    return [
        families(merged({1: [largest[family["name"]], family]}))[0] if family["name"] in largest else family
        for family in told
    ]


def is_largest(family: Mapping[str, Any]) -> bool:
    return family["type"] == "gauge" and "_max_" in family["name"]


def counts(family: Mapping[str, Any]) -> bool:
    """Whether it goes on counting where its process does not."""
    return family["type"] in ADDED and not family["name"].startswith(OF_PROCESS)


def endpoints(told: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each as the worker sees it that has learned most of it, and its health to all of them: breakers differ."""
    best: dict[str, dict[str, Any]] = {}
    health: dict[str, dict[str, str]] = {}
    for worker, entries in told.items():
        for entry in entries:
            name = entry["endpoint"]["id"]
            health.setdefault(name, {})[str(worker)] = entry["load"]["health"]
            if name not in best or entry["samples"] > best[name]["samples"]:
                best[name] = {**entry, "worker": worker}
    return [{**entry, "health_by_worker": health[name]} for name, entry in best.items()]
