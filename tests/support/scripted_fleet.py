"""Scripted endpoints with a dispatcher, for tests of dispatching."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import HttpRequest, ResponseWriter
from gateway.observe.record import Record
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.answer import Relay
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.race import Race
from gateway.upstream.routed_request import RoutedRequest, Upstream
from policies import types as facts
from policies.attempts.budgets import RetryBudget
from policies.types import FOREVER, Candidate, Endpoint, PoolEstimate, PromptEstimate
from tests.support import upstream as kit
from tests.support.builders import (
    ERROR,
    PREAMBLE,
    STREAMED,
    TOKEN,
    RecordingFleet,
    backend,
    candidate,
    decided,
    request,
    route,
)
from tests.support.ports import closed_port
from tests.support.recorded_transport import AtOnce, Wire
from tests.support.upstream import CLOSE, RESET, STREAM_HEAD, Script, chunk, reply

OK: Script = [STREAMED]


FAST = 0.02  # s, the forecast of every endpoint: silence is reconsidered after 0.1 s


FAILS: Mapping[str, Script] = {
    "resets the connection": [RESET],
    "closes it without a word": [CLOSE],
    "answers 500": [reply(b"{}", "500 x")],
    "answers 503": [reply(b"{}", "503 x")],
    "answers 500 in Latin-1": [reply(b'{"error":{"message":"caf\xe9"}}', "500 x")],
    "answers 401": [reply(b"{}", "401 x")],
    "sends an error event first": [STREAM_HEAD + chunk(PREAMBLE + ERROR) + b"0\r\n\r\n"],
    "ends before its first token": [STREAM_HEAD + chunk(PREAMBLE) + b"0\r\n\r\n"],
    "sends no HTTP": [b"hello\r\n\r\n"],
}


def dead_url() -> str:
    return f"http://127.0.0.1:{closed_port()}"


class Fleet:
    """Scripted endpoints `small/0`, `small/1` ..., a dispatcher over them, and one request at a time.

    A string in place of a script is the URL of an endpoint outside this fixture.
    """

    def __init__(self, *scripts: Script | str, retries: RetryBudget | None = None, limit: float = 5.0) -> None:
        self.scripts, self.limit, self.retries = scripts, limit, retries or RetryBudget()
        self.upstreams: list[kit.Upstream] = []
        self.record = Record(arrival=0.0)
        self.won = 0  # number of the winning attempt

    async def __aenter__(self) -> Fleet:
        self._stack = AsyncExitStack()
        ids = [f"small/{i}" for i in range(len(self.scripts))]
        pool = facts.Pool("small", "served", tuple(Endpoint(id, "small") for id in ids))
        self.fleet = RecordingFleet(pool)
        urls = [s if isinstance(s, str) else await self._started(s) for s in self.scripts]
        self.ways = {
            id: Upstream(ConnectionPool(url, connect_timeout=0.5), backend(), "served")
            for id, url in zip(ids, urls, strict=True)
        }
        self.dispatcher = Dispatcher(self.fleet, self.retries)
        return self

    async def __aexit__(self, *_: object) -> None:
        for way in self.ways.values():
            await way.connections.close()
        await self._stack.aclose()

    async def _started(self, script: Script) -> str:
        self.upstreams.append(await self._stack.enter_async_context(kit.Upstream(script)))
        return self.upstreams[-1].url

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate(id, FAST) for id in self.ways]

    async def open(
        self,
        *,
        stream: bool = True,
        within: float = FOREVER,
        model: str = "",
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        **on: Any,
    ) -> WireAttempt:
        """Runs a request up to its first bytes for the caller; returns the winning attempt. `on`: settings of the
        route, which asks for whole answers as such."""
        now, self.won = time.monotonic(), 0
        self.record = Record(arrival=now, wall=time.time())
        job = RoutedRequest(
            request=request(headers, stream=stream, **(body or {})),
            route=route(**{"upstream_stream": "off", **on}),
            estimate=PromptEstimate({"small": PoolEstimate(100)}),
            decision=decided(*self.candidates, deadline=now + within, at=now),
            timeline=RequestTimeline(self.record),
            upstreams=self.ways,
            first_token_limit=self.limit,
            model=model,
        )
        self.wire = FirstWrite()
        http = HttpRequest("POST", "/", {}, now, True, True, ResponseWriter(self.wire, AtOnce()))
        race = Race(self.dispatcher, job, Relay(http))
        running = asyncio.create_task(race.run())
        try:
            await asyncio.wait([running, asyncio.create_task(self.wire.begun.wait())], return_when="FIRST_COMPLETED")
            winner = race.winner
        finally:
            running.cancel()
            await asyncio.wait([running])
        if winner is None:
            await running
        assert winner is not None
        self.won = winner.attempt.number
        return winner

    async def refused(self, **how: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.open(**how)
        return caught.value

    @property
    def asked(self) -> list[int]:
        """Requests that reached each endpoint."""
        return [len(upstream.requests) for upstream in self.upstreams]

    @property
    def lost(self) -> list[tuple[str, str, str]]:
        """All attempts but the winning one."""
        return [(a.endpoint, a.kind.value, a.ending.value) for a in self.record.attempts if a.number != self.won]

    @property
    def open_attempts(self) -> list[int]:
        return [load.in_flight for load in self.fleet.loads().values()]


async def opened() -> None:
    """Turns of the event loop until a request that was just begun has opened its first attempt."""
    for _ in range(2):
        await asyncio.sleep(0)


class FirstWrite(Wire):
    """The caller's transport: tells of the first write."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    def write(self, data: bytes) -> None:  # type: ignore[override]
        super().write(data)
        self.begun.set()


class Stalling(asyncio.Protocol):
    """Sends a first token, then blocks the event loop that the gateway runs in too."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        os.write(self.transport.get_extra_info("socket").fileno(), STREAM_HEAD + chunk(TOKEN))
        time.sleep(0.5)  # past the moment of the alarm


# --------------------------------------------------------------------------- failures


def failed(kind: FailureKind, **more: Any) -> Failure:
    return Failure(kind, "It failed.", **more)
