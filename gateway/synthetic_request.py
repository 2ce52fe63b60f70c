"""Requests of the gateway's own: to warm up a cache, to see whether an endpoint answers, or to measure its times.

To the fleet a synthetic request is an attempt as any other: charged, and a source for learning. It has no
Record and is not retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any

from backends.interface import BackendRequest, Failure, Operation
from gateway.api.request_headers import new_request_id
from gateway.upstream.attempt import Milestone, WireAttempt, WireEvent, WireState
from gateway.upstream.attempt_sinks import AnswerSink, AttemptSink
from gateway.upstream.routed_request import Upstream
from policies.fleet.fleet import Fleet
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate, Endpoint, PoolEstimate

PING = {"messages": [{"role": "user", "content": "hi"}]}
QUESTIONS = (Operation.CHAT, Operation.MESSAGES)  # that PING is a body of


class _Dropped:
    """Drops the bytes of an answer."""

    only = None

    def write(self, data: bytes, framed: bytes) -> None:
        """Drop the bytes."""

    def body(self, data: bytes, framed: bytes = b"") -> None:
        """Drop the bytes."""

    def replace_held(self, data: bytes) -> None:
        """Drop the bytes."""


class _Course:
    """The course of a lone attempt; `over` is set at its end."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def follow(self, wire: WireAttempt, event: WireEvent) -> None:
        if event is Milestone.FIRST_TOKEN:
            if wire.stream and wire.times.first_in is not None:
                wire.fleet.on_first_token(wire, wire.times.first_in)
            wire.held.take()
            AnswerSink(wire, self.follow, self.lose, _Dropped()).join()
        if event is Milestone.WHOLE:
            wire.stop(AttemptOutcome.COMPLETED)
        if wire.state is WireState.OVER:
            self.over.set()

    def lose(self, wire: WireAttempt, failure: Failure) -> None:
        self.follow(wire, wire.on_failure(failure))


def synthetic(
    upstream: Upstream,
    operation: Operation,
    body: Mapping[str, Any],
    model: str,
    cache_group: str = "",
    max_tokens: int = 1,
) -> BackendRequest:
    """A request for `max_tokens` of output. `cache_group`: tenant that owns the caches of the prompt."""
    request_id = new_request_id()
    return BackendRequest(
        operation,
        body,
        model,
        stream=True,
        max_tokens=max_tokens,
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
    load, hit = fleet.snapshot(now).loads[endpoint.id], fleet.view.hit(endpoint, estimate)
    forecast = fleet.view.forecast(endpoint, load, tokens, hit, now)
    candidate = Candidate(endpoint, 0, tokens, hit, forecast, probability=1.0, price=0.0)
    wire = WireAttempt(Attempt(1, AttemptKind.PRIMARY, candidate), upstream, request, fleet, assembled=True)
    fleet.on_sent(wire, candidate, estimate, wire.times.opened, stream=True, session=request.session_id, caller=caller)
    course = _Course()
    sink = AttemptSink(wire, course.follow, course.lose)
    try:
        async with asyncio.timeout(timeout):
            if not wire.start(sink):
                await wire.connect(sink)
            await course.over.wait()
    except TimeoutError:
        wire.stop(AttemptOutcome.SILENT)
    finally:
        wire.stop(AttemptOutcome.CANCELLED)
    return wire
