"""Tells the fleet (`policies.fleet.fleet`) the load and health of its endpoints, and the progress of running answers.

Each endpoint with a load or health page is polled. Attempts report to the fleet themselves, and so do cache events
(`gateway.fleet.kv_event_listener`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from time import monotonic
from typing import Protocol, cast

from backends.failures import TransportError
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend
from gateway.observe.metrics.series import counter
from policies.fleet.circuit_breaker import BreakerState, CircuitBreaker
from policies.fleet.fleet import Fleet
from policies.types import EngineLoad, Load

log = logging.getLogger("firsttoken")

PROBE_TIMEOUT = 2.0  # s
PROGRESS = 0.2  # s between two counts of the tokens of running answers
PUBLISH_DELAY = 0.002  # s in which changes are joined into one message to peers: 7 us each, three per request otherwise
_LOAD_FIELDS = frozenset(f.name for f in fields(EngineLoad))
_COUNTS = frozenset({"running", "waiting", "block_size", "kv_blocks"})
_MOST = 1e9  # larger counts are ignored


class Answering(Hashable, Protocol):
    """An attempt whose answer is being relayed."""

    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PollTarget:
    """An endpoint with a load or health page. `interval`: s between two polls."""

    connections: ConnectionPool
    backend: Backend
    interval: float


class Monitor:
    """One per process. `on_block_size` gets a pool's name and the block size reported by its engines."""

    def __init__(self, fleet: Fleet, *, on_block_size: Callable[[str, int], None] = lambda pool, tokens: None) -> None:
        self.fleet = fleet
        self._on_block_size = on_block_size
        self._polled: dict[str, tuple[PollTarget, asyncio.Task[None]]] = {}
        self.ejections = counter("firsttoken_endpoint_ejections_total")
        fleet.on_breaker = self._on_breaker
        self._unparsable: set[str] = set()  # endpoints with a logged failure
        self._counting: asyncio.Task[None] | None = None

    def loads(self) -> Mapping[str, Load]:
        """By endpoint id, now."""
        return self.fleet.snapshot(monotonic()).loads

    def engine_loads(self) -> Mapping[str, EngineLoad]:
        """Recent loads as reported by the engines, by endpoint id."""
        return self.fleet.engine_loads(monotonic())

    def publish_soon(self) -> None:
        """Publish changed loads to peers."""
        asyncio.get_running_loop().call_later(PUBLISH_DELAY, self.fleet.publish)

    def watch(self, endpoints: Mapping[str, tuple[ConnectionPool, Backend]], interval: float) -> None:
        """Poll every endpoint that has a health or load page, each `interval` seconds, spread evenly. On another
        call, polling of unchanged endpoints continues."""
        if self._counting is None:
            self._counting = asyncio.create_task(self._count_forever())
        wanted = {
            endpoint: PollTarget(connections, backend, interval)
            for endpoint, (connections, backend) in endpoints.items()
            if backend.load() or backend.probe()
        }
        for endpoint, (target, task) in [*self._polled.items()]:
            if wanted.get(endpoint) != target:
                task.cancel()
                del self._polled[endpoint]
                self._unparsable.discard(endpoint)
        for number, (endpoint, target) in enumerate(wanted.items()):
            if endpoint not in self._polled:
                polling = self._poll_forever(endpoint, target, offset=interval * number / len(wanted))
                self._polled[endpoint] = target, asyncio.create_task(polling)

    async def close(self) -> None:
        tasks = [task for _, task in self._polled.values()]
        if self._counting is not None:
            tasks.append(self._counting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _count_forever(self) -> None:
        """Report the progress of running answers."""
        while True:
            await asyncio.sleep(PROGRESS)
            if answering := cast("Iterable[Answering]", self.fleet.answering()):
                self.fleet.on_progress([(attempt, attempt.output_tokens) for attempt in answering], monotonic())

    async def _poll_forever(self, endpoint: str, target: PollTarget, offset: float) -> None:
        """Poll at once, as a dead endpoint must not wait, then at the endpoint's turn of each interval. A page that
        cannot be parsed is logged once and does not end the polling."""
        pause = offset + target.interval
        while True:
            try:
                await self.poll(endpoint, target.connections, target.backend)
            except Exception:
                if endpoint not in self._unparsable:
                    log.exception("the load of endpoint %s could not be read", endpoint)
                self._unparsable.add(endpoint)
            await asyncio.sleep(pause)
            pause = target.interval

    async def poll(self, endpoint: str, connections: ConnectionPool, backend: Backend) -> None:
        """Poll one endpoint once."""
        call = backend.load() or backend.probe()
        assert call is not None
        try:
            reply = await connections.fetch(call, PROBE_TIMEOUT)
        except TransportError:
            self.fleet.on_probe_failed(endpoint, monotonic())
        else:
            self._on_reply(endpoint, backend, reply.status, reply.body)
        if self.fleet.on_news is not None:
            self.fleet.on_news()

    def _on_breaker(self, endpoint: str, breaker: CircuitBreaker) -> None:
        """A line for each change, and the reason; the endpoint's name begins with its pool's."""
        if breaker.state is BreakerState.OPEN:
            self.ejections.of[endpoint.partition("/")[0], endpoint, breaker.cause.value].value += 1
            wait = max(breaker.until - monotonic(), 0.0)
            log.warning("endpoint %s is down for %.0f s: %s", endpoint, wait, breaker.why)
        else:
            log.warning("endpoint %s is %s", endpoint, "up" if breaker.state is BreakerState.CLOSED else "on trial")

    def _on_reply(self, endpoint: str, backend: Backend, status: int, body: bytes) -> None:
        now = monotonic()
        if status >= 500:
            self.fleet.on_probe_failed(endpoint, now)
            return
        self.fleet.on_probe_answered(endpoint, now)
        if status == 200 and backend.load() is not None:
            load = engine_load(backend.read_load(body))
            self.fleet.on_scrape(endpoint, load, now)
            if load.block_size:
                self._on_block_size(endpoint.partition("/")[0], load.block_size)


def engine_load(reported: Mapping[str, float | None]) -> EngineLoad:
    """Build an EngineLoad from the known fields; counts are whole numbers, and impossible ones are dropped."""
    known = {name: value for name, value in reported.items() if name in _LOAD_FIELDS and value is not None}
    for name in _COUNTS & known.keys():
        if 0 <= known[name] <= _MOST:
            known[name] = int(known[name])
        else:
            del known[name]
    return EngineLoad(**known)  # type: ignore[arg-type]
