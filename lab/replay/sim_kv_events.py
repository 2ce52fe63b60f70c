"""KV events of simulated engines, as a gateway hears them.

A gateway without events believes in the prompts that were sent. With events of the GPU alone an evicted block is lost;
with those of the CPU's memory too, the block is one to load. A scenario with `kv_events` is played by one gateway
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lab.engines.kv_cache import CacheChange
from lab.replay.sim_fleet import Scenario, SimFleet
from policies.fleet.fleet import Fleet
from policies.prefix_cache.residency import Residency


class SimKvEvents:
    """Applies the events of the scenario's media."""

    def __init__(self, scenario: Scenario, servers: SimFleet, fleet: Fleet) -> None:
        self._media, self._block = scenario.kv_events, scenario.block
        self._servers, self._fleet = servers, fleet
        local = [each.id for pool in scenario.pools for each in pool.endpoints if pool.local and self._media]
        for endpoint in local:
            servers.listen(endpoint)
            if (cache := fleet.cache(endpoint)) is not None:
                cache.enable_events()

    def session(self, key: int) -> str:
        """Name of an attempt in the events; empty: nobody listens."""
        return str(key) if self._media else ""

    def hear(self, endpoint: str) -> None:
        """Apply the events of an engine since the last call."""
        cache = self._fleet.cache(endpoint) if self._media else None
        if cache is None or cache.residency is None:
            return
        for change in self._servers.cache_changes(endpoint):
            if change.medium in self._media:
                self._apply(cache.residency, change)
        cache.on_events()

    def _apply(self, residency: Residency, change: CacheChange) -> None:
        blocks = cast("Sequence[int]", change.blocks)
        if not change.stored:
            residency.on_removed(blocks, 0, change.medium)
        elif change.medium == "gpu":
            residency.on_stored(blocks, cast("int | None", change.parent), self._block, session=change.session)
        else:
            residency.on_offloaded(blocks, 0, change.medium)
