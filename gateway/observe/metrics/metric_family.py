"""What one metric is: the type of the rows in `gateway.observe.metrics.metric_table`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """How the same gauge of several workers becomes one. Counters and histograms are always added up."""

    SUM = "sum"  # each has its own part
    MAX = "max"
    MIN = "min"  # the worst, or the one that lags, shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. `name` is what is queried: a counter's ends in `_total`."""

    name: str
    kind: MetricKind
    unit: str  # as a reader says it; of `bounds` and values
    help: str  # one line, which Prometheus shows
    moves: str
    act: str  # what to do when it moves
    labels: tuple[str, ...] = ()
    more: str = ""  # what the line of help leaves out
    bounds: tuple[float, ...] = ()  # of a histogram: upper and inclusive; +Inf is implied
    merge: Merge = Merge.MAX

    @property
    def family(self) -> str:
        """As the library names it."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name
