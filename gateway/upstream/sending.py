"""Sends attempts: on an idle connection at once, else on a new one; a continuation once its tokens are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from backends.failures import TransportError
from backends.http.connection import Sink
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.rescue import Rescue
from policies.types import AttemptKind

Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Sending:
    """Attempts of one request without a connection yet. `run`: starts a task that outlives the request's. `take_overs`:
    of all requests, a few at a time: an engine that dies leaves a thousand streams to be continued."""

    def __init__(self, run: Run, take_overs: asyncio.Semaphore, rescue: Rescue | None, wants_usage: bool) -> None:
        self._run = run
        self._take_overs = take_overs
        self._rescue = rescue
        self._wants_usage = wants_usage
        self._connecting: dict[int, asyncio.Task[None]] = {}  # by number of the attempt

    def send(self, wire: WireAttempt, sink: Sink) -> None:
        if self._rescue is not None and wire.attempt.kind is AttemptKind.RESCUE:
            work = self._continue(wire, sink, self._rescue)
        elif (exchange := wire.upstream.connections.start(wire.call, sink)) is not None:
            wire.on_sent(exchange)
            return
        else:
            work = self._connect(wire, sink)
        self._connecting[wire.attempt.number] = self._run(work)

    def cancel(self, wire: WireAttempt) -> None:
        """Nothing is written on a connection that is still being made."""
        if (connecting := self._connecting.pop(wire.attempt.number, None)) is not None:
            connecting.cancel()

    async def _connect(self, wire: WireAttempt, sink: Sink) -> None:
        """A failure to connect is reported like any other."""
        try:
            exchange = await wire.upstream.connections.open(wire.call, sink)
        except TransportError as error:
            sink.on_failure(error.failure)
        else:
            wire.on_sent(exchange)
        finally:
            self._connecting.pop(wire.attempt.number, None)

    async def _continue(self, wire: WireAttempt, sink: Sink, rescue: Rescue) -> None:
        """Ask for the rest of a broken answer."""
        whole, endpoint = wire.request, wire.attempt.candidate.endpoint.id
        async with self._take_overs:
            wire.readdress(await rescue.continued(wire.upstream, whole, endpoint))
            if self._wants_usage:
                self._run(rescue.count_prompt(wire.upstream, whole))
            await self._connect(wire, sink)
