"""Online linear regression of a positive quantity, judged by its relative error.

Recursive least squares in Kalman's form. Rules:
- A feature is what the term would contribute on a reference machine, in the unit of the result, so
  every coefficient starts at 1 and reads "so many times the reference".
- The error of a sample is relative to what was predicted: 20 ms matter on 40 ms, not on 4 s.
- What is not known beforehand is mostly a common factor (a slower machine is slower at everything),
  less the proportions; both are in the prior, and forgetting is a random walk in the same two directions.
- Variances are capped, so that a term nobody exercises for a week cannot wind up.
- A coefficient that would fall below its floor is set there and the others take up the difference
  (the conditional mean), so a prediction is a plain sum of non-negative terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from policies.latency.recursive_least_squares import SMALLEST, step

COMMON_VARIANCE = 9.0  # (times the reference) squared
NOISE = 0.15  # one sample's relative error, standard deviation


class Regression:
    """`coefficients` times features; learns from one sample at a time."""

    __slots__ = ("_covariance", "_floor", "_noise", "_step", "_variances", "coefficients")

    def __init__(
        self, own: Sequence[float], common: float = COMMON_VARIANCE, noise: float = NOISE, floor: float = 0.0
    ) -> None:
        """`own`: variance of each coefficient, beside that of their `common` factor."""
        terms = range(len(own))
        self.coefficients: Sequence[float] = (1.0,) * len(own)
        self._covariance: Sequence[float] = [common + (own[i] if i == j else 0.0) for i in terms for j in terms]
        self._variances = tuple(common + value for value in own)
        self._noise, self._floor = noise * noise, floor
        self._step = step(len(own))

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, SMALLEST)

    def learn(self, features: Sequence[float], actual: float, clip: float = float("inf")) -> None:
        """One sample; its relative error counts for at most `clip`."""
        self.coefficients, self._covariance = self._step(
            self.coefficients,
            self._covariance,
            self._variances,
            features,
            actual,
            clip,
            self._noise,
            self._floor,
            self._project,
        )

    @property
    def covariance(self) -> list[list[float]]:
        """By rows."""
        terms = len(self.coefficients)
        return [list(self._covariance[i * terms : (i + 1) * terms]) for i in range(terms)]

    def loosen(self, common: float, own: float) -> None:
        """Trust what was learned less: by these variances, relative to the squared coefficients."""
        coefficients, rows = self.coefficients, self.covariance
        for i, row in enumerate(rows):
            row[i] += own * max(coefficients[i], 1.0) ** 2
            for j, other in enumerate(coefficients):
                row[j] += common * coefficients[i] * other
        self._cap(rows)
        self._covariance = [value for row in rows for value in row]

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long, as far as one can tell."""
        self.coefficients = [factor * value for value in self.coefficients]
        self._covariance = [factor * factor * value for value in self._covariance]
        self.loosen(0.1, 0.05)

    def warm_start_from(self, other: Regression) -> None:
        """Start from what `other` learned, as likely to differ from it by half as not."""
        self.coefficients, self._covariance = other.coefficients, other._covariance
        self.loosen(0.25, 0.05)

    def _project(self, coefficients: Sequence[float], covariance: Sequence[float]) -> Sequence[float]:
        values, terms = list(coefficients), len(coefficients)
        for _ in coefficients:
            i = values.index(min(values))
            excess = values[i] - self._floor
            if excess >= 0:
                return values
            own = covariance[i * terms + i]
            values = [value - excess * covariance[j] / own for j, value in enumerate(values, i * terms)]
            values[i] = self._floor
        return [max(value, self._floor) for value in values]

    def _cap(self, rows: list[list[float]]) -> None:
        """Scale rows and columns together, which keeps the matrix a covariance."""
        for i, row in enumerate(rows):
            limit = self._variances[i] * max(self.coefficients[i], 1.0) ** 2
            if row[i] > limit:
                factor = (limit / row[i]) ** 0.5
                for j in range(len(row)):
                    row[j] *= factor
                    rows[j][i] *= factor
