"""Endpoints that are found while the gateway runs: by the DNS, and from Kubernetes."""

from __future__ import annotations

import asyncio

from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config
from gateway.fleet.dns_discovery import DnsDiscovery
from gateway.kubernetes.pod_discovery import PodDiscovery


class Discovery:
    """Follows the names and the sources of the configuration in force."""

    def __init__(self) -> None:
        self.dns = DnsDiscovery()
        self._changed = asyncio.Event()
        self.pods = PodDiscovery(self._changed.set)

    @property
    def found(self) -> Discovered:
        return Discovered(self.dns.addresses, self.pods.pods)

    async def follow(self, config: Config) -> None:
        """Wait a little for first answers: the caller reads `found` next."""
        await asyncio.gather(
            self.dns.follow(config.resolved_hosts()),
            self.pods.follow(config.kubernetes, config.pod_sources()),
        )

    async def changed(self) -> None:
        """Wait until `found` has changed."""
        waits = [asyncio.ensure_future(self.dns.changed()), asyncio.ensure_future(self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._changed.clear()

    async def close(self) -> None:
        await self.dns.close()
        await self.pods.close()
