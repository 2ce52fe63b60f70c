"""Online learning of a positive quantity: a linear regression, and the errors of the predictions made from it.

The regression is recursive least squares in Kalman filter form, with random-walk drift instead of a forgetting factor
and Huber weights against outliers. Rules:
- A feature is a term's contribution on a reference machine, in the unit of the result: every coefficient starts at 1
  and reads "times the reference".
- The error of a sample is relative to the prediction: 20 ms matter on 40 ms, not on 4 s.
- A machine mostly differs from the reference by a common factor, less by proportions; both are in the prior, and the
  drift goes in the same two directions.
- Variances are capped, so a term without samples for a week cannot wind up.
- A coefficient below the floor is set to the floor, and the others take up the difference (the conditional mean): a
  prediction is a plain sum of non-negative terms.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import exp, log
from operator import add, mul, truediv
from statistics import NormalDist, median

from policies.latency.learned_state import (
    MAX_LOG_RATIO,
    OTHER_COMMON,
    OTHER_OWN,
    WINDOW,
    LearnedChanges,
    LearnedErrors,
    LearnedRegression,
    kept_share,
)
from policies.types import FOREVER, MEDIAN, NEVER, NINETIETH, QUANTILES, TINY, Forecast, Quantiles

COMMON_VARIANCE = 9.0  # (times the reference) squared
NOISE = 0.15  # a sample's relative error, standard deviation
COMMON_DRIFT = 2e-4  # variance added per sample, relative: 1.4% a sample
OWN_DRIFT = 5e-5
HUBER = 1.0  # standard deviations of the error beyond which a sample's weight falls: medians are learned
MIN_RESULT = 1e-6  # least prediction, in the unit of the result

PRIOR_SIGMA = 0.6  # of the ratio's logarithm, before any sample: nine of ten under 2.2 times the prediction
PRIOR_WEIGHT = 6.0  # samples at which the prior counts as much as they do; at ten times as many, a hundredth
HALF_LIFE = 1800.0  # s after which old samples count half
REFRESH = 60.0  # s after which the age of samples is taken into account again
MIN_RATIO = 1e-9
KNOWN_SAMPLES, KNOWN_AGE = 3, 600.0  # s; older, and the quantity is to be tried again
PRIOR: tuple[float, ...] = tuple(PRIOR_SIGMA * NormalDist().inv_cdf(q) for q in QUANTILES)

OUTLIER = 4.0  # times the mean error
MIN_OUTLIER = 0.5  # of the ratio's logarithm: a factor of 1.65
CHANGE_SAMPLES = 3  # outliers in a row, with equal signs, for a new regime
MEAN_ERROR_WEIGHT = 1 / 16  # of the latest error
FIRST_ERROR = 1.0  # mean error before any sample: a factor of 2.7
REGIME_ERROR = 0.3  # mean error at the start of a new regime

CALIBRATION_SAMPLES = 200  # with full weight; beyond, old samples fade


class Regression:
    """`coefficients` times features; learns from a sample at a time."""

    def __init__(
        self, own: Sequence[float], common: float = COMMON_VARIANCE, noise: float = NOISE, floor: float = 0.0
    ) -> None:
        """`own`: variance of each coefficient, beside the variance of their `common` factor."""
        self.coefficients = [1.0] * len(own)
        self._max_variances = [common + value for value in own]
        self.covariance = [[common] * len(own) for _ in own]
        for i, variance in enumerate(self._max_variances):
            self.covariance[i][i] = variance
        self._noise = noise * noise
        self._floor = floor

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, MIN_RESULT)

    def relative_error(self, features: Sequence[float]) -> float:
        """Standard deviation of a sample from its prediction, relative to the prediction."""
        predicted = self.predict(features)
        _, variance = self._sensitivity([*map(truediv, features, repeat(predicted))])
        return (max(variance, 0.0) + self._noise) ** 0.5 if variance < FOREVER else 1.0

    def update(self, features: Sequence[float], actual: float, clip: float = FOREVER) -> None:
        """Learns from a sample, with a relative error of at most `clip`."""
        total: float = sum(map(mul, self.coefficients, features))
        predicted = max(total, MIN_RESULT)
        error = min(max(actual / predicted - 1.0, -clip), clip)
        x = [*map(truediv, features, repeat(predicted))]
        sensitivity, variance = self._sensitivity(x)
        if not 0.0 <= variance < FOREVER:  # rounding has made the matrix no covariance
            self._forget_covariance()
            sensitivity, variance = self._sensitivity(x)
        noise = self._noise * max(abs(error) / (HUBER * (variance + self._noise) ** 0.5), 1.0)
        gains = [*map(truediv, sensitivity, repeat(variance + noise))]
        coefficients = [*map(add, self.coefficients, map(mul, gains, repeat(error)))]
        if min(coefficients) < self._floor:
            coefficients = self._projected(coefficients, gains, sensitivity)
        self.coefficients = coefficients
        self._update_covariance(gains, sensitivity)

    def _sensitivity(self, x: Sequence[float]) -> tuple[list[float], float]:
        """Covariances of each coefficient with the prediction of `x`, and the variance of the prediction."""
        sensitivity: list[float] = [*map(sum, map(map, repeat(mul), self.covariance, repeat(x)))]
        return sensitivity, sum(map(mul, sensitivity, x))

    def _forget_covariance(self) -> None:
        """Each coefficient by itself, as uncertain as it may be."""
        for i, row in enumerate(self.covariance):
            row[:] = [0.0] * len(row)
            row[i] = self._max_variances[i] * max(self.coefficients[i], 1.0) ** 2

    def _update_covariance(self, gains: list[float], sensitivity: list[float]) -> None:
        """Subtracts what the sample has taught, and adds the drift."""
        covariance, coefficients, exceeded = self.covariance, self.coefficients, False
        for i, row in enumerate(covariance):
            gain, coefficient = gains[i], coefficients[i]
            drift, square = COMMON_DRIFT * coefficient, max(coefficient, 1.0) ** 2
            for j in range(i):
                row[j] = covariance[j][i] = row[j] - gain * sensitivity[j] + drift * coefficients[j]
            row[i] += OWN_DRIFT * square + drift * coefficient - gain * sensitivity[i]
            exceeded = exceeded or row[i] > self._max_variances[i] * square
        if exceeded:
            self._cap_variances()

    def inflate(self, common: float, own: float) -> None:
        """Trusts less in what was learned, by these variances relative to the squared coefficients."""
        for i, row in enumerate(self.covariance):
            row[i] += own * max(self.coefficients[i], 1.0) ** 2
            scaled = common * self.coefficients[i]
            row[:] = [value + scaled * other for value, other in zip(row, self.coefficients, strict=True)]
        self._cap_variances()

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long, as far as a few samples can tell."""
        self.coefficients = [factor * value for value in self.coefficients]
        self.covariance = [[factor * factor * value for value in row] for row in self.covariance]
        self.inflate(0.1, 0.05)

    def warm_start_from(self, other: Regression) -> None:
        """Starts from the state of `other`, with larger variances."""
        self.coefficients = list(other.coefficients)
        self.covariance = [list(row) for row in other.covariance]
        self.inflate(OTHER_COMMON, OTHER_OWN)

    def learned(self) -> LearnedRegression:
        return LearnedRegression(list(self.coefficients), [list(row) for row in self.covariance])

    def restore(self, saved: LearnedRegression, age: float) -> None:
        """Raises ValueError where other terms were saved."""
        if len(saved.coefficients) != len(self.coefficients):
            raise ValueError("coefficients of other terms")
        self.coefficients = [max(value, self._floor) for value in saved.coefficients]
        self.covariance = [list(row) for row in saved.covariance]
        lost = 1 - kept_share(age)
        self.inflate(OTHER_COMMON * lost, OTHER_OWN * lost)

    def _projected(self, values: list[float], gains: list[float], sensitivity: list[float]) -> list[float]:
        """Raises coefficients to the floor, one at a time, lowest first."""
        for _ in gains:
            i = values.index(min(values))
            excess = values[i] - self._floor
            if excess >= 0:
                break
            row = [value - gains[i] * other for value, other in zip(self.covariance[i], sensitivity, strict=True)]
            if row[i] > 0:
                values = [value - excess * covariance / row[i] for value, covariance in zip(values, row, strict=True)]
            values[i] = self._floor
        return [max(value, self._floor) for value in values]

    def _cap_variances(self) -> None:
        """Scales rows and columns together, which keeps the matrix a covariance."""
        for i, row in enumerate(self.covariance):
            limit = self._max_variances[i] * max(self.coefficients[i], 1.0) ** 2
            if row[i] > limit:
                factor = (limit / row[i]) ** 0.5
                for j in range(len(row)):
                    row[j] *= factor
                    self.covariance[j][i] *= factor


class ErrorQuantiles:
    """Quantiles of actual / predicted over a sliding window.

    In the spirit of conformal prediction, the spread of the next forecast is the spread of the last errors, whatever
    the shape. While samples are few or old, a wide prior is mixed in. Works on logarithms: twice and half are equally
    wrong.
    """

    def __init__(self, prior: Quantiles = PRIOR) -> None:
        """`prior`: logarithms of the ratio at QUANTILES, before any sample."""
        self._prior = prior
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._latest_at = self._mixed_at = NEVER
        self._quantiles: Quantiles = ()

    def observe(self, ratio: float, now: float) -> None:
        log_ratio = min(max(log(max(ratio, MIN_RATIO)), -MAX_LOG_RATIO), MAX_LOG_RATIO)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(log_ratio)
        insort(self._sorted, log_ratio)
        self._latest_at = now
        self._mixed_at = NEVER

    def is_known(self, now: float) -> bool:
        """A few samples, not all of long ago."""
        return len(self._recent) >= KNOWN_SAMPLES and now - self._latest_at < KNOWN_AGE

    def clear(self) -> None:
        """Drops the samples of an old regime."""
        self._recent.clear()
        self._sorted.clear()
        self._mixed_at = NEVER

    def widen_from(self, other: ErrorQuantiles, now: float, factor: float = 1.0) -> None:
        """Takes another spread, wider by `factor`, as the prior."""
        self._prior = tuple(map(mul, repeat(factor), map(log, other.quantiles(now))))
        self._mixed_at = NEVER

    def learned(self, now: float) -> LearnedErrors:
        age = max(now - self._latest_at, 0.0) if self._recent else 0.0
        prior = [min(max(value, -MAX_LOG_RATIO), MAX_LOG_RATIO) for value in self._prior]
        return LearnedErrors([round(error, 4) for error in self._recent], prior, age)

    def restore(self, saved: LearnedErrors, age: float, now: float) -> None:
        self._prior = tuple(saved.prior)
        self._recent = deque(saved.recent)
        self._sorted = sorted(saved.recent)
        self._latest_at = now - saved.age - age
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
        last, mixed = len(samples) - 1, []
        for q, prior in zip(QUANTILES, self._prior, strict=True):
            rank = min(max(q * (last + 2) - 1, 0.0), float(last))  # the (n+1)q-th of n, as in conformal prediction
            below = int(rank)
            low, high = samples[below], samples[min(below + 1, last)]
            mixed.append(exp(share * (low + (high - low) * (rank - below)) + (1 - share) * prior))
        return tuple(mixed)


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
    def clip(self) -> float:
        """Largest relative error for a single update."""
        return exp(max(OUTLIER * self._mean_error, MIN_OUTLIER)) - 1

    def learned(self) -> LearnedChanges:
        return LearnedChanges(self._mean_error, self._samples)

    def restore(self, saved: LearnedChanges) -> None:
        self._mean_error = saved.mean_error
        self._samples = saved.samples

    def observe(self, deviation: float) -> float:
        """Returns the factor by which the series has changed: 1 without a change, else the median outlier's."""
        limit = max(OUTLIER * self._mean_error, MIN_OUTLIER)
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


@dataclass(slots=True)
class Calibration:
    """Shares, 0 to 1, of the last few hundred first tokens within the predicted p50 and p90: ideally 0.5 and 0.9."""

    under_p50: float = 0.0
    under_p90: float = 0.0
    samples: int = 0  # at most CALIBRATION_SAMPLES

    def observe(self, ttft: float, forecast: Forecast) -> None:
        self.samples = min(self.samples + 1, CALIBRATION_SAMPLES)
        weight, ratio = 1 / self.samples, ttft / (forecast.point_estimate or TINY)
        self.under_p50 += ((ratio <= forecast.ratios[MEDIAN]) - self.under_p50) * weight
        self.under_p90 += ((ratio <= forecast.ratios[NINETIETH]) - self.under_p90) * weight

    def rounded(self) -> Calibration | None:
        """For GET /fleet; None before the first token."""
        if not self.samples:
            return None
        return Calibration(round(self.under_p50, 4), round(self.under_p90, 4), self.samples)
