"""A race with a scripted server on one side and a recorded transport on the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, cast

from backends.http.connection import Exchange, Sink
from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind, HttpCall
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import HttpRequest, ResponseWriter
from gateway.observe.record import RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.answer import Relay
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.race import Race
from gateway.upstream.routed_request import RoutedRequest
from gateway.upstream.routed_request import Upstream as Target
from policies.attempts.budgets import RetryBudget
from policies.types import PoolEstimate, Price, PromptEstimate
from tests.support.builders import (
    CHAT,
    Caller,
    RecordingExchange,
    RecordingFleet,
    backend,
    candidate,
    conversing,
    decided,
    post,
    record,
    request,
    route,
)
from tests.support.recorded_transport import AtOnce, Wire
from tests.support.upstream import STREAM_HEAD, Upstream

FREE = Price()
RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class ScriptedConnections:
    """Connections to a server played by the test: the sink of the latest exchange, and its flow control."""

    def __init__(self) -> None:
        self.exchange = RecordingExchange()

    @property
    def sink(self) -> Sink:
        return self.exchange.sink

    def start(self, call: HttpCall, sink: Sink) -> Exchange:
        self.exchange.sink = sink
        return self.exchange


class Relaying:
    """A request and its answer to a client; the test supplies the server's reads to `run`."""

    def __init__(self, *reads: bytes, stream: bool = True, usage: bool = True, **headers: str) -> None:
        self.wire, self.fleet, self.connections = Wire(), RecordingFleet(), ScriptedConnections()
        self.life = RequestTimeline(record(ttft=None, total=0.0, arrival=monotonic()))
        self.headers, self.reads, self.stream, self.usage = (
            {"content-type": "text/event-stream", **headers},
            reads,
            stream,
            usage,
        )

    async def to(
        self,
        *,
        http10: bool = False,
        keep_alive: bool = True,
        strip: bool = False,
        idle: float = 30,
        price: Price = FREE,
        **on: Any,
    ) -> None:
        """Begins to relay. The first read with a token is written together with all reads before. `on`: settings of
        the route, which asks for whole answers as such."""
        self.writer = ResponseWriter(self.wire, AtOnce())
        self.http = HttpRequest("POST", "/", {}, 0.0, not http10, keep_alive, self.writer)
        usage = {} if strip or not self.stream else {"stream_options": {"include_usage": True}}
        routed = RoutedRequest(
            request=request(stream=self.stream, **usage),
            route=route(**{"upstream_stream": "off", **on}),
            estimate=PromptEstimate({"small": PoolEstimate(100)}),
            decision=decided(candidate("small/a"), at=monotonic()),
            timeline=self.life,
            upstreams={"small/a": Target(cast("ConnectionPool", self.connections), backend(), "served", price=price)},
            first_token_limit=60.0,
            path="/",
            idle=idle,
        )
        self.relay = Relay(self.http)
        self.race = Race(Dispatcher(self.fleet, RetryBudget()), routed, self.relay)
        self.running = asyncio.create_task(self.race.run())
        await asyncio.sleep(0)
        self.run.on_head(200, self.headers)
        for data in self.reads:
            self.run.on_body(data)
        await asyncio.sleep(0)

    @property
    def run(self) -> Sink:
        """The server's side of the latest exchange."""
        return self.connections.sink

    @property
    def attempt(self) -> WireAttempt:
        return self.race.attempts[1]

    async def written(self) -> HttpRequest:
        """Waits for the end of the relay."""
        async with asyncio.timeout(60):
            with suppress(ApiError):
                await self.running
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
