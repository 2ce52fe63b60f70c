"""Tells an outlier from a new regime, in a series of deviations."""

from __future__ import annotations

from math import exp
from statistics import median

USUAL = 4.0  # times the usual error: beyond it a sample is a surprise
LEAST_SURPRISE = 0.5  # of the ratio's logarithm: a factor of 1.65
SURPRISES = 3  # in a row, of one sign: a new regime
USUAL_MEMORY = 1 / 16  # weight of the latest error in the usual one
UNTAUGHT = 1.0  # the usual error before any sample: a factor of 2.7
REGIME = 0.3  # and at the beginning of a new regime


class ChangeDetector:
    """Judges one deviation, the logarithm of actual / predicted, after the other."""

    __slots__ = ("_samples", "_streak", "_usual", "limit")

    def __init__(self) -> None:
        self._streak: list[float] = []  # the latest surprises, of one sign
        self._expect(UNTAUGHT, 0)

    @property
    def clip(self) -> float:
        """The relative error that one sample may teach."""
        return exp(self.limit) - 1

    def judge(self, deviation: float) -> float:
        """By which factor all has changed: that of the middle surprise, once there are enough; 1 mostly."""
        size, limit, samples = abs(deviation), self.limit, self._samples + 1
        weight = 1 / (samples + 1)
        error = size if size < limit else limit
        self._expect(self._usual + (error - self._usual) * (weight if weight > USUAL_MEMORY else USUAL_MEMORY), samples)
        if size > limit:
            return self._surprised(deviation)
        self._streak.clear()
        return 1.0

    def _expect(self, usual: float, samples: int) -> None:
        """`usual`: a decayed mean of |deviation|. What is beyond `limit` is a surprise."""
        limit = USUAL * usual
        self._usual, self._samples, self.limit = usual, samples, limit if limit > LEAST_SURPRISE else LEAST_SURPRISE

    def _surprised(self, deviation: float) -> float:
        streak = self._streak
        if streak and streak[0] * deviation < 0:
            streak.clear()
        streak.append(deviation)
        if len(streak) < SURPRISES:
            return 1.0
        factor = exp(median(streak))
        self._expect(REGIME, round(1 / USUAL_MEMORY))
        streak.clear()
        return factor
