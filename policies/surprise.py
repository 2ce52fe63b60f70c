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


class Surprise:
    """Judges one deviation, the logarithm of actual / predicted, after the other."""

    __slots__ = ("_samples", "_streak", "_usual")

    def __init__(self) -> None:
        self._usual, self._samples = UNTAUGHT, 0  # decayed mean of |deviation|
        self._streak: list[float] = []  # the latest surprises, of one sign

    @property
    def limit(self) -> float:
        """Of a ratio's logarithm: what is beyond is a surprise."""
        return max(USUAL * self._usual, LEAST_SURPRISE)

    @property
    def clip(self) -> float:
        """The relative error that one sample may teach."""
        return exp(self.limit) - 1

    def judge(self, deviation: float) -> float:
        """By which factor all has changed: that of the middle surprise, once there are enough; 1 mostly."""
        limit, streak = self.limit, self._streak
        if abs(deviation) <= limit or (streak and streak[0] * deviation < 0):
            streak.clear()
        if abs(deviation) > limit:
            streak.append(deviation)
        self._samples += 1
        self._usual += (min(abs(deviation), limit) - self._usual) * max(USUAL_MEMORY, 1 / (self._samples + 1))
        if len(streak) < SURPRISES:
            return 1.0
        factor = exp(median(streak))
        self._usual, self._samples = REGIME, round(1 / USUAL_MEMORY)
        streak.clear()
        return factor
