"""Reports of an engine: its load, which workers pass on to each other (`gateway.workers.worker_peers`); its rates over
the last minute, from counters; and its sleep (vLLM's sleep mode), in which requests wait until somebody wakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policies.types import NEVER

RESTART_TOLERANCE = 1.0  # s by which an engine's own start time must move to be another start
Totals = Iterable[float | None]  # since the engine's start; None: not reported


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A scrape of an engine's metrics. None: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0 to 1
    block_size: int | None = None  # tokens
    kv_blocks: int | None = None  # capacity, in blocks
    started_at: float | None = None  # engine's own wall clock, s; a change means a restart
    prefix_queries: float | None = None  # counters, tokens
    prefix_hits: float | None = None
    variants: tuple[str, ...] = ()  # of running requests
    variant_slots: int | None = None
    preemptions: float | None = None  # counters
    drafted: float | None = None
    accepted: float | None = None
    asleep: bool | None = None  # its weights are put aside (vLLM's sleep mode): requests wait until it is woken
    rejections: float | None = None  # counter: requests refused by a limit of the engine's queue


def has_restarted(before: EngineLoad, after: EngineLoad, totals: Callable[[EngineLoad], Totals]) -> bool:
    """Tell by the engine's own start time; where it reports none, by these totals."""
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > RESTART_TOLERANCE
    return fell(totals(before), totals(after))


def fell(before: Totals, after: Totals) -> bool:
    """A total is less than it was: that of another process."""
    return any(old is not None and new is not None and new < old for old, new in zip(before, after, strict=True))


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


WAKE_S = 10.0  # s that a waking takes, until one was timed
STALE_PAGE = 1.0  # s after a waking, in which a page may still tell of the sleep
SLEPT_FOR = 30.0  # s for which the word is believed without another


class EngineSleep:
    """`wake_s`: s that a waking takes."""

    def __init__(self) -> None:
        self.asleep = False
        self.wake_s = WAKE_S
        self._told_at = self._woken_at = NEVER

    def on_told(self, asleep: bool, now: float) -> bool:
        """The engine's own word. Returns whether it has fallen asleep or woken up."""
        if asleep and now - self._woken_at < STALE_PAGE:
            return False
        self._told_at = now
        changed, self.asleep = asleep is not self.asleep, asleep
        return changed

    def on_woken(self, seconds: float, now: float) -> None:
        """It was woken, in so many seconds."""
        self.asleep = False
        self.wake_s, self._woken_at = seconds, now

    def on_unknown(self, now: float) -> None:
        """It tells nothing now."""
        if now - self._told_at > SLEPT_FOR:
            self.asleep = False
