"""Keeps the history of counts: takes the totals every few seconds.

One process keeps it: the only gateway process, or the one that answers for several workers. A restart begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic, time
from typing import Any

import msgspec

from gateway.observe.windows.count_history import WINDOWS, CountHistory
from gateway.observe.windows.route_windows import totals, windows_view

log = logging.getLogger("firsttoken")

TAKE_INTERVAL = 5.0  # s between two looks at the totals
# s for which one answer serves all viewers, who poll every 2 s: with 50 routes it takes 15 ms of the event loop.
FRESH = {"now": 1.9, "5m": 1.9, "1h": 9.9}

Stats = Mapping[str, Any]


class HistoryKeeper:
    """`stats`: the present answer of GET /routes."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats
        self._history = CountHistory()
        self._task: asyncio.Task[None] | None = None
        self._views: dict[str, tuple[float, bytes]] = {}  # by window: monotonic time, and the answer

    def start(self) -> None:
        self.take()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def take(self) -> Stats:
        """Note the present totals; returns their answer of GET /routes."""
        stats = self._stats()
        self._history.note(totals(stats), time())
        return stats

    def view(self, window: str) -> bytes:
        """The answer of GET /windows. `window`: a name in WINDOWS."""
        now = monotonic()
        at, answer = self._views.get(window, (-inf, b""))
        if now - at >= FRESH[window]:
            stats = self.take()
            answer = msgspec.json.encode(windows_view(self._history, WINDOWS[window], stats, time()))
            self._views[window] = now, answer
        return answer

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TAKE_INTERVAL)
            try:
                self.take()
            except Exception:
                log.exception("counts could not be taken for the history")
