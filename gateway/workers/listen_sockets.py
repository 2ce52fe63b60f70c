"""The sockets that a gateway listens on, made before there is a loop."""

from __future__ import annotations

import socket
from pathlib import Path

from gateway.config.addresses import ListenAddress

BACKLOG = 4096  # connections


def bound(address: ListenAddress, *, shared: bool = False) -> socket.socket:
    """A TCP socket that has its port and does not listen yet. Raises OSError.

    `shared`: several may have the port, and the kernel spreads new connections over those that listen. Of the
    addresses of a name the first IPv4 one is taken, as callers do that try it.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made


def reserved(address: ListenAddress) -> socket.socket:
    """A bound socket that holds the port for workers to share. It never listens, so that it gets no connection.

    Raises OSError where somebody has the port, also one that would share it: another gateway's.
    """
    with bound(address) as ours:
        port = ours.getsockname()[1]
    return bound(ListenAddress(address.host, port), shared=True)


def private(path: Path) -> socket.socket:
    """A Unix socket that listens, for processes of ours."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen(BACKLOG)
    return made


def url(listening: socket.socket, host: str) -> str:
    """Where that is reached; `host` as it was configured."""
    return f"http://{host if ':' not in host else f'[{host}]'}:{listening.getsockname()[1]}"
