"""A request of the gateway's own: one attempt, whose answer is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from backends.failures import TransportError
from backends.interface import Failure
from gateway.upstream.attempt import Milestone, WireAttempt, WireEvent, WireState
from policies.types import AttemptOutcome


class _Dropped:
    """Receiver of an answer that nobody reads."""

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


async def run_alone(wire: WireAttempt, timeout: float) -> None:
    """Send the attempt, and return at its end; after `timeout` seconds it is silent."""
    sink = _LoneSink(wire)
    try:
        async with asyncio.timeout(timeout):
            exchange = wire.upstream.connections.start(wire.call, sink)
            wire.on_sent(exchange or await wire.upstream.connections.open(wire.call, sink))
            await sink.over.wait()
    except TransportError as error:
        wire.fail(error.failure)
    except TimeoutError:
        wire.stop(AttemptOutcome.SILENT)
    finally:
        wire.stop(AttemptOutcome.CANCELLED)
