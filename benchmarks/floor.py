"""The least proxy in Python: `floor.py aiohttp|asyncio PORT URL...` passes chat completions on and relays the answers.

The body of a request is decoded once and written to one of the engines in turn, in one write; each read of the answer
is written to the caller in the callback that received it. Nothing is estimated, decided, recorded or retried, and no
head of an answer is rewritten: all that a gateway does comes on top. `aiohttp`: its server parses the requests, as in
the gateway. `asyncio`: the C parser of httptools in a protocol does, the least that is left of a server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from aiohttp.web import BaseRequest, Server, StreamResponse
from httptools import HttpRequestParser

from gateway.process import BACKLOG, tune_gc

HEAD = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
    "authorization: {key}\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
Ended = Callable[[], object]
decode = msgspec.json.Decoder().decode


class Upstream(asyncio.Protocol):
    """A kept connection to an engine; one exchange at a time."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._left: int | None = None  # bytes of the answer; None: before the head, -1: chunked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)

    def send(self, request: bytes, caller: asyncio.WriteTransport, ended: Ended) -> None:
        self._caller, self._ended, self._left = caller, ended, None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._caller.write(data)
        if self._left is None:
            head, _, data = data.partition(b"\r\n\r\n")
            _, found, length = head.lower().partition(b"content-length:")
            self._left = int(length.partition(b"\r\n")[0]) if found else -1
        if self._left < 0:
            is_over = data.endswith(LAST_CHUNK)
        else:
            self._left -= len(data)
            is_over = self._left == 0
        if is_over:
            self._idle.append(self)
            self._ended()


class Engines:
    """Kept connections to each engine, which take turns."""

    def __init__(self, urls: list[str]) -> None:
        self._turns = cycle([(urlsplit(url).netloc.split(":"), list[Upstream]()) for url in urls])

    async def connection(self) -> Upstream:
        (host, port), idle = next(self._turns)
        if idle:
            return idle.pop()
        _, made = await asyncio.get_running_loop().create_connection(lambda: Upstream(idle), host, int(port))
        return made

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, caller: asyncio.WriteTransport, ended: Ended
    ) -> None:
        decode(body)
        key = headers.get("authorization", "")
        head = HEAD.format(path=path, host=headers["host"], size=len(body), key=key).encode()
        (await self.connection()).send(head + body, caller, ended)


class Written(StreamResponse):
    """Tells aiohttp that the answer is written, and the connection kept."""

    keep_alive = True

    async def prepare(self, request: BaseRequest) -> None: ...

    async def write_eof(self, data: bytes = b"") -> None: ...


def aiohttp_server(engines: Engines) -> Callable[[], asyncio.Protocol]:
    written = Written()

    async def serve(request: BaseRequest) -> StreamResponse:
        over, caller = asyncio.Event(), request.transport
        assert caller is not None
        body = await request.read()
        await engines.exchange(request.rel_url.raw_path, request.headers, body, caller, over.set)
        await over.wait()
        return written

    return Server(serve, handler_cancellation=True, access_log=None, auto_decompress=False)


class Caller(asyncio.Protocol):
    """A connection of a caller: requests are parsed by httptools."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = HttpRequestParser(self)

    def connection_lost(self, error: Exception | None) -> None:
        del self._parser  # refers back

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._headers, self._parts = dict[str, str](), list[bytes]()

    def on_url(self, url: bytes) -> None:
        self._path = url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._parts)
        exchange = self._engines.exchange(self._path, self._headers, body, self._transport, lambda: None)
        task = asyncio.get_running_loop().create_task(exchange)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


SERVERS: dict[str, Callable[[Engines], Callable[[], asyncio.Protocol]]] = {
    "aiohttp": aiohttp_server,
    "asyncio": lambda engines: lambda: Caller(engines),
}


async def main(server: str, port: int, urls: list[str]) -> None:
    factory = SERVERS[server](Engines(urls))
    listening = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", port, backlog=BACKLOG)
    tune_gc()
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
