"""A request of the gateway's own, whose answer nobody reads.

To the fleet it is an attempt like any other: it is charged, its first token teaches, its failure counts. There is no
Record of it, and it is not tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from backends.failures import TransportError
from backends.interface import BackendRequest, Failure, Operation
from gateway.api import inference_request as ingress
from gateway.fleet.monitor import Monitor
from gateway.upstream.routed_request import Upstream
from gateway.upstream.upstream_request import UpstreamRequest
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate, Endpoint, PoolEstimate


class _DiscardBody:
    """Owner and receiver of the run: waits for its end."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()

    def first_token(self, run: UpstreamRequest) -> None:
        run.attach(self)

    def failed(self, run: UpstreamRequest, failure: Failure) -> None:
        self.end()

    def body(self, data: bytes) -> None:
        """Dropped."""

    def chunk(self, data: bytes, framed: bytes) -> None:
        """So is this."""

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def on_broken(self, failure: Failure) -> None:
        self.end()

    def on_error_event(self, data: bytes, failure: Failure) -> None:
        self.end()


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    """A prompt, of whose answer one token is wanted."""

    operation: Operation
    body: Mapping[str, Any]
    model: str
    estimate: PoolEstimate
    cache_group: str = ""  # whose caches are to hold it

    async def run(self, monitor: Monitor, upstream: Upstream, endpoint: Endpoint, patience: float) -> UpstreamRequest:
        """The attempt, ended: `ending` says how. `patience`: s that it may take."""
        forward = self._forward(upstream)
        run = self._attempt(monitor, upstream, endpoint, forward, reader := _DiscardBody())
        candidate, session = run.attempt.candidate, forward.session_id
        monitor.sent(run, candidate, self.estimate, run.opened, stream=True, session=session)
        try:
            async with asyncio.timeout(patience):
                await _start(run)
                await reader.over
        except TimeoutError:
            run.stop(AttemptOutcome.SILENT)
        finally:
            run.stop_if_open()
        return run

    def _forward(self, upstream: Upstream) -> BackendRequest:
        name = ingress.request_id_of({})
        return BackendRequest(
            self.operation,
            self.body,
            self.model,
            stream=True,
            max_tokens=1,
            request_id=name,
            cache_salt=self.cache_group,
            session_id=name if upstream.kv_events else "",
        )

    def _attempt(
        self, monitor: Monitor, upstream: Upstream, endpoint: Endpoint, forward: BackendRequest, reader: _DiscardBody
    ) -> UpstreamRequest:
        attempt, backend = Attempt(1, AttemptKind.PRIMARY, self._candidate(monitor, endpoint)), upstream.backend
        call, tap = backend.call(forward), backend.tap(forward)
        return UpstreamRequest(
            attempt, upstream.origin, backend, call, tap, streams=True, owner=reader, monitor=monitor
        )

    def _candidate(self, monitor: Monitor, endpoint: Endpoint) -> Candidate:
        now, fleet, tokens = monotonic(), monitor.fleet, self.estimate.tokens
        load, hit = monitor.snapshot(now).loads[endpoint.id], fleet.hit(endpoint, self.estimate)
        return Candidate(endpoint, 0, tokens, hit, fleet.forecast(endpoint, load, tokens, hit, now), 1.0, 0.0)


async def _start(run: UpstreamRequest) -> None:
    try:
        exchange = run.origin.start(run.call, run) or await run.origin.open(run.call, run)
    except TransportError as error:
        run.on_failure(error.failure)
    else:
        run.sent_on(exchange)
