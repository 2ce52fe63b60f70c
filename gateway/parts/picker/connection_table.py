"""Connections of a port, and the room of each address among them.

Rules:
- One address has at most half of the room: the other half is for the rest.
- A connection that has not sent the preface of HTTP/2 keeps nobody out: the oldest one is closed for a new one. Envoy
  sends it as soon as it is connected.
- The /64 of an IPv6 address counts as one address: any host has all of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address
from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionTable(Generic[T]):
    """`room`: connections; `close`: of one that makes room for another."""

    def __init__(self, room: int, close: Callable[[T], None]) -> None:
        self._room = room
        self._close = close
        self._peers: dict[T, str] = {}
        self._silent: dict[T, None] = {}  # without a preface, oldest first
        self._by_peer: Counter[str] = Counter()

    def __iter__(self) -> Iterator[T]:
        return iter([*self._peers])

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, connection: T, address: str) -> bool:
        """False: there is no room."""
        peer = _peer(address)
        if not self._make_room(peer):
            return False
        self._peers[connection] = peer
        self._silent[connection] = None
        self._by_peer[peer] += 1
        return True

    def begin(self, connection: T) -> None:
        """The connection has sent its preface."""
        self._silent.pop(connection, None)

    def discard(self, connection: T) -> None:
        self.begin(connection)
        if (peer := self._peers.pop(connection, None)) is not None:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def _make_room(self, peer: str) -> bool:
        if self._by_peer[peer] >= max(self._room // 2, 1):
            return self._close_oldest(peer)
        return len(self._peers) < self._room or self._close_oldest()

    def _close_oldest(self, peer: str | None = None) -> bool:
        """Closes the oldest silent connection. `peer`: of that one; None: of any."""
        oldest = next((each for each in self._silent if peer is None or self._peers[each] == peer), None)
        if oldest is None:
            return False
        self.discard(oldest)
        self._close(oldest)
        return True


def _peer(address: str) -> str:
    """`address`: of the peer, with a scope or without."""
    if ":" not in address:
        return address
    ip = IPv6Address(address)
    return str(ip.ipv4_mapped or int(ip) >> 64)
