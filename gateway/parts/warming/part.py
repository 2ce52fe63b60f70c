"""Warms up caches of engines, in one process of the workers."""

from __future__ import annotations

from gateway.core.hooks import Hooks, RoutePlan
from gateway.core.part import Part
from gateway.wiring import Core


class WarmingPart(Part):
    name = "warming"

    def __init__(self, core: Core) -> None:
        self._warming, self._is_leader = core.cache_warming, core.is_leader

    def on(self, plan: RoutePlan) -> Hooks:
        return self._warming.on(plan)

    async def start(self) -> None:
        if self._is_leader:
            self._warming.start()

    def reload(self) -> None:
        self._warming.reload()

    async def close(self) -> None:
        await self._warming.close()
