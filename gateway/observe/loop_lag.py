"""How late our own event loop is: what it holds up, every answer in progress has to wait for.

A timer that is due every PERIOD notes how late it was. That is what any event would have waited that came at that
moment; a stall shorter than PERIOD may fall between two looks, a longer one cannot. Under a millisecond the
lateness is the timer's own grain.

A request is told the longest stall that it may have sat through: of those that ended between its arrival and its
first token, or just before its arrival, when its bytes may have lain in the socket meanwhile. It is part of the
stages that it fell into, and no stage itself.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterable
from math import inf
from time import monotonic

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import counter, gauge, histogram

log = logging.getLogger("firsttoken")

PERIOD = 0.05  # s
STALL = 0.005  # s of lateness that are counted, and said
SAID_EVERY = 60.0  # s between two lines of the log
BEFORE = 0.005  # s between the end of a stall and the reading of what came during it
KEPT = 600.0  # s; longer than a first token may take


class LoopLag(Collector):
    """`start`, then `close`. `seconds`, `stalls` and the greatest lateness since the last scrape are collected."""

    def __init__(self) -> None:
        self.seconds = histogram("firsttoken_loop_lag_seconds")
        self.stalls = counter("firsttoken_loop_stalls_total")
        self._tally, self._stalled = self.seconds.of[()], self.stalls.of[()]
        self._greatest = 0.0  # since the last scrape
        self._due = inf
        self._said_at = -inf
        self._ended: list[float] = []  # of the latenesses that no later one exceeds, so that they descend
        self._late: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = monotonic() + PERIOD
        self._timer = loop.call_later(PERIOD, self._tick, loop)

    def close(self) -> None:
        self._due = inf
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = monotonic()
        self.saw(max(now - self._due, 0.0), now)
        self.start(loop)

    def saw(self, late: float, now: float) -> None:
        """The timer was `late` by so many seconds."""
        self._tally.observe(late)
        self._greatest = max(self._greatest, late)
        self._keep(late, now)
        if late >= STALL:
            self._stalled.value += 1
            if now - self._said_at >= SAID_EVERY:
                self._said_at = now
                log.warning("the event loop stood still for %.1f ms (stall %d)", late * 1e3, self._stalled.value)

    def _keep(self, late: float, now: float) -> None:
        while self._late and self._late[-1] <= late:
            self._late.pop()
            self._ended.pop()
        self._late.append(late)
        self._ended.append(now)
        if self._ended[0] < now - KEPT:
            del self._late[0], self._ended[0]

    def since(self, moment: float, now: float) -> float:
        """The longest stall that a request which arrived at `moment` may have sat through, one that lasts included."""
        moment -= BEFORE
        lasting = now - self._due
        ended = self._ended
        if not ended or ended[-1] < moment:  # nearly always: requests are short, and ticks are rare
            return lasting if lasting > 0.0 else 0.0
        return max(self._late[bisect_left(ended, moment)], lasting)

    def collect(self) -> Iterable[Metric]:
        yield from self.seconds.collect()
        yield from self.stalls.collect()
        yield gauge("firsttoken_loop_lag_max_seconds", [((), self._greatest)])
        self._greatest = 0.0
