"""A relay with a scripted attempt on one side and a recorded transport on the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from backends.http.connection import WriteCoalescer
from backends.interface import Failure, FailureKind
from gateway.downstream.http_request import HttpRequest, ResponseWriter
from gateway.observe.record import RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.relay import Relay
from gateway.upstream.upstream_request import UpstreamRequest
from tests.gateway.builders import (
    CHAT,
    Caller,
    RecordingFleet,
    RecordingListener,
    conversing,
    post,
    record,
    run,
)
from tests.support.upstream import STREAM_HEAD, Upstream

RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class Wire(asyncio.Transport):
    """The client's transport: records writes."""

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


class AtOnce(WriteCoalescer):
    """Writes immediately, without coalescing."""

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        transport.write(data)


class Begins(RecordingListener):
    """Attaches the attempt to the relay at the first token, like the dispatcher."""

    relay: Relay

    def first_token(self, run: UpstreamRequest) -> None:
        super().first_token(run)
        self.relay.begin(run)


class Relaying:
    """An attempt and its relay to a client; the test supplies the backend's reads."""

    def __init__(self, *reads: bytes, stream: bool = True, **headers: str) -> None:
        self.wire, self.fleet, self.owner = Wire(), RecordingFleet(), Begins()
        self.run = run(self.fleet, self.owner, stream=stream)
        self.life = RequestTimeline(record(ttft=None, total=0.0, arrival=monotonic()))
        self.headers, self.reads = {"content-type": "text/event-stream", **headers}, reads

    async def to(self, *, http10: bool = False, keep_alive: bool = True, strip: bool = False, idle: float = 30) -> None:
        """Begins to relay. The first read with a token is written together with all reads before."""
        self.writer = ResponseWriter(self.wire, AtOnce())
        self.http = HttpRequest("POST", "/", {}, 0.0, not http10, keep_alive, self.writer)
        self.owner.relay = self.relay = Relay(self.http, self.life, strip_usage=strip, idle=idle)
        self.run.on_head(200, self.headers)
        for data in self.reads:
            self.run.on_body(data)
        await asyncio.sleep(0)

    async def written(self) -> HttpRequest:
        """Waits for the end of the relay."""
        async with asyncio.timeout(5):
            await self.relay.done
        self.relay.release()
        assert self.writer.flow_control is None
        return self.http

    @property
    def outcome(self) -> tuple[RequestOutcome, str]:
        return self.life.record.end, self.life.record.error


def error_event(failure: Failure) -> bytes:
    error = {"message": failure.message, "type": failure.type, "param": None, "code": failure.code}
    return b"data: " + json.dumps({"error": error}, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def stalled(*script: Any) -> AsyncIterator[tuple[Any, Caller, Upstream]]:
    """A gateway whose caller reads no more than the head of a stream."""
    async with conversing([STREAM_HEAD, *script]) as (gateway, caller, upstream):
        await caller.ask(post({**CHAT, "stream": True}))
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield gateway, caller, upstream
