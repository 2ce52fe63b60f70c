"""Errors of recent predictions for an endpoint: quantiles, changes of regime, calibration."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from functools import cache
from math import exp, log
from statistics import NormalDist, median

from policies.types import MEDIAN, NEVER, NINETIETH, QUANTILES, TINY, Forecast, Quantiles

WINDOW = 128  # samples
PRIOR_SIGMA = 0.6  # of the ratio's logarithm, before any sample: nine of ten under 2.2 times the prediction
PRIOR_WEIGHT = 6.0  # samples at which the prior counts as much as they do; at ten times as many, a hundredth
HALF_LIFE = 1800.0  # s after which old samples count half
REFRESH = 60.0  # s after which the age of samples is taken into account again
MAX_LOG_RATIO = 6.0  # a factor of 400
MIN_RATIO = 1e-9
PRIOR: tuple[float, ...] = tuple(PRIOR_SIGMA * NormalDist().inv_cdf(q) for q in QUANTILES)

OUTLIER = 4.0  # times the mean error
MIN_OUTLIER = 0.5  # of the ratio's logarithm: a factor of 1.65
CHANGE_SAMPLES = 3  # outliers in a row, with equal signs, for a new regime
MEAN_ERROR_WEIGHT = 1 / 16  # of the latest error
FIRST_ERROR = 1.0  # mean error before any sample: a factor of 2.7
REGIME_ERROR = 0.3  # mean error at the start of a new regime

CALIBRATION_SAMPLES = 200  # with full weight; beyond, old samples fade


class ErrorQuantiles:
    """Quantiles of actual / predicted over a sliding window.

    In the spirit of conformal prediction, the spread of the next forecast is the spread of the last errors, whatever
    the
    shape. While samples are few or old, a wide prior is mixed in. Works on logarithms: twice and half are equally
    wrong.
    """

    def __init__(self) -> None:
        self._prior = PRIOR
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._latest_at = self._mixed_at = NEVER
        self._quantiles: Quantiles = ()

    def observe(self, ratio: float, now: float) -> None:
        log_ratio = log(ratio) if ratio > MIN_RATIO else -MAX_LOG_RATIO
        log_ratio = min(max(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(log_ratio)
        insort(self._sorted, log_ratio)
        self._latest_at = now
        self._mixed_at = NEVER

    def clear(self) -> None:
        """Drops the samples of an old regime."""
        self._recent.clear()
        self._sorted.clear()
        self._mixed_at = NEVER

    def warm_start_from(self, other: ErrorQuantiles, now: float) -> None:
        """Takes another endpoint's spread as the prior."""
        self._prior = tuple(map(log, other.quantiles(now)))
        self._mixed_at = NEVER

    def quantiles(self, now: float) -> Quantiles:
        """At QUANTILES, ascending."""
        if now - self._mixed_at > REFRESH:
            self._quantiles, self._mixed_at = self._mix(now), now
        return self._quantiles

    def _mix(self, now: float) -> Quantiles:
        samples = self._sorted
        if not samples:
            return tuple(map(exp, self._prior))
        weight = len(samples) * 0.5 ** (max(now - self._latest_at, 0.0) / HALF_LIFE)
        share = weight**2 / (weight**2 + PRIOR_WEIGHT**2)
        mixed = []
        for (rank, part), prior in zip(_ranks(len(samples)), self._prior, strict=True):
            low, high = samples[rank], samples[min(rank + 1, len(samples) - 1)]
            mixed.append(exp(share * (low + (high - low) * part) + (1 - share) * prior))
        return tuple(mixed)


@cache
def _ranks(count: int) -> tuple[tuple[int, float], ...]:
    """Rank and fraction of QUANTILES among `count` samples: the (n+1)q-th of n, as in conformal prediction."""
    ranks = [min(max(q * (count + 1) - 1, 0.0), float(count - 1)) for q in QUANTILES]
    return tuple((int(rank), rank - int(rank)) for rank in ranks)


class ChangeDetector:
    """Tells an outlier from a new regime, in a series of deviations (logarithms of actual / predicted).

    A control chart with a run rule: several deviations in a row beyond the control limit, on one side, are a change
    (Western Electric, Statistical Quality Control Handbook, 1956).
    """

    def __init__(self) -> None:
        self._outliers: list[float] = []  # in a row, with equal signs
        self._mean_error = FIRST_ERROR
        self._samples = 0

    @property
    def _limit(self) -> float:
        return max(OUTLIER * self._mean_error, MIN_OUTLIER)

    @property
    def clip(self) -> float:
        """Largest relative error for a single update."""
        return exp(self._limit) - 1

    def observe(self, deviation: float) -> float:
        """Returns the factor by which the series has changed: 1 without a change, else the median outlier's."""
        limit = self._limit
        self._samples += 1
        weight = max(1 / (self._samples + 1), MEAN_ERROR_WEIGHT)
        self._mean_error += (min(abs(deviation), limit) - self._mean_error) * weight
        if abs(deviation) <= limit:
            self._outliers.clear()
            return 1.0
        if self._outliers and self._outliers[0] * deviation < 0:
            self._outliers.clear()
        self._outliers.append(deviation)
        if len(self._outliers) < CHANGE_SAMPLES:
            return 1.0
        factor = exp(median(self._outliers))
        self._outliers.clear()
        self._mean_error = REGIME_ERROR
        self._samples = round(1 / MEAN_ERROR_WEIGHT)
        return factor


@dataclass(frozen=True, slots=True)
class CalibrationStatistics:
    """Shares, 0 to 1, of the last few hundred first tokens; perfect is 0.5 and 0.9."""

    under_p50: float
    under_p90: float
    samples: int  # at most CALIBRATION_SAMPLES


class Calibration:
    """Shares of first tokens which came within the predicted p50 and p90."""

    def __init__(self) -> None:
        self._samples = 0
        self._under_p50 = self._under_p90 = 0.0

    def observe(self, ttft: float, forecast: Forecast) -> None:
        self._samples = min(self._samples + 1, CALIBRATION_SAMPLES)
        weight, ratio = 1 / self._samples, ttft / (forecast.point_estimate or TINY)
        self._under_p50 += ((ratio <= forecast.ratios[MEDIAN]) - self._under_p50) * weight
        self._under_p90 += ((ratio <= forecast.ratios[NINETIETH]) - self._under_p90) * weight

    def statistics(self) -> CalibrationStatistics | None:
        """None before the first token."""
        if not self._samples:
            return None
        return CalibrationStatistics(round(self._under_p50, 4), round(self._under_p90, 4), self._samples)
