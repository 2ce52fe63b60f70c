"""Ports of this process that other processes on the machine do not get meanwhile."""

from __future__ import annotations

import socket
from functools import cache


@cache
def _closed() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


def closed_port() -> int:
    """A port that refuses connections: bound, so that nobody else listens there, and without a listener."""
    port: int = _closed().getsockname()[1]
    return port


def is_free(port: int) -> bool:
    """True if nobody has bound the port."""
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
