"""A sink of Records on one loop, whose results a thread writes: a slow disk delays no request.

Rules:
- The loop encodes BATCH Records at a time, as a thread would hold the interpreter meanwhile, and hands the results to
  the writer in larger groups.
- With too many results behind, or while writing fails, Records are lost and counted. Each later group tries again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from gateway.observe.record import Record

log = logging.getLogger("firsttoken")

Item = TypeVar("Item")

BATCH = 16  # Records encoded in one go: 0.1 ms
CLOSING = 5.0  # s for the writer to write what is behind at shutdown


class RecordWriter(ABC, Generic[Item]):
    """`name`: of the thread; `linger`: s until results are handed to the writer; `most`: results behind."""

    def __init__(self, name: str, linger: float, most: int) -> None:
        self.most = most
        self._linger = linger
        self._waiting: list[Record] = []
        self._items: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._given = self._dropped = 0  # results; counted on the loop, the counts below by the writer
        self._written = self._unwritten = 0
        self._failing = False
        self._queue: SimpleQueue[list[Item] | Callable[[], None] | None] = SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._write_forever, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def encode(self, record: Record) -> Item: ...

    @abstractmethod
    def write(self, items: list[Item]) -> None:
        """Called by the writer. An exception loses `items`."""

    @abstractmethod
    def on_failure(self, error: Exception) -> None:
        """The first of several writes in a row has failed."""

    def on_recovery(self) -> None:
        """A write after failed ones has succeeded."""

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self._encode()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self.flush)

    def _encode(self) -> None:
        """Encode all waiting Records, or drop them where too many are behind."""
        records, self._waiting = self._waiting, []
        if self.behind + len(self._items) + len(records) > self.most:
            self._dropped += len(records)
            return
        for record in records:
            try:
                self._items.append(self.encode(record))
            except Exception:  # a bug here must not lose the Records of others
                log.exception("a Record could not be encoded (%s)", self._thread.name)
                self._dropped += 1

    def flush(self) -> None:
        """Hand all results to the writer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._encode()
        if self._items:
            items, self._items = self._items, []
            self._given += len(items)
            self._queue.put(items)

    def after_all(self, work: Callable[[], None]) -> None:
        """Have the writer do `work` after all Records so far. `work` raises nothing."""
        self.flush()
        self._queue.put(work)

    @property
    def behind(self) -> int:
        """Results handed to the writer and not yet written."""
        return self._given - self._written - self._unwritten

    @property
    def lost(self) -> int:
        """Records, since the start."""
        return self._dropped + self._unwritten

    def close(self) -> None:
        """Write all results and stop; a stuck writer is abandoned after CLOSING."""
        self.flush()
        self._queue.put(None)
        self._thread.join(CLOSING)

    def _write_forever(self) -> None:
        while (given := self._queue.get()) is not None:
            if not isinstance(given, list):
                given()
                continue
            try:
                self.write(given)
            except Exception as error:  # a bug here must not end the thread
                if not self._failing:
                    self.on_failure(error)
                self._failing = True
                self._unwritten += len(given)
            else:
                if self._failing:
                    self.on_recovery()
                self._failing = False
                self._written += len(given)
