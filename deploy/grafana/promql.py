"""PromQL as small functions: each way of asking is written once.

Rules:
- Every selector names the dashboard's variables, so that no panel shows what was not chosen.
- A ratio has no value where there was nothing to divide by: a gap, never a zero that looks like an answer.
- A part that was never counted is a share of 0, not a gap: nothing was shed is an answer.
"""

from __future__ import annotations

JOB = 'job=~"$job"'
ROUTE = f'{JOB}, route=~"$route"'
POOL = f'{JOB}, pool=~"$pool"'
BOTH = f'{JOB}, route=~"$route", pool=~"$pool"'
WINDOW = "$__rate_interval"
RANGE = "$__range"


def total(metric: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Events per second, summed."""
    return f"{_over('sum', by)} (rate({metric}{{{where}}}[{window}]))"


def most(metric: str, where: str, by: str = "") -> str:
    """A gauge that several gateways may tell: the largest."""
    return f"{_over('max', by)} ({metric}{{{where}}})"


def least(metric: str, where: str, by: str = "") -> str:
    """The same, the smallest."""
    return f"{_over('min', by)} ({metric}{{{where}}})"


def every(metric: str, where: str, by: str = "") -> str:
    """A gauge of which each gateway has its own part."""
    return f"{_over('sum', by)} ({metric}{{{where}}})"


def ratio(part: str, whole: str) -> str:
    """`part` and `whole` have the same labels."""
    return f"({part}) / ({whole} > 0)"


def share(metric: str, part: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """How much of what `where` selects also has `part`."""
    whole = total(metric, where, by, window)
    return ratio(f"{total(metric, f'{where}, {part}', by, window)} or 0 * {whole}", whole)


def breakdown(metric: str, where: str, by: str, whole: str) -> str:
    """The sum of `metric` by a label, over one number, so that the parts add up."""
    return f"{total(metric, where, by)} / ignoring ({by}) group_left () ({whole} > 0)"


def quantile(q: float, histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Of a histogram; between its buckets it is interpolated."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q:g}, {total(f'{histogram}_bucket', where, labels, window)})"


def mean(histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Of a histogram: exact."""
    return ratio(total(f"{histogram}_sum", where, by, window), total(f"{histogram}_count", where, by, window))


def _over(aggregation: str, by: str) -> str:
    return f"{aggregation} by ({by})" if by else aggregation
