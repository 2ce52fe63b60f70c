"""Resources that a worker gets from its supervisor, and shares with the other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Protocol

from gateway.admission.local_quotas import LocalQuotas
from gateway.fleet.monitor import SharedPolls
from gateway.server_certificate import ServerCertificate
from policies.fleet.peers import PeerLink


class WorkerLink(PeerLink, SharedPolls, Protocol):
    """A link to the other workers."""

    async def start(self, knows: Callable[[str], bool]) -> None:
        """`knows`: True for an endpoint of this gateway."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Resources of a worker, from the supervisor. `data`: socket for callers, if there is a data port; `admin`: Unix
    socket for the aggregator; `group`: name of this gateway among replicas; `log_lock`: file to lock while writing the
    access log."""

    number: int
    data: socket | None
    admin: socket
    peers: WorkerLink
    group: bytes
    log_lock: Path
    quotas: LocalQuotas
    certificate: ServerCertificate | None = None

    @property
    def is_leader(self) -> bool:
        """The leader runs singleton jobs."""
        return self.number == 0
