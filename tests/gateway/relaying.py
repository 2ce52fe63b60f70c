"""A relay with both of its sides in hand, for its tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from backends.interface import Failure, FailureKind
from gateway.frontend import ClientConnection, FrontServer, Written
from gateway.observe.record import End, Life
from gateway.relay import pump
from tests.gateway.builders import (
    CHAT,
    Caller,
    Hearing,
    Owner,
    conversing,
    post,
    record,
    run,
)
from tests.kit.upstream import STREAM_HEAD, Upstream

RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class Wire(asyncio.Transport):
    """The client's end: what was written, in which writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.gone = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.gone
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True

    @property
    def head(self) -> dict[str, str]:
        first, *lines = self.writes[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        return {"": first, **{name: value for name, _, value in (line.partition(": ") for line in lines)}}

    @property
    def body(self) -> bytes:
        return b"".join(self.writes).partition(b"\r\n\r\n")[2]


class Relaying:
    """A committed attempt on its way to a client: what the backend says is the test's to say."""

    def __init__(self, *held: bytes, stream: bool = True, **headers: str) -> None:
        self.wire, self.monitor = Wire(), Hearing()
        self.run = run(self.monitor, Owner(), stream=stream)
        self.life = Life(record(ttft=None, total=0.0, arrival=monotonic()))
        self.run.on_head(200, {"content-type": "text/event-stream", **headers})
        for data in held:
            self.run.on_body(data)

    async def to(self, *, http10: bool = False, keep_alive: bool = True, strip: bool = False, idle: float = 30) -> None:
        """Begin to relay."""
        connection = FrontServer(_nobody)()
        assert isinstance(connection, ClientConnection)
        self.connection = connection
        self.connection.transport = self.wire
        version = HttpVersion10 if http10 else HttpVersion11
        http: Any = SimpleNamespace(protocol=self.connection, version=version, keep_alive=keep_alive)
        self.task = asyncio.create_task(pump(self.run, http, self.life, strip_usage=strip, idle=idle, close=False))
        await asyncio.sleep(0)

    async def written(self) -> Written:
        """To its end."""
        async with asyncio.timeout(5):
            response: Any = await self.task
        assert isinstance(response, Written)
        assert self.connection.reader is None
        return response

    @property
    def outcome(self) -> tuple[End, str]:
        return self.life.record.end, self.life.record.error


async def _nobody(http: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("no request comes this way")


def error_event(failure: Failure) -> bytes:
    error = {"message": failure.message, "type": failure.type, "param": None, "code": failure.code}
    return b"data: " + json.dumps({"error": error}, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def stalled(*script: Any) -> AsyncIterator[tuple[Any, Caller, Upstream]]:
    """A gateway whose caller has asked for a stream and reads no more of it than its head."""
    async with conversing([STREAM_HEAD, *script]) as (gateway, caller, upstream):
        await caller.ask(post({**CHAT, "stream": True}))
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield gateway, caller, upstream
