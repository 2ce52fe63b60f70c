"""Simulated servers of a scenario on free ports, and the gateway's configuration with their addresses.

The gateway is up before its engines, as at a cold start: until a server's time comes, connections to it are refused.
Streams carry several tokens an event, and usage tells no times. The names of endpoints break ties of the routing: equal
runs have equal addresses, unless they run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

from backends.server_profiles import ApiProfile
from lab.engines.lora_adapters import LoraAdapters
from lab.replay.sim_fleet import Scenario, ScheduledFault
from lab.servers.simulated_server import SimulatedServer
from policies.types import Pool

TOKENS_PER_EVENT = 4  # of the streams of engines
UP_AT = 1.0  # s after the gateway, of servers that the scenario names no time for
BLOCKS = range(64, 96)  # second bytes of the loopback addresses of servers: those of a run are in one block
PORT = 8000
Document = Mapping[str, Any]


class PlayFleet:
    """`servers` by endpoint id of the scenario; `up`: ids of those that listen."""

    def __init__(self, scenario: Scenario, servers: Mapping[str, SimulatedServer]) -> None:
        self.scenario = scenario
        self.servers = servers
        self.up: set[str] = set()

    def document(self, configured: Document) -> dict[str, Any]:
        """The scenario's configuration with the addresses of the servers, and free ports for the gateway."""
        found = deepcopy(dict(configured))
        for name, pool in found["pools"].items():
            urls = [server.url for endpoint, server in self.servers.items() if endpoint.startswith(f"{name}/")]
            if "endpoints" in pool:
                pool["endpoints"] = list(map(_moved, pool["endpoints"], urls))
            else:
                pool["base_url"] = f"{urls[0]}/v1"
        listening = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        return {**found, "server": listening, "telemetry": {"access_log": "off"}}

    async def run(self, shift: float) -> None:
        """Start the servers, and apply the faults of the scenario, `shift` s after its times."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for event in sorted(self._events(shift), key=lambda each: each.at):
            await asyncio.sleep(max(began + event.at - loop.time(), 0.0))
            await self._apply(event)

    def _events(self, shift: float) -> Iterable[ScheduledFault]:
        for endpoint in self.servers:
            yield ScheduledFault(self.scenario.starts.get(endpoint, UP_AT), endpoint, "restart")
        for fault in self.scenario.faults:
            yield ScheduledFault(fault.at + shift, fault.endpoint, fault.kind, fault.factor)

    async def _apply(self, event: ScheduledFault) -> None:
        server, is_up = self.servers[event.endpoint], event.endpoint in self.up
        match event.kind:
            case "slow":
                server.faults.slow = event.factor
            case "cold":
                server.forget_prefixes()
            case "kill" if is_up:
                self.up.remove(event.endpoint)
                await server.kill()
            case "restart" if not is_up:
                await server.start()
                self.up.add(event.endpoint)

    async def close(self) -> None:
        for endpoint in self.up:
            await self.servers[endpoint].stop()


@asynccontextmanager
async def play_fleet(scenario: Scenario, seed: int) -> AsyncIterator[PlayFleet]:
    """The servers have ports, and listen once `run` has started them."""
    pools = {endpoint.id: pool for pool in scenario.pools for endpoint in pool.endpoints}
    servers = {
        endpoint: _server(scenario, endpoint, pools[endpoint], seed * 1000 + number)
        for number, endpoint in enumerate(scenario.profiles)
    }
    await _take_addresses([*servers.values()])
    fleet = PlayFleet(scenario, servers)
    try:
        yield fleet
    finally:
        await fleet.close()


async def _take_addresses(servers: Sequence[SimulatedServer]) -> None:
    """An address for each server, in the first block that is free; without one, a port of this machine."""
    for block in (*BLOCKS, None):
        for number, server in enumerate(servers, 1):
            server.host, server.port = ("127.0.0.1", 0) if block is None else (f"127.{block}.0.{number}", PORT)
        try:
            for server in servers:
                await server.start()
                await server.stop()
        except OSError:
            continue
        return


def _server(scenario: Scenario, endpoint: str, pool: Pool, seed: int) -> SimulatedServer:
    profile, held = scenario.profiles[endpoint], pool.variants
    return SimulatedServer(
        profile,
        model=pool.model,
        encode=words,
        seed=seed,
        adapters=None if held is None else LoraAdapters(set(held.names), held.slots, held.load_s),
        tokens_per_event=1 if isinstance(profile, ApiProfile) else TOKENS_PER_EVENT,
        tells_times=False,
    )


def words(text: str) -> list[int]:
    """The words of a text as tokens: as many as a tokenizer finds in frequent words, at a fraction of its cost."""
    return [hash(word) for word in text.split()]


def _moved(endpoint: str | Document, url: str) -> str | dict[str, Any]:
    return url if isinstance(endpoint, str) else {**endpoint, "url": url}
