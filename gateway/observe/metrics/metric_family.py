"""A metric family: type, labels, buckets, help, causes of change, the operator's action.

Rules:
- Names end in the unit: seconds, tokens, usd, ratio.
- Label values come from the configuration or from small fixed sets, never from callers.
- Times are in seconds, measured from arrival unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """Merges the same gauge of several workers. Counters and histograms are always summed."""

    SUM = "sum"  # each worker has a part
    MAX = "max"
    MIN = "min"  # the worst or latest worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. `name` is the name in queries; a counter ends in `_total`."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram: inclusive upper bounds; +Inf is implied
    unit: str = ""  # of `bounds` and values, as shown to readers
    help: str  # one line, the HELP text
    more: str = ""  # details beyond the HELP line
    moves: str  # causes of a change
    act: str  # the operator's action on a change
    merge: Merge = Merge.MAX

    @property
    def family(self) -> str:
        """Name in prometheus-client."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name


UNITS = {"_seconds": "s", "_ratio": "0 to 1", "_usd_total": "USD"}  # by the end of a name


def _family(kind: MetricKind, series: str, **columns: Any) -> Family:
    """`series`: name and labels as in PromQL, and the unit where the name does not end in a unit."""
    named, _, unit = series.partition(" ")
    name, _, labels = named.removesuffix("}").partition("{")
    unit = unit or next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return Family(name=name, kind=kind, labels=tuple(filter(None, labels.split(","))), unit=unit, **columns)


def counter(series: str, **columns: Any) -> Family:
    return _family(MetricKind.COUNTER, series, **columns)


def gauge(series: str, **columns: Any) -> Family:
    return _family(MetricKind.GAUGE, series, **columns)


def histogram(series: str, bounds: tuple[float, ...], **columns: Any) -> Family:
    return _family(MetricKind.HISTOGRAM, series, bounds=bounds, **columns)
