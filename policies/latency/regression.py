"""Online linear regression of a positive quantity, judged by relative errors.

Recursive least squares in Kalman filter form, with random-walk drift instead of a forgetting factor and Huber weights
against outliers. Rules:
- A feature is the term's contribution on a reference machine, in the unit of the result: every coefficient starts at
  1 and reads "times the reference".
- The error of a sample is relative to the prediction: 20 ms matter on 40 ms, not on 4 s.
- A machine mostly differs from the reference by a common factor, less by proportions; both are in the prior, and the
  drift goes in the same two directions.
- Variances are capped, so a term without samples for a week cannot wind up.
- A coefficient below the floor is set to the floor, and the others take up the difference (the conditional mean): a
  prediction is a plain sum of non-negative terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

COMMON_VARIANCE = 9.0  # (times the reference) squared
NOISE = 0.15  # a sample's relative error, standard deviation
COMMON_DRIFT = 2e-4  # variance added per sample, relative: 1.4% a sample
OWN_DRIFT = 5e-5
HUBER = 1.0  # standard deviations of the error beyond which a sample's weight falls: medians are learned
MIN_RESULT = 1e-6  # predictions stay above it, in the unit of the result


class Regression:
    """`coefficients` times features; learns from a sample at a time."""

    def __init__(
        self, own: Sequence[float], common: float = COMMON_VARIANCE, noise: float = NOISE, floor: float = 0.0
    ) -> None:
        """`own`: variance of each coefficient, beside the variance of their `common` factor."""
        self.coefficients = [1.0] * len(own)
        self.covariance = [
            [common + (value if i == j else 0.0) for j in range(len(own))] for i, value in enumerate(own)
        ]
        self._max_variances = [common + value for value in own]
        self._noise = noise * noise
        self._floor = floor

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, MIN_RESULT)

    def update(self, features: Sequence[float], actual: float, clip: float = float("inf")) -> None:
        """Learns from a sample, with a relative error of at most `clip`."""
        predicted = self.predict(features)
        x = [feature / predicted for feature in features]
        error = min(max(actual / predicted - 1.0, -clip), clip)
        sensitivity = [sum(map(mul, row, x)) for row in self.covariance]
        variance = sum(map(mul, sensitivity, x))
        deviations = abs(error) / (HUBER * (variance + self._noise) ** 0.5)
        total = variance + self._noise * max(deviations, 1.0)
        gains = [value / total for value in sensitivity]
        coefficients = [value + gain * error for value, gain in zip(self.coefficients, gains, strict=True)]
        if min(coefficients) < self._floor:
            coefficients = self._projected(coefficients, gains, sensitivity)
        self.coefficients = coefficients
        terms = range(len(coefficients))
        for i in terms:
            row, gain, coefficient = self.covariance[i], gains[i], coefficients[i]
            drift = COMMON_DRIFT * coefficient
            own = row[i] - gain * sensitivity[i] + OWN_DRIFT * max(coefficient, 1.0) ** 2 + drift * coefficient
            for j in terms:  # indices: twice as fast as a comprehension over zip
                row[j] = row[j] - gain * sensitivity[j] + drift * coefficients[j]
            row[i] = own
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
        self.inflate(0.25, 0.05)

    def _projected(self, values: list[float], gains: list[float], sensitivity: list[float]) -> list[float]:
        """Raises coefficients to the floor, one at a time, lowest first."""
        for _ in gains:
            i = values.index(min(values))
            excess = values[i] - self._floor
            if excess >= 0:
                break
            row = [value - gains[i] * other for value, other in zip(self.covariance[i], sensitivity, strict=True)]
            values = [value - excess * covariance / row[i] for value, covariance in zip(values, row, strict=True)]
            values[i] = self._floor
        return [max(value, self._floor) for value in values]

    def _cap_variances(self) -> None:
        """Scales rows and columns together, which keeps the matrix a covariance."""
        for i, row in enumerate(self.covariance):
            limit = self._max_variances[i]
            if row[i] > limit and row[i] > (limit := limit * max(self.coefficients[i], 1.0) ** 2):
                factor = (limit / row[i]) ** 0.5
                for j in range(len(row)):
                    row[j] *= factor
                    self.covariance[j][i] *= factor
