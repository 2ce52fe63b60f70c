"""An engine that leaves while it streams, and its successor at another address of the same port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, Caller, post
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = post({**CHAT, "stream": True})
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Upstream, Upstream, int]]:
    """The engine that leaves, at 127.0.0.1, its successor at 127.0.0.2, and the port of both."""
    async with Upstream(SLOW) as leaves:
        port = int(leaves.url.rpartition(":")[2])
        async with Upstream([STREAMED], host="127.0.0.2", port=port) as comes:
            yield leaves, comes, port


async def finished(leaves: Upstream, caller: Caller) -> bytes:
    """The rest of the stream that was open when the engine left."""
    leaves.proceed()
    return b"".join(await caller.chunks())
