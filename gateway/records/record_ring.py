"""The latest Records on disk, by `records`: a sink of Records on one loop.

- A thread writes the rows of each LINGER (`gateway.observe.record_writer`): a slow disk delays no request.
- A full disk, or a file that is broken or locked, costs Records: one line on stderr at the first and at the end, and
  `firsttoken_records_lost_total`. Each later batch tries again.
- Beyond QUEUE rows behind, rows are lost.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from gateway.config.models import RecordsSection
from gateway.observe.record import Record
from gateway.observe.record_writer import RecordWriter
from gateway.records.packed_record import Row, packed
from gateway.records.record_file import RecordFile

log = logging.getLogger("firsttoken")

LINGER = 0.5  # s until rows are handed to the writer: what a killed process loses
QUEUE = 5_000  # rows; 0.5 KB each, 3 KB where the request was slow


class RecordRing(RecordWriter[Row]):
    def __init__(self, file: RecordFile) -> None:
        self._file = file
        super().__init__("records", LINGER, QUEUE)

    def encode(self, record: Record) -> Row:
        return packed(record)

    def write(self, items: list[Row]) -> None:
        self._file.append(items)

    def close(self) -> None:
        self.after_all(self._file.close)
        super().close()

    def on_failure(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, sqlite3.Error | OSError) else type(error).__name__
        log.warning("records are lost: %s: %s", self._file.path, reason)

    def on_recovery(self) -> None:
        log.warning("records are stored again: %d were lost", self.lost)


def record_ring(section: RecordsSection, worker: int, workers: int) -> RecordRing:
    """`worker`: number of this process, whose file has its share of the size."""
    return RecordRing(RecordFile(Path(section.dir) / f"records-{worker}.sqlite", section.size // workers))
