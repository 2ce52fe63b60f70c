"""A TCP relay in front of a server, which breaks connections as networks and dying machines do.

    async with FaultProxy(port) as proxy:
        proxy.fault = Fault(Kind.RESET, at=100)   # for connections accepted from now on
        ...                                       # talk to proxy.url

`BlackHole` is an address whose SYNs the kernel drops: a listener with a full queue, so no privilege is needed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from enum import Enum

FILLING = 8  # connections that fill the queue of a listener which never accepts


class Kind(Enum):
    NONE = "none"
    RESET = "reset"  # a RST in place of the rest of the reply
    CLOSE = "close"  # a FIN in place of the rest
    STALL = "stall"  # silence in place of the rest, the connection stays open: a machine that has vanished
    DRIP = "drip"  # the reply at `rate` bytes/s


@dataclass(frozen=True)
class Fault:
    """`at`: bytes of the reply that pass before the fault."""

    kind: Kind = Kind.NONE
    at: int = 0
    rate: float = 1.0


class FaultProxy:
    """An async context manager. `url` is http; `connections` counts accepted ones, `passed` bytes of replies."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.fault = Fault()
        self.url = ""
        self.connections = self.passed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.gather(self._forward(reader, up_writer), self._reply(up_reader, writer, self.fault))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault) -> None:
        passed = 0
        while data := await reader.read(65536):
            if fault.kind is Kind.DRIP:
                await self._drip(data, writer, fault.rate)
            elif fault.kind is not Kind.NONE and passed + len(data) >= fault.at:
                writer.write(data[: fault.at - passed])
                await self._break(writer, fault.kind)
                return
            else:
                writer.write(data)
            passed += len(data)
            self.passed += len(data)
        writer.close()

    async def _drip(self, data: bytes, writer: asyncio.StreamWriter, rate: float) -> None:
        for byte in data:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(1 / rate)

    async def _break(self, writer: asyncio.StreamWriter, kind: Kind) -> None:
        if kind is Kind.STALL:
            await asyncio.Event().wait()
        if kind is Kind.RESET:
            reset(writer.transport)
        writer.close()


def reset(transport: asyncio.WriteTransport | asyncio.Transport | None) -> None:
    """End a connection with a RST."""
    if transport is not None:
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class BlackHole:
    """An address where a connection attempt is never answered: each SYN is dropped."""

    def __init__(self) -> None:
        self.url = ""
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> BlackHole:
        listener = socket.socket()
        self._sockets.append(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(FILLING):
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
            self._sockets.append(waiting)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
