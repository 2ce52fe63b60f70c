"""Follows the KV-cache events of engines. ZMQ is an optional dependency, imported where a pool has `kv_events`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.core.part import Part
from gateway.wiring import Core

if TYPE_CHECKING:
    from gateway.parts.kv_events.kv_event_listener import KvEvents


class KvEventsPart(Part):
    name = "kv_events"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._events: KvEvents | None = None

    async def start(self) -> None:
        self.reload()

    def reload(self) -> None:
        sources = self._core.config.kv_events()
        if self._events is not None:
            self._events.listen(sources)
        elif sources:
            from gateway.parts.kv_events.kv_event_listener import KvEvents

            self._events = KvEvents(self._core.fleet, sources)
            self._events.start()

    async def close(self) -> None:
        if self._events is not None:
            await self._events.close()
