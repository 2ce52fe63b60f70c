"""PromQL building blocks.

Rules:
- Every selector names the dashboard's variables, so that each panel shows only the selection.
- A ratio over 0 has no value: a gap, never a misleading zero.
- A part without a series is a share of 0, not a gap: "none were shed" is a valid value.
"""

from __future__ import annotations

JOB = 'job=~"$job"'
ROUTE = f'{JOB}, route=~"$route"'
POOL = f'{JOB}, pool=~"$pool"'
ROUTE_AND_POOL = f'{JOB}, route=~"$route", pool=~"$pool"'
WINDOW = "$__rate_interval"
RANGE = "$__range"


def total(metric: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Events per second, summed."""
    return f"{_aggregate('sum', by)} (rate({metric}{{{where}}}[{window}]))"


def maximum(metric: str, where: str, by: str = "") -> str:
    """Largest value of a gauge that several gateways report."""
    return f"{_aggregate('max', by)} ({metric}{{{where}}})"


def minimum(metric: str, where: str, by: str = "") -> str:
    """Smallest value of a gauge that several gateways report."""
    return f"{_aggregate('min', by)} ({metric}{{{where}}})"


def summed(metric: str, where: str, by: str = "") -> str:
    """Sum of a gauge over gateways."""
    return f"{_aggregate('sum', by)} ({metric}{{{where}}})"


def ratio(part: str, whole: str) -> str:
    """Quotient; `part` and `whole` have the same labels."""
    return f"({part}) / ({whole} > 0)"


def share(metric: str, part: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Share of the series of `where` that also match `part`."""
    whole = total(metric, where, by, window)
    return ratio(f"{total(metric, f'{where}, {part}', by, window)} or 0 * {whole}", whole)


def breakdown(metric: str, where: str, by: str, whole: str) -> str:
    """Sum of `metric` by a label, divided by one total, so that the parts add up."""
    return f"{total(metric, where, by)} / ignoring ({by}) group_left () ({whole} > 0)"


def quantile(q: float, histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Quantile of a histogram, interpolated between buckets."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q:g}, {total(f'{histogram}_bucket', where, labels, window)})"


def mean(histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Exact mean of a histogram."""
    return ratio(total(f"{histogram}_sum", where, by, window), total(f"{histogram}_count", where, by, window))


def _aggregate(aggregation: str, by: str) -> str:
    return f"{aggregation} by ({by})" if by else aggregation
