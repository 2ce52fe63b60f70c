"""Shares loads of endpoints and quotas of keys with the other workers behind the same port."""

from __future__ import annotations

from gateway.core.part import Part
from gateway.wiring import Core


class WorkersPart(Part):
    name = "workers"

    def __init__(self, core: Core) -> None:
        self._worker, self._knows = core.worker, core.fleet.view.knows
        if self._worker is not None:
            core.join(self._worker.peers)

    async def start(self) -> None:
        if self._worker is not None:
            await self._worker.peers.start(self._knows)

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.peers.close()
