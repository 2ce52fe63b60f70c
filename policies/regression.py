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

COMMON_VARIANCE = 9.0  # (times the reference) squared
COMMON_DRIFT = 2e-4  # variance added per sample, relative: 1.4% a sample
OWN_DRIFT = 5e-5
NOISE = 0.15  # one sample's relative error, standard deviation
HUBER = 1.0  # times what was expected of an error: beyond it a sample's weight falls, and medians are what is learned
SMALLEST = 1e-6  # predictions stay above it, in the unit of the result


class Regression:
    """`coefficients` times features; learns from one sample at a time."""

    __slots__ = ("_floor", "_noise", "_variances", "coefficients", "covariance")

    def __init__(
        self, own: Sequence[float], common: float = COMMON_VARIANCE, noise: float = NOISE, floor: float = 0.0
    ) -> None:
        """`own`: variance of each coefficient, beside that of their `common` factor."""
        terms = range(len(own))
        self.coefficients = [1.0 for _ in terms]
        self.covariance = [[common + (own[i] if i == j else 0.0) for j in terms] for i in terms]
        self._variances = [common + value for value in own]
        self._noise, self._floor = noise * noise, floor

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, SMALLEST)

    def learn(self, features: Sequence[float], actual: float, clip: float = float("inf")) -> None:
        """One sample; its relative error counts for at most `clip`."""
        predicted = self.predict(features)
        scaled = [value / predicted for value in features]
        error = min(max(actual / predicted - 1.0, -clip), clip)
        spread = [sum(map(mul, row, scaled)) for row in self.covariance]
        doubt = sum(map(mul, spread, scaled))
        total = doubt + self._noise * max(1.0, abs(error) / (HUBER * (doubt + self._noise) ** 0.5))
        for i, row in enumerate(self.covariance):
            gain = spread[i] / total
            self.coefficients[i] += gain * error
            for j, value in enumerate(spread):
                row[j] -= gain * value
        self._project()
        self.loosen(COMMON_DRIFT, OWN_DRIFT)

    def loosen(self, common: float, own: float) -> None:
        """Trust what was learned less: by these variances, relative to the squared coefficients."""
        coefficients = self.coefficients
        for i, row in enumerate(self.covariance):
            row[i] += own * max(coefficients[i], 1.0) ** 2
            for j, other in enumerate(coefficients):
                row[j] += common * coefficients[i] * other
        self._cap()

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long, as far as one can tell."""
        self.coefficients = [factor * value for value in self.coefficients]
        self.covariance = [[factor * factor * value for value in row] for row in self.covariance]
        self.loosen(0.1, 0.05)

    def follow(self, other: Regression) -> None:
        """Start from what `other` learned, as likely to differ from it by half as not."""
        self.coefficients = list(other.coefficients)
        self.covariance = [list(row) for row in other.covariance]
        self.loosen(0.25, 0.05)

    def _project(self) -> None:
        for _ in self.coefficients:
            i = min(range(len(self.coefficients)), key=self.coefficients.__getitem__)
            excess = self.coefficients[i] - self._floor
            if excess >= 0:
                return
            column, own = self.covariance[i], self.covariance[i][i]
            self.coefficients = [value - excess * column[j] / own for j, value in enumerate(self.coefficients)]
            self.coefficients[i] = self._floor
        self.coefficients = [max(value, self._floor) for value in self.coefficients]

    def _cap(self) -> None:
        """Scale rows and columns together, which keeps the matrix a covariance."""
        for i, row in enumerate(self.covariance):
            limit = self._variances[i] * max(self.coefficients[i], 1.0) ** 2
            if row[i] > limit:
                factor = (limit / row[i]) ** 0.5
                for j in range(len(row)):
                    row[j] *= factor
                    self.covariance[j][i] *= factor
