"""Keeps what was learned of engines over a restart, in a file or in Redis."""

from __future__ import annotations

from gateway.cluster.redis_client import RedisClient
from gateway.core.part import Part
from gateway.fleet.learned_keeper import LearnedKeeper, state_store
from gateway.wiring import Core


class LearnedPart(Part):
    def __init__(self, core: Core) -> None:
        self._keeper: LearnedKeeper | None = None
        if (store := state_store(core.config.state, core.find(RedisClient))) is not None:
            self._keeper = LearnedKeeper(store, core.fleet, core.runtime, core.is_leader)
            self.collectors = (self._keeper,)
            core.monitor.limit_log.on_begin = self._keeper.save_soon

    async def start(self) -> None:
        if self._keeper is not None:
            await self._keeper.start()

    def succeeded(self) -> None:
        if self._keeper is not None:
            self._keeper.stop_writing()

    async def close(self) -> None:
        if self._keeper is not None:
            await self._keeper.close()
