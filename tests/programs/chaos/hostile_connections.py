"""`python -m tests.programs.chaos.hostile_connections PORT NUMBER`: connections without a key, each active each second.

A separate process: the load must not delay the measured callers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from itertools import chain, repeat

import uvloop

from tests.programs.chaos.callers import chat, post

LARGE = 30_000_000  # bytes of body, as declared
PIECE = 16 * 1024  # bytes of the body sent each second


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


CHAT = "/v1/chat/completions"
ATTACKS: tuple[Callable[[], Iterable[bytes]], ...] = (  # pieces sent by a connection, one each second
    lambda: chain([head(CHAT, f"content-length: {LARGE}")], repeat(b"x" * PIECE)),
    lambda: chain([head("/nowhere", "transfer-encoding: chunked")], repeat(b"1\r\nx\r\n" * 500)),
    lambda: chain([head(CHAT, "authorization: Bearer sk-guess", f"content-length: {LARGE}")], repeat(b"x" * PIECE)),
    lambda: repeat(post(chat(), {"authorization": "Bearer sk-guess"})),
    lambda: chain([head(CHAT)[:-2]], (b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(1000))),
    lambda: repeat(b"\x16\x03\x01 no HTTP\r\n\r\n"),
    lambda: repeat(b"", 60),
    lambda: repeat(head("/v1/models", method="GET")),
)


async def hostile(port: int, number: int) -> None:
    """Connect again, a second later, whenever the gateway closes. The connections are spread over the second."""
    await asyncio.sleep(number % 1000 / 1000)
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(1.0)
            continue
        await _attack(reader, writer, number)
        writer.transport.abort()


async def _attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
    for piece in ATTACKS[number % len(ATTACKS)]():
        if reader.at_eof() or writer.transport.is_closing():
            return
        writer.write(piece)
        await asyncio.sleep(1.0)


async def main() -> None:
    port, count = int(sys.argv[1]), int(sys.argv[2])
    await asyncio.gather(*(hostile(port, number) for number in range(count)))


if __name__ == "__main__":
    uvloop.run(main())
