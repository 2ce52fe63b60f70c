"""Writes Records where the configuration wants them: to the access log, and to the ring on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.core.part import Part
from gateway.observe.logs import AccessLog
from gateway.observe.metrics.series import totals
from gateway.wiring import Core

if TYPE_CHECKING:
    from gateway.records.record_ring import RecordRing


class RecordsPart(Part, Collector):
    name = "records"

    def __init__(self, core: Core) -> None:
        self._recorder, worker, config = core.recorder, core.worker, core.config
        self._access_log: AccessLog | None = None
        self._ring: RecordRing | None = None
        if config.telemetry.access_log != "off":
            self._access_log = AccessLog(config.telemetry.access_log, None if worker is None else worker.log_lock)
        if config.records is not None:
            from gateway.records.record_ring import record_ring

            self._ring = record_ring(config.records, 0 if worker is None else worker.number, config.server.workers)
        self.collectors = (self,)
        self._logs = [each for each in (self._access_log, self._ring) if each is not None]
        self.readers = self._logs

    def collect(self) -> Iterable[Metric]:
        if self._access_log is not None:
            yield from totals("firsttoken_access_log_lines_lost_total", [((), self._access_log.lost)])
        if self._ring is not None:
            yield from totals("firsttoken_records_lost_total", [((), self._ring.lost)])

    def reopen(self) -> None:
        """Records of ended requests are in the renamed files."""
        self._recorder.flush()
        if self._access_log is not None:
            self._access_log.reopen()

    async def close(self) -> None:
        self._recorder.flush()
        for each in self._logs:
            each.close()
