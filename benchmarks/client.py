"""Load generator: raw connections on uvloop, cheap enough to measure the proxy.

Every answer is checked: status 200, the full length, and of a stream the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

HOST = "127.0.0.1"
KEY = "sk-bench-0123456789abcdef"
TOKEN = b'"content":" token"'
LAST_CHUNK = b"\r\n0\r\n\r\n"
WORDS = """the of and to a in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so what up said about
other into than its time only could new them man some these then two first may any request gateway token answer engine
cache prefix deadline "yes" (which) budget, model. stream: latency; list\n- item""".split(" ")


def request(shape: str, messages: Sequence[str], model: str = "bench") -> bytes:
    """A chat of these turns as an HTTP request. `shape`: of the answer (see `benchmarks.engine`), or `whole`."""
    *before, last = messages
    said = messages if shape == "whole" else [*before, f"{last} [{shape}]"]
    turns = [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(said)]
    body = json.dumps({"model": model, "stream": shape != "whole", "messages": turns}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\naccept: */*\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Answer:
    """`sent`, `ended` and `reads`: s; `reads` are those with tokens. A whole answer has none."""

    sent: float
    ended: float = 0.0
    reads: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.reads[0] - self.sent

    def gaps(self, since: float) -> list[float]:
        """Gaps between reads, of gaps which ended after `since`."""
        return [later - sooner for sooner, later in pairwise(self.reads) if later > since]


class BadAnswer(Exception):
    """The proxy answered with an error or an incomplete answer."""


class Connection(asyncio.Protocol):
    """One request at a time: `ask`, and await."""

    def __init__(self) -> None:
        self.waiter: asyncio.Future[Answer] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(exc or ConnectionResetError("closed in the middle of an answer"))

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Raises Wrong or ConnectionError."""
        if self.transport is None:
            raise ConnectionResetError("closed between two answers")
        self.head = b""
        self.in_head = True
        self.left = -1
        self.tail = b""
        self.waiter = asyncio.get_running_loop().create_future()
        self.answer = Answer(perf_counter())
        self.transport.write(request)
        return self.waiter

    def stall_reason(self, since: float) -> str:
        """The reason if the stream has brought no token since then."""
        if self.waiter is not None and self.waiter.done():
            return str(self.waiter.exception() or "it has ended")
        return "" if self.answer.reads and self.answer.reads[-1] > since else "it stands still"

    def disconnect(self) -> None:
        """Disconnect, in the middle of an answer if need be, without a result."""
        if self.waiter is not None and self.waiter.done():
            self.waiter.exception()
        self.waiter = None
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if TOKEN in data:
            self.answer.reads.append(perf_counter())
        if self.in_head:
            data = self._read_head(data)
        if self.left >= 0:
            self.left -= len(data)
            if self.left <= 0:
                self._end()
        else:
            self.tail = (self.tail + data)[-len(LAST_CHUNK) :]
            if self.tail == LAST_CHUNK:
                self._end()

    def _read_head(self, data: bytes) -> bytes:
        """Body after the head; empty while the head is incomplete."""
        self.head += data
        head, end, rest = self.head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self.in_head = False
        head = head.lower()
        if not head.startswith(b"http/1.1 200") and self.waiter is not None:
            self.waiter.set_exception(BadAnswer(self.head[:500].decode("latin-1")))
        _, length, value = head.partition(b"content-length:")
        if length:
            self.left = int(value.partition(b"\r\n")[0])
        return rest

    def _end(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.answer.ended = perf_counter()
            self.waiter.set_result(self.answer)


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, port)
    return connection


async def closed_loop(port: int, requests: Iterable[bytes], at_once: int) -> int:
    """Closed loop: `at_once` connections, each with the next request as soon as an answer ends. Returns the count."""
    turns, done = iter(requests), 0

    async def worker() -> None:
        nonlocal done
        connection = await connect(port)
        for each in turns:
            await connection.ask(each)
            done += 1
        connection.disconnect()

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return done


async def open_loop(port: int, requests: Sequence[bytes], rate: float, patience: float = 60.0) -> list[Answer]:
    """Open loop: a new request every 1/rate seconds, over kept-alive connections. Returns the answers which have ended
    `patience` seconds after the last request was sent."""
    loop, idle, tasks = asyncio.get_running_loop(), list[Connection](), list[asyncio.Task[Answer]]()

    async def one(request: bytes) -> Answer:
        connection = idle.pop() if idle else await connect(port)
        try:
            answer = await connection.ask(request)
        except asyncio.CancelledError:
            connection.disconnect()
            raise
        idle.append(connection)
        return answer

    start = loop.time()
    for number, request in enumerate(requests):
        await asyncio.sleep(start + number / rate - loop.time())
        tasks.append(loop.create_task(one(request)))
    ended, late = await asyncio.wait(tasks, timeout=patience)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for connection in idle:
        connection.disconnect()
    return [task.result() for task in ended]
