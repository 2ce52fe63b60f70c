"""Memory of a proxy per idle connection, live stream, and stalled reader.

Measured as growth of the process's resident set, without kernel buffers.
"""

from __future__ import annotations

import asyncio
import socket
from itertools import repeat
from time import perf_counter

from benchmarks.client import HOST, BadAnswer, Connection, closed_loop, connect, request
from benchmarks.engine import OFFERED
from benchmarks.figures.figure import Engines, Figure, Goal, Measured, Scenario
from benchmarks.peers import NGINX, Proxy
from benchmarks.processes import cpu_seconds, resident
from benchmarks.prompts import Writer

STREAMS, RAMP, WINDOW = 500, 2.0, 5.0  # live streams, s to open all of them, s of measurement
READERS = 2_000
PATIENCE = 30  # s until buffers are full
IDLE = 2_000
PROMPT = 8_000  # bytes, of a live stream
QUESTION, SHORT, HOSE = (request(shape, ["Go on."]) for shape in ("whole", "stream-10-5", "hose"))


async def warmed(proxy: Proxy) -> int:
    """Resident bytes after some work."""
    for asked in (QUESTION, SHORT):
        await closed_loop(proxy.port, repeat(asked, 256), 64)
    await asyncio.sleep(0.5)
    return resident(proxy.pid)


async def live(proxy: Proxy, _engines: Engines) -> Measured:
    """20 tokens a second each: the share of a core, and memory of each."""
    before, connections = await warmed(proxy), list[Connection]()
    for number in range(STREAMS):
        connections.append(await connect(proxy.port))
        connections[-1].ask(request("stream-400-50", [Writer(number).text(PROMPT)]))
        await asyncio.sleep(RAMP / STREAMS)
    await asyncio.sleep(1.0)
    began, used = perf_counter(), cpu_seconds(proxy.pid)
    await asyncio.sleep(WINDOW)
    share = (cpu_seconds(proxy.pid) - used) / (perf_counter() - began)
    held, now = resident(proxy.pid) - before, perf_counter()
    wrong = [connection.stall_reason(now - 1.0) for connection in connections]
    for connection in connections:
        connection.disconnect()
    if any(wrong):
        raise BadAnswer(next(filter(None, wrong)))
    return {"core_share": share * 100, "live_kb": held / STREAMS / 1024}


async def idle(proxy: Proxy, _engines: Engines) -> Measured:
    """Idle keep-alive connections after one answer."""
    before, connections = await warmed(proxy), list[Connection]()
    for _ in range(IDLE):
        connections.append(await connect(proxy.port))
        await connections[-1].ask(QUESTION)
    await asyncio.sleep(0.5)
    held, kept = resident(proxy.pid) - before, sum(connection.transport is not None for connection in connections)
    for connection in connections:
        connection.disconnect()
    if kept < IDLE:
        raise RuntimeError(f"{IDLE - kept} connections were closed")
    return {"idle_kb": held / IDLE / 1024}


async def stalled(proxy: Proxy, engines: Engines) -> Measured:
    """Streams never read, from engines which write at full speed."""
    before, taken = await warmed(proxy), await taken_from(engines)
    readers = [await stall(proxy.port) for _ in range(READERS)]
    taken = await settled(engines) - taken
    held = resident(proxy.pid) - before
    for reader in readers:
        reader.close()
    return {"stalled_kb": held / READERS / 1024, "stalled_taken": taken / READERS / 1024}


async def settled(engines: Engines) -> int:
    """Wait until hardly any more bytes are taken: all buffers are full."""
    taken = await taken_from(engines)
    for _ in range(PATIENCE):
        await asyncio.sleep(1.0)
        before, taken = taken, await taken_from(engines)
        if taken - before < READERS * 1024:
            break
    return taken


async def stall(port: int) -> socket.socket:
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, (HOST, port))
    await loop.sock_sendall(reader, HOSE)
    return reader


async def taken_from(engines: Engines) -> int:
    """Bytes, of all streams so far."""
    connection = await connect(engines.ports[0])
    await connection.ask(b"GET /taken HTTP/1.1\r\nhost: localhost\r\n\r\n")
    connection.disconnect()
    return int(connection.head.rpartition(b"\r\n\r\n")[2])


SCENARIOS = (
    Scenario(
        "live",
        (
            Figure("core_share", f"{STREAMS} streams of 20 tokens/s, % of a core", [Goal(1.15, NGINX)], digits=1),
            Figure("live_kb", "memory of a live stream after a prompt of 8 KB, KB", [Goal(40)], digits=1),
        ),
        live,
        fresh=True,
    ),
    Scenario(
        "stalled",
        (
            Figure("stalled_kb", f"memory of a stalled reader, one of {READERS}, KB", [Goal(128)], digits=1),
            Figure("stalled_taken", f"taken for it from its engine, of {OFFERED // 1024} KB offered, KB"),
        ),
        stalled,
        fresh=True,
    ),
    Scenario(
        "idle", (Figure("idle_kb", f"memory of an idle connection, one of {IDLE}, KB", digits=1),), idle, fresh=True
    ),
)
