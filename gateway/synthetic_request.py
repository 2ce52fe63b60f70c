"""Requests of the gateway's own: a single token of output, to warm up a cache or to see whether an endpoint answers.

To the fleet a synthetic request is an attempt as any other: charged, and a source for learning. It has no
Record and is not retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any

from backends.failures import TransportError
from backends.interface import BackendRequest, Failure, Operation
from gateway.api.inference_request import new_request_id
from gateway.upstream.attempt import Milestone, WireAttempt, WireEvent, WireState
from gateway.upstream.upstream import Upstream
from policies.fleet.fleet import Fleet
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate, Endpoint, PoolEstimate

PING = {"messages": [{"role": "user", "content": "hi"}]}


class _Dropped:
    """Drops the bytes of an answer."""

    written = True

    def start(self, data: bytes) -> bytes:
        return b""

    def body(self, data: bytes, framed: bytes = b"") -> None:
        """Drop the bytes."""

    def replace_held(self, data: bytes) -> None:
        """Drop the bytes."""

    def finish(self, missing: bytes = b"") -> bytes:
        return b""


class _LoneSink:
    """The `Sink` of the exchange. `over` is set at the end of the attempt."""

    def __init__(self, wire: WireAttempt) -> None:
        self.over = asyncio.Event()
        self._wire = wire

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._follow(self._wire.on_head(status, headers))

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        self._follow(self._wire.on_body(data, framed))

    def on_end(self) -> None:
        self._follow(self._wire.on_end())

    def on_failure(self, failure: Failure) -> None:
        self._follow(self._wire.on_failure(failure))

    def _follow(self, event: WireEvent) -> None:
        if event is Milestone.FIRST_TOKEN:
            self._wire.take_buffered()
            self._wire.join(_Dropped())
        if event is Milestone.WHOLE:
            self._wire.stop(AttemptOutcome.COMPLETED)
        if self._wire.state is WireState.OVER:
            self.over.set()


def synthetic(
    upstream: Upstream, operation: Operation, body: Mapping[str, Any], model: str, cache_group: str = ""
) -> BackendRequest:
    """A request for a single token of output. `cache_group`: tenant that owns the caches of the prompt."""
    request_id = new_request_id()
    return BackendRequest(
        operation,
        body,
        model,
        stream=True,
        max_tokens=1,
        request_id=request_id,
        cache_salt=cache_group,
        session_id=request_id if upstream.kv_events else "",
    )


async def send_synthetic(
    fleet: Fleet,
    endpoint: Endpoint,
    upstream: Upstream,
    request: BackendRequest,
    estimate: PoolEstimate,
    timeout: float,
    caller: str = "",
) -> WireAttempt:
    """Sends a synthetic request. Returns the attempt at its end, at the latest after `timeout` seconds.

    `caller`: owner of the prompt; empty: the gateway. A server that does not stream may answer in one piece.
    """
    now, tokens = monotonic(), estimate.tokens
    load, hit = fleet.snapshot(now).loads[endpoint.id], fleet.hit(endpoint, estimate)
    forecast = fleet.forecast(endpoint, load, tokens, hit, now)
    candidate = Candidate(endpoint, 0, tokens, hit, forecast, probability=1.0, price=0.0)
    wire = WireAttempt(Attempt(1, AttemptKind.PRIMARY, candidate), upstream, request, fleet, assembled=True)
    fleet.on_sent(wire, candidate, estimate, wire.times.opened, stream=True, session=request.session_id, caller=caller)
    sink = _LoneSink(wire)
    try:
        async with asyncio.timeout(timeout):
            exchange = upstream.connections.start(wire.call, sink)
            wire.on_sent(exchange or await upstream.connections.open(wire.call, sink))
            await sink.over.wait()
    except TransportError as error:
        wire.fail(error.failure)
    except TimeoutError:
        wire.stop(AttemptOutcome.SILENT)
    finally:
        wire.stop(AttemptOutcome.CANCELLED)
    return wire
