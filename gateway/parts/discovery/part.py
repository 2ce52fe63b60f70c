"""Finds endpoints while the gateway runs: by the DNS, and from Kubernetes."""

from __future__ import annotations

from gateway.config.models import Config
from gateway.core.part import Part
from gateway.fleet.discovery import Discovery
from gateway.wiring import Core


class DiscoveryPart(Part):
    name = "discovery"

    def __init__(self, core: Core) -> None:
        self._core, self.found = core, Discovery()
        self.collectors = (self.found,)

    async def start(self) -> None:
        if self._core.config.is_dynamic:
            await self._core.apply(self._core.config)
        self.found.start(self._core.refresh)

    async def follow(self, config: Config) -> None:
        await self.found.follow(config)

    def completed(self, config: Config) -> Config:
        return config.with_discovered(self.found.found)

    async def close(self) -> None:
        await self.found.close()
