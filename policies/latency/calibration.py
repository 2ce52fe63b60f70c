"""How often first tokens came as soon as predicted: half of them within the p50, nine in ten within the p90."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import MEDIAN, NINETIETH, TINY, Forecast

MEMORY = 200  # samples that count in full; before them, a sample fades as one more comes


@dataclass(frozen=True, slots=True)
class CalibrationStatistics:
    """Shares from 0 to 1; perfect is 0.5 and 0.9. Of the last few hundred first tokens."""

    under_p50: float
    under_p90: float
    samples: int  # at most MEMORY


class Calibration:
    """Of one endpoint."""

    __slots__ = ("_samples", "_under_p50", "_under_p90")

    def __init__(self) -> None:
        self._samples = 0
        self._under_p50 = self._under_p90 = 0.0

    def observe(self, ttft: float, forecast: Forecast) -> None:
        """A first token came after `ttft` s, of which this had been expected."""
        if self._samples < MEMORY:
            self._samples += 1
        weight, ratios = 1 / self._samples, forecast.ratios
        ratio = ttft / (forecast.point_estimate or TINY)
        self._under_p50 += ((ratio <= ratios[MEDIAN]) - self._under_p50) * weight
        self._under_p90 += ((ratio <= ratios[NINETIETH]) - self._under_p90) * weight

    def statistics(self) -> CalibrationStatistics | None:
        """None: there was no first token yet."""
        if not self._samples:
            return None
        return CalibrationStatistics(round(self._under_p50, 4), round(self._under_p90, 4), self._samples)
