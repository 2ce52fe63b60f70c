"""Opens what the configuration has Records written to: the access log, and the ring on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.config.models import Config
from gateway.observe.logs import AccessLog
from gateway.observe.metrics.series import totals
from gateway.worker_context import WorkerContext

if TYPE_CHECKING:
    from gateway.records.record_ring import RecordRing


class RecordLogs(Collector):
    """`sinks`: for the recorder of one loop. `worker`: this process among several; None: it is alone."""

    def __init__(self, config: Config, worker: WorkerContext | None) -> None:
        self._access_log: AccessLog | None = None
        self._ring: RecordRing | None = None
        if config.telemetry.access_log != "off":
            self._access_log = AccessLog(config.telemetry.access_log, None if worker is None else worker.log_lock)
        if config.records is not None:
            from gateway.records.record_ring import record_ring

            self._ring = record_ring(config.records, 0 if worker is None else worker.number, config.server.workers)
        self.sinks = [each for each in (self._access_log, self._ring) if each is not None]

    def collect(self) -> Iterable[Metric]:
        if self._access_log is not None:
            yield from totals("firsttoken_access_log_lines_lost_total", [((), self._access_log.lost)])
        if self._ring is not None:
            yield from totals("firsttoken_records_lost_total", [((), self._ring.lost)])

    def reopen(self) -> None:
        """Open the file of the access log again by its name."""
        if self._access_log is not None:
            self._access_log.reopen()

    def close(self) -> None:
        for each in self.sinks:
            each.close()
