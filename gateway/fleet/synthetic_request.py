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

from backends.interface import BackendRequest, Failure, Operation
from gateway.api import inference_request as ingress
from gateway.fleet.monitor import Monitor
from gateway.upstream.upstream_request import Upstream, UpstreamRequest
from policies.types import Attempt, AttemptKind, AttemptOutcome, Candidate, Endpoint, PoolEstimate


class _DiscardBody:
    """Owner and receiver of the run: waits for its end."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()

    def first_token(self, run: UpstreamRequest) -> None:
        run.attach(self)

    def failed(self, run: UpstreamRequest, failure: Failure) -> None:
        self.end()

    def body(self, data: bytes, framed: bytes = b"") -> None:
        """Drop it."""

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
        """Return the attempt once it has ended. `patience`: s that it may take."""
        request = self._backend_request(upstream)
        discard = _DiscardBody()
        attempt = Attempt(1, AttemptKind.PRIMARY, self._candidate(monitor, endpoint))
        run = UpstreamRequest(attempt, upstream, request, listener=discard, monitor=monitor)
        monitor.sent(run, attempt.candidate, self.estimate, run.opened, stream=True, session=request.session_id)
        try:
            async with asyncio.timeout(patience):
                if not run.start():
                    await run.connect()
                await discard.over
        except TimeoutError:
            run.stop(AttemptOutcome.SILENT)
        finally:
            run.stop_if_open()
        return run

    def _backend_request(self, upstream: Upstream) -> BackendRequest:
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

    def _candidate(self, monitor: Monitor, endpoint: Endpoint) -> Candidate:
        now, fleet, tokens = monotonic(), monitor.fleet, self.estimate.tokens
        load, hit = monitor.snapshot(now).loads[endpoint.id], fleet.hit(endpoint, self.estimate)
        return Candidate(endpoint, 0, tokens, hit, fleet.forecast(endpoint, load, tokens, hit, now), 1.0, 0.0)
