"""A scripted server and its connection pool, for tests of connections."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.http.connection_pool import ConnectionPool
from backends.interface import HttpCall
from tests.support.upstream import (
    Listener,
    Script,
    Upstream,
)

TRANSCRIPTS = Path(__file__).parents[1] / "backends" / "transcripts"


POST = HttpCall("POST", "/v1/chat/completions", {"content-type": "application/json"}, b'{"model":"m"}')


GET = HttpCall("GET", "/health")


HEAD = HttpCall("HEAD", "/health")


@asynccontextmanager
async def played(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[ConnectionPool, Upstream]]:
    """A connection pool for a scripted upstream."""
    async with Upstream(*scripts, tls=tls) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2, idle_timeout=60)
        try:
            yield origin, upstream
        finally:
            await origin.close()


async def ask(origin: ConnectionPool, call: HttpCall = POST) -> Listener:
    """Runs one call to its end."""
    listener = Listener()
    await origin.open(call, listener)
    await listener.ended()
    return listener
