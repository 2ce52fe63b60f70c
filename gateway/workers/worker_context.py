"""What a gateway is given where it is one of several on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.admission.local_quotas import LocalQuotas
from policies.fleet.peers import PeerLink


class Sharing(PeerLink, Protocol):
    """Siblings that know the same endpoints by the same places."""

    def share(self, endpoints: Iterable[str]) -> None:
        """These, from now on."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """`data` listens for callers, `admin` (a Unix socket) for the desk. `siblings`: the way to the other workers.
    `group`: what they all are called among replicas. `lock`: a file to be locked by whoever writes where all write.
    `quotas`: one for all of them."""

    number: int
    data: socket.socket
    admin: socket.socket
    siblings: Sharing
    group: bytes
    lock: Path
    quotas: LocalQuotas

    @property
    def first(self) -> bool:
        """One of them does what is to be done once."""
        return self.number == 0
