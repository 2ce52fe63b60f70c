"""Keeps counts of the last hours and days for GET /windows. Of workers, the process that answers for all does."""

from __future__ import annotations

from gateway.core.part import Part
from gateway.wiring import Core


class WindowsPart(Part):
    name = "windows"

    def __init__(self, core: Core) -> None:
        self._history = core.admin.history if core.worker is None else None

    async def start(self) -> None:
        if self._history is not None:
            self._history.start()

    async def close(self) -> None:
        if self._history is not None:
            await self._history.close()
