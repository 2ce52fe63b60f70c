"""Lateness of the event loop, which delays every answer in progress.

A timer due every PERIOD measures the own lateness, the delay of any event at that moment. Stalls shorter than PERIOD
may go unseen, longer stalls cannot. Below a millisecond the lateness is the resolution of the timer. A request is
charged with the longest stall ending between arrival (or shortly before, with bytes in the socket) and first token. The
stall is part of the stages in which it fell, not a stage.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic

from prometheus_client.core import Metric

from gateway.observe.metrics.series import counter, gauge, histogram

log = logging.getLogger("firsttoken")

PERIOD = 0.05  # s
STALL = 0.005  # s of lateness from which a stall is counted
LOG_INTERVAL = 60.0  # s between two log lines
SETTLING = 30.0  # s after the start without one: first connections and late imports stall, and are counted
BEFORE = 0.005  # s between the end of a stall and the reading of bytes that arrived meanwhile
KEPT = 600.0  # s of history; longer than a first token may take


class LoopLag:
    """Measures one event loop from `start` to `close`. Exports histogram, stalls and greatest lateness."""

    def __init__(self) -> None:
        self.seconds = histogram("firsttoken_loop_lag_seconds")
        self.stalls = counter("firsttoken_loop_stalls_total")
        self._stalled = self.stalls.of[()]  # shown from the start
        self._greatest = 0.0  # since the last scrape
        self._due = inf
        self._logged_at = -inf
        # Ends and sizes of past latenesses not exceeded later: `_late` descends.
        self._ended: list[float] = []
        self._late: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self.on_beat: Callable[[float], None] = lambda now: None  # every PERIOD

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._logged_at = monotonic() + SETTLING - LOG_INTERVAL
        self._due = monotonic() + PERIOD
        self._timer = loop.call_later(PERIOD, self._tick, loop)

    def close(self) -> None:
        self._due = inf
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = monotonic()
        self.on_beat(now)
        self.saw(max(now - self._due, 0.0), now)
        self._due = monotonic() + PERIOD
        self._timer = loop.call_later(PERIOD, self._tick, loop)

    def saw(self, late: float, now: float) -> None:
        """Record a lateness of the timer, in seconds."""
        self.seconds.of[()].observe(late)
        self._greatest = max(self._greatest, late)
        while self._late and self._late[-1] <= late:
            self._late.pop()
            self._ended.pop()
        self._late.append(late)
        self._ended.append(now)
        if self._ended[0] < now - KEPT:
            del self._late[0], self._ended[0]
        if late >= STALL:
            self._stalled.value += 1
            if now - self._logged_at >= LOG_INTERVAL:
                self._logged_at = now
                log.warning("event loop stalled for %.1f ms (stall %d)", late * 1e3, self._stalled.value)

    def since(self, arrival: float, now: float) -> float:
        """Longest stall that may have delayed a request since `arrival`, a present stall included."""
        first = bisect_left(self._ended, arrival - BEFORE)
        past = self._late[first] if first < len(self._late) else 0.0
        return max(past, now - self._due)

    def collect(self) -> Iterable[Metric]:
        yield from self.seconds.collect()
        yield from self.stalls.collect()
        yield gauge("firsttoken_loop_lag_max_seconds", [((), self._greatest)])
        self._greatest = 0.0
