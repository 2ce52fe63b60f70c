"""Counts prompts after they were sent, between other callbacks of the event loop.

Rules:
- A slice lasts SLICE seconds, or one segment of a text if that takes longer. The next one follows when the slices have
  taken SHARE of the time at most: under load the counts wait, and requests do not.
- What waits is bounded in bytes. Beyond, a prompt is dropped: it stays estimated, and those before it are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from time import perf_counter

SLICE = 0.0005  # s
SHARE = 0.05  # of the time
BACKLOG = 8_000_000  # bytes of prompts: more than a caller can send before the next slice

log = logging.getLogger("firsttoken")


class DeferredCounts:
    """The counts of an event loop. `dropped`: prompts so far."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.dropped = 0
        self._limit = backlog
        self._waiting: deque[tuple[int, Iterator[None]]] = deque()
        self._bytes = 0
        self._scheduled = False

    @property
    def bytes(self) -> int:
        """Of the prompts that wait."""
        return self._bytes

    def add(self, size: int, count: Iterator[None]) -> None:
        """`count`: counts a segment at each step. `size`: bytes that it keeps in memory."""
        if self._bytes + size > self._limit:
            self.dropped += 1
            return
        self._waiting.append((size, count))
        self._bytes += size
        if not self._scheduled:
            self._schedule(0.0)

    def _remove(self) -> None:
        size, _ = self._waiting.popleft()
        self._bytes -= size

    def _schedule(self, delay: float) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(delay, self._slice)

    def _slice(self) -> None:
        self._scheduled = False
        started = perf_counter()
        while self._waiting and perf_counter() - started < SLICE:
            self._step()
        if self._waiting:
            self._schedule((perf_counter() - started) * (1 / SHARE - 1))

    def _step(self) -> None:
        """A prompt that cannot be counted stays estimated: its request was sent."""
        try:
            next(self._waiting[0][1])
        except StopIteration:
            self._remove()
        except Exception:
            log.exception("a prompt cannot be counted")
            self._remove()
