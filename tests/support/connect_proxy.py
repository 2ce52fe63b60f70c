"""A real HTTP proxy for CONNECT: opens a connection to the target and copies bytes both ways.

`authorization`: demanded of every caller; `answer`: sent in place of a tunnel; `hosts`: its own names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType


class ConnectProxy:
    def __init__(self, *, authorization: str = "", answer: bytes = b"", hosts: Mapping[str, str] | None = None) -> None:
        self.targets: list[str] = []
        self.heads: list[bytes] = []
        self.upward = bytearray()  # everything that callers have sent through tunnels
        self._authorization, self._answer = authorization, answer
        self._hosts = hosts or {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ConnectProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.url = f"http://{self.address}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._tunnel(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        assert method == "CONNECT"
        self.targets.append(target)
        expected = f"proxy-authorization: {self._authorization}\r\n".encode()
        if self._answer or (self._authorization and expected not in head):
            writer.write(self._answer or b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            return await writer.drain()
        host, _, port = target.rpartition(":")
        up, down = await asyncio.open_connection(self._hosts.get(host, host.strip("[]")), int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(self._copy(reader, down, self.upward), self._copy(up, writer, bytearray()))
        finally:
            down.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: bytearray) -> None:
        while data := await source.read(65536):
            seen += data
            sink.write(data)
            await sink.drain()
        sink.close()
