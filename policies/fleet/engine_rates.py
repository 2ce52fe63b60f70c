"""Rates of an engine over the last minute, from counters of its reports."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from policies.fleet.engine_load import fell

WINDOW = 60.0  # s
MAX_SAMPLES = 64  # reports kept: one in WINDOW / MAX_SAMPLES seconds at most
MIN_DRAFTED = 20.0  # tokens, below which an acceptance says nothing


class EngineCounters(NamedTuple):
    """Totals since the engine's start. None: not reported."""

    preemptions: float | None = None  # answers put back into the queue for want of KV cache
    drafted: float | None = None  # tokens proposed by speculative decoding
    accepted: float | None = None
    evictions: float | None = None  # blocks dropped from the prefix cache, by KV events
    rejections: float | None = None  # requests refused by the engine's own queue limit


class EngineRates:
    """Differences between reports. A total that decreased is that of another process: what was known is dropped."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, EngineCounters]] = deque()

    def note(self, counters: EngineCounters, now: float) -> None:
        samples = self._samples
        if samples and fell(samples[-1][1], counters):
            samples.clear()
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < WINDOW / MAX_SAMPLES:
            samples.pop()
        samples.append((now, counters))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW:
            samples.popleft()

    @property
    def preemptions_per_s(self) -> float | None:
        return self._rate("preemptions")

    @property
    def evictions_per_s(self) -> float | None:
        return self._rate("evictions")

    @property
    def rejections_per_s(self) -> float | None:
        return self._rate("rejections")

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens."""
        drafted, accepted = self._grown("drafted"), self._grown("accepted")
        if drafted is None or accepted is None or drafted < MIN_DRAFTED:
            return None
        return min(accepted / drafted, 1.0)

    def _rate(self, name: str) -> float | None:
        grown = self._grown(name)
        seconds = self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0
        return None if grown is None or seconds <= 0 else grown / seconds

    def _grown(self, name: str) -> float | None:
        if not self._samples:
            return None
        first, last = getattr(self._samples[0][1], name), getattr(self._samples[-1][1], name)
        return None if first is None or last is None else last - first
