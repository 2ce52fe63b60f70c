"""A round-robin TCP balancer, `balancer.py PORT BACKEND_PORT...`: each connection goes to the next backend."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import cycle

import uvloop

HOST, CHUNK = "127.0.0.1", 64 * 1024
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of input."""
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def round_robin(
    backends: Sequence[int],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]:
    turns = cycle(backends)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: Streams = await asyncio.open_connection(HOST, next(turns))
        try:
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        finally:
            for end in (writer, there[1]):
                end.close()

    return serve


async def main(port: int, backends: Sequence[int]) -> None:
    server = await asyncio.start_server(round_robin(backends), HOST, port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
