"""Endpoints that are found while the gateway runs: by the DNS, and from Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config
from gateway.fleet.dns_discovery import DnsDiscovery
from gateway.kubernetes.pod_discovery import PodDiscovery
from gateway.observe.metrics.series import gauge

log = logging.getLogger("firsttoken")

RETRY = 5.0  # s until found endpoints that could not be applied are tried again


class Discovery(Collector):
    """Follows the names and the sources of the configuration in force."""

    def __init__(self) -> None:
        self.dns = DnsDiscovery()
        self._changed = asyncio.Event()
        self.pods = PodDiscovery(self._changed.set)
        self._applying: asyncio.Task[None] | None = None

    @property
    def found(self) -> Discovered:
        return Discovered(self.dns.addresses, self.pods.pods)

    async def follow(self, config: Config) -> None:
        """Wait a little for first answers: the caller reads `found` next."""
        await asyncio.gather(
            self.dns.follow(config.resolved_hosts()),
            self.pods.follow(config.kubernetes, config.pod_sources()),
        )

    def start(self, apply: Callable[[], Awaitable[None]]) -> None:
        """Call `apply` after each change of `found` from now on. Where it fails, the endpoints before stay."""
        self._applying = asyncio.get_running_loop().create_task(self._apply_changes(apply))

    async def _apply_changes(self, apply: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self.changed()
            tries = 1
            while not await _succeeds(apply, logged=tries == 1):
                tries += 1
                await asyncio.sleep(RETRY)

    async def changed(self) -> None:
        """Wait until `found` has changed."""
        waits = [asyncio.ensure_future(self.dns.changed()), asyncio.ensure_future(self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._changed.clear()

    def collect(self) -> Iterable[Metric]:
        left_out = self.pods.left_out.items()
        yield gauge("firsttoken_kubernetes_endpoints_left_out", [((str(source),), more) for source, more in left_out])

    async def close(self) -> None:
        if self._applying is not None:
            self._applying.cancel()
        await self.dns.close()
        await self.pods.close()


async def _succeeds(apply: Callable[[], Awaitable[None]], *, logged: bool) -> bool:
    try:
        await apply()
    except Exception:
        if logged:
            log.exception("addresses changed, but the new endpoints could not be applied; tried every %g s", RETRY)
        return False
    return True
