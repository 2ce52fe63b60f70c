"""`slow_senders.py PORT COUNT`: sends heads of requests at a byte a second, until terminated.

A separate process: the load must not delay the measured callers.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from tests.programs.chaos.callers import chat, post

HEAD = post(chat())


async def sender(port: int, number: int) -> None:
    """Connect again whenever the gateway closes. The senders' bytes are spread over the second."""
    await asyncio.sleep(number % 1000 / 1000)
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(1.0)
            continue
        for byte in HEAD:
            if reader.at_eof() or writer.transport.is_closing():  # the latter alone after a reset
                break
            writer.write(bytes((byte,)))
            await asyncio.sleep(1.0)
        writer.transport.abort()


async def main() -> None:
    port, count = int(sys.argv[1]), int(sys.argv[2])
    await asyncio.gather(*(sender(port, number) for number in range(count)))


if __name__ == "__main__":
    uvloop.run(main())
