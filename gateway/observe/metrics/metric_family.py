"""Row type of `gateway.observe.metrics.metric_table`: one metric family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """Merges the same gauge of several workers. Counters and histograms are always summed."""

    SUM = "sum"  # each worker has its own part
    MAX = "max"
    MIN = "min"  # the worst or latest worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. `name` is the name in queries: a counter's ends in `_total`."""

    name: str
    kind: MetricKind
    unit: str  # of `bounds` and values, as shown to readers
    help: str  # one line, the HELP text
    moves: str  # causes of a change
    act: str  # the operator's action on a change
    labels: tuple[str, ...] = ()
    more: str = ""  # details beyond the HELP line
    bounds: tuple[float, ...] = ()  # of a histogram: inclusive upper bounds; +Inf is implied
    merge: Merge = Merge.MAX

    @property
    def family(self) -> str:
        """Name in prometheus-client."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name
