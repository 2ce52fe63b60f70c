"""Callers that stop reading: the upstream is paused, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.app import Gateway
from tests.support.gateways import pool, running
from tests.support.simulated import eventually

READERS = 40
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 4000 + b'"}}]}\n\n'
PLENTY = 64 << 20  # bytes per complete answer


@asynccontextmanager
async def firehose() -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """An upstream that writes as fast as the gateway reads."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(PLENTY // len(EVENT)):
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", writers
    server.close()


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def stall(gateway: Gateway) -> asyncio.StreamWriter:
    """Requests a stream and reads nothing. The reader's own buffer is bounded by `limit`."""
    body = json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]), limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await reader.readuntil(b"\r\n")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return writer


async def test_a_stalled_reader_pauses_its_upstream() -> None:
    """The upstream can write no more; the gateway buffers a bounded amount per caller."""
    async with firehose() as (url, writers), running({"only": pool(url)}) as gateway:
        readers = [await stall(gateway) for _ in range(READERS)]
        connections = [c for c in gateway.data_port.server.connections if c.transport is not None]
        await eventually(lambda: len(writers) == READERS, within=60)
        await eventually(lambda: sum(c.writer.paused for c in connections) == READERS, within=60)
        held = [c.transport.get_write_buffer_size() for c in connections]
        assert max(held) <= 128 * 1024
        before = sum(w.transport.get_write_buffer_size() for w in writers)
        await asyncio.sleep(0.2)
        assert all(not w.transport.is_closing() for w in writers)
        assert sum(c.writer.paused for c in connections) == READERS
        after = sum(w.transport.get_write_buffer_size() for w in writers)
        assert abs(after - before) <= READERS * len(EVENT)  # remaining kernel buffers: a fraction of an event each
        for writer in readers:
            writer.transport.abort()
        await eventually(lambda: gateway.recorder.live == 0)
