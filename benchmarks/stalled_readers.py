"""What a reader that stops reading costs: `stalled_readers.py [READERS]` prints KB of gateway memory for each.

An upstream that writes as fast as it is read, a gateway in a process of its own, and readers that
ask for a stream and read nothing of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from benchmarks.processes import child, free_port, gateway, resident

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 400 + b'"}}]}\n\n'
FRAMED = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SETTLE = 6.0  # s until all buffers are full


class Firehose:
    """Counts the bytes that were taken from it."""

    taken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if b"POST" not in await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                return
            writer.write(HEAD)
            while True:
                writer.write(FRAMED * 20)
                await writer.drain()
                self.taken += len(FRAMED) * 20
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def stall(port: int) -> socket.socket:
    """A stream that is asked for and never read, over a socket with a small buffer."""
    body = json.dumps({"model": "any", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, ("127.0.0.1", port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    await loop.sock_sendall(reader, head + body)
    return reader


async def main(count: int) -> None:
    firehose, port = Firehose(), free_port()
    server = await asyncio.start_server(firehose.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with child(gateway(port, url), port) as pid:
        (await stall(port)).close()
        await asyncio.sleep(1)
        before = resident(pid)
        readers = [await stall(port) for _ in range(count)]
        await asyncio.sleep(SETTLE)
        held, taken = resident(pid) - before, firehose.taken
        await asyncio.sleep(SETTLE)
        more = firehose.taken - taken
        print(f"{count} stalled readers: {held / count / 1024:.0f} KB each; {more} bytes more taken in {SETTLE:g} s")
        for reader in readers:
            reader.close()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
