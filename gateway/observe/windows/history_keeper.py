"""Keeps the history of counts: takes the totals every few seconds, and saves the history over a restart.

Rules:
- One process keeps it: the only gateway process, or the one that answers for several workers.
- With `state.dir` the history is read at the start, and saved every SAVE_INTERVAL and at the stop, encoded and written
  in a thread. A file is replaced as a whole, and read whole or not at all.
- Nothing is written before the file was read: a gateway that is stopped at once does not replace what is there.
- What is broken, too large, of another version or from the future is ignored, with one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, time
from typing import Any

import msgspec

from gateway.atomic_file import NotAFile, read_regular, replace_file
from gateway.observe.windows.count_history import WINDOWS, CountHistory
from gateway.observe.windows.route_windows import is_count, totals, windows_view

log = logging.getLogger("firsttoken")

VERSION = 1
FILE = "history.json"
MAX_BYTES = 64 << 20
MAX_AHEAD = 300.0  # s by which the clock of the writer may have been ahead
TAKE_INTERVAL = 5.0  # s between two looks at the totals
SAVE_INTERVAL = 60.0  # s
# s for which one answer serves all viewers, who poll every 2 s: with 50 routes it takes 15 ms of the event loop.
FRESH = {"now": 1.9, "5m": 1.9, "1h": 9.9, "24h": 9.9}

Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SavedHistory:
    version: int
    saved_at: float  # Unix time, s
    counts: list[tuple[str, ...]]
    rings: dict[str, list[tuple[int, list[int], list[float]]]]


class HistoryKeeper:
    """`stats`: the present answer of GET /routes. `directory`: of the file; None: nothing is saved."""

    def __init__(self, stats: Callable[[], Stats], directory: str | None) -> None:
        self._stats = stats
        self._path = None if directory is None else Path(directory) / FILE
        self._history = CountHistory()
        self._task: asyncio.Task[None] | None = None
        self._views: dict[str, tuple[float, bytes]] = {}  # by window: monotonic time, and the answer
        self._failing = False
        self.restored = self._path is None  # the counts of the file are in the history, or ignored

    def start(self) -> None:
        self.take()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self.take()
            await self._save()

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
        await self._restore()
        saved = monotonic()
        while True:
            await asyncio.sleep(TAKE_INTERVAL)
            try:
                self.take()
            except Exception:
                log.exception("counts could not be taken for the history")
            if monotonic() - saved >= SAVE_INTERVAL:
                saved = monotonic()
                await self._save()

    async def _save(self) -> None:
        if self._path is None or not self.restored:
            return
        document = {"version": VERSION, "saved_at": time(), **self._history.as_json()}
        try:
            await asyncio.to_thread(lambda path: replace_file(path, msgspec.json.encode(document)), self._path)
        except OSError as error:
            if not self._failing:
                log.warning("history cannot be saved to %s: %s", self._path, error)
            self._failing = True
        else:
            self._failing = False

    async def _restore(self) -> None:
        if self._path is None:
            return
        try:
            raw = await asyncio.to_thread(read_regular, self._path, MAX_BYTES)
            if raw is not None:
                saved = await asyncio.to_thread(_decoded, raw, time())
                self._history.restore(saved.counts, saved.rings, time())
        except (OSError, NotAFile, ValueError, RecursionError) as error:
            log.warning("history in %s is ignored: %s", self._path, " ".join(str(error).split())[:200])
        self.restored = True
        self._views.clear()


def _decoded(raw: bytes, now: float) -> SavedHistory:
    """Raises ValueError."""
    if len(raw) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    saved = msgspec.json.decode(raw, type=SavedHistory)
    if saved.version != VERSION:
        raise ValueError(f"of version {saved.version}; this gateway reads version {VERSION}")
    if saved.saved_at > now + MAX_AHEAD:
        raise ValueError("saved in the future")
    if not all(map(is_count, saved.counts)):
        raise ValueError("a count of no route")
    return saved
