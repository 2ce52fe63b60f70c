"""A scripted server on a raw socket: plays bytes and failures, and records the requests.

    async with Upstream([reply(b"hello"), CLOSE]) as upstream:
        ...                                  # talk to upstream.url
    assert upstream.requests[0].body == b"..."

A script is a list of steps, played when a request has been read: bytes are written, `RESET` breaks the connection with
a RST, `CLOSE` ends the connection, `HANG` waits for the peer's close, `GATE` for the test's `proceed()`, `Pause(s)` for
a while. The n-th request gets the n-th script, and all after the last get the last.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from backends.interface import Failure

NEVER = 60.0  # s after which an awaited event will not come, on a machine of any load


class Act(Enum):
    RESET = "reset"
    CLOSE = "close"
    HANG = "hang"
    GATE = "gate"


RESET, CLOSE, HANG, GATE = Act


@dataclass(frozen=True)
class Pause:
    seconds: float


Step = bytes | Act | Pause
Script = Sequence[Step]


@dataclass(frozen=True)
class Received:
    """A received request. `connection` counts from 1."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int


class _ScriptEnded(Exception):
    """This connection has nothing more to play."""


class Upstream:
    """An async context manager. `banner` is written to every new connection, unasked."""

    def __init__(
        self,
        *scripts: Script,
        tls: ssl.SSLContext | None = None,
        banner: Script = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.requests: list[Received] = []
        self.connections = 0  # accepted
        self.hangups = 0  # ended by the peer
        self.url = ""
        self._scripts = scripts
        self._banner = banner
        self._tls = tls
        self._where = host, port
        self._changed = asyncio.Condition()
        self._gates = asyncio.Semaphore(0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, *self._where, ssl=self._tls, backlog=1024)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http{'s' if self._tls else ''}://{'localhost' if self._tls else host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def proceed(self) -> None:
        """Open a GATE."""
        self._gates.release()

    async def until(self, condition: Callable[[Upstream], bool]) -> None:
        """Wait until the test's condition on this upstream holds."""
        async with asyncio.timeout(NEVER), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    # ----------------------------------------------------------------------- one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._play(self._banner, reader, writer)
            await self._serve_requests(reader, writer, self.connections)
        except (_ScriptEnded, asyncio.CancelledError):
            pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hangups += 1
        finally:
            self._tasks.discard(task)
            writer.close()
            await self._notify()

    async def _serve_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            received = Received(method, target, headers, body, connection)
            script = self.script(received)
            self.requests.append(received)
            await self._notify()
            await self._play(script, reader, writer)

    def script(self, received: Received) -> Script:
        """The script for a request, before it is recorded."""
        return self._scripts[min(len(self.requests), len(self._scripts) - 1)]

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await asyncio.sleep(0)  # a step, a segment: the peer reads each before the next is written
                await writer.drain()
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif step is GATE:
                await self._gates.acquire()
            elif step is HANG:
                await reader.readexactly(1 << 30)  # to the peer's end
            else:
                await self._end(step, writer)

    async def _end(self, act: Act, writer: asyncio.StreamWriter) -> None:
        if act is RESET:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        raise _ScriptEnded

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class ScriptedEngine(Upstream):
    """Plays scripts to completions alone: probes are answered, and /tokenize counts 9 tokens of a prompt, and the words
    of a text.

    `answered`: requests for completions so far; engines with the same list share the scripts, whichever is asked.
    """

    def __init__(self, *scripts: Script, answered: list[Received]) -> None:
        super().__init__(*scripts)
        self.answered = answered

    def script(self, received: Received) -> Script:
        if received.target == "/tokenize":
            asked = json.loads(received.body)
            is_text = asked.get("add_special_tokens") is False
            return [reply(b'{"count": %d}' % (len(asked["prompt"].split()) if is_text else 9))]
        if received.method == "GET":
            return [reply()]
        self.answered.append(received)
        return self._scripts[min(len(self.answered), len(self._scripts)) - 1]


# --------------------------------------------------------------------------- replies


def reply(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    """A whole reply with a content-length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*bodies: bytes) -> bytes:
    """A whole chunked reply."""
    return STREAM_HEAD + b"".join(map(chunk, bodies)) + LAST_CHUNK


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


# --------------------------------------------------------------------------- listeners


async def turn_until(condition: Callable[[], object]) -> None:
    """Let the loop run until an event without notification has happened."""
    async with asyncio.timeout(NEVER):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@dataclass
class Listener:
    """A sink which records. `await ended()` gives the end of the reply: None, or the failure."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[bytes] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    framed: list[bytes] = field(default_factory=list)
    done: asyncio.Future[Failure | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def body(self) -> bytes:
        return b"".join(self.reads)

    async def ended(self) -> Failure | None:
        async with asyncio.timeout(NEVER):
            return await asyncio.shield(self.done)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.calls.append("head")
        self.status, self.headers = status, dict(headers)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        self.calls.append("body")
        self.reads.append(data)
        if framed:
            self.framed.append(framed)

    def on_end(self) -> None:
        self.calls.append("end")
        self.done.set_result(None)

    def on_failure(self, failure: Failure) -> None:
        self.calls.append("failure")
        self.done.set_result(failure)
