"""Sole writer of the fleet's state, except cache events (`gateway.fleet.kv_event_listener`).

Attempts, Records, probes and scrapes go in, snapshots come out. Learning is pure and lives in `policies.fleet.fleet`;
the monitor adds the clock, the endpoints' answers to GET /metrics, and every attempt's start, first token and end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from time import monotonic
from typing import NamedTuple, Protocol

from backends.failures import TransportError
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Candidate, EngineLoad, FleetSnapshot, Health, Load, PoolEstimate

log = logging.getLogger("firsttoken")

PROBE_TIMEOUT = 2.0  # s
PROGRESS = 0.2  # s between two counts of the tokens of running answers
TELL = 0.002  # s over which changes are joined into one message to peers: 7 us per message, three per request otherwise
_LOAD_FIELDS = frozenset(f.name for f in fields(EngineLoad))
_COUNTS = frozenset({"running", "waiting", "block_size", "kv_blocks"})
_MOST = 1e9  # larger counts are ignored


class Answering(Hashable, Protocol):
    """An attempt whose answer is being relayed."""

    @property
    def output_tokens(self) -> int: ...


class _Asked(NamedTuple):
    """An endpoint polled, and the task that polls."""

    what: tuple[ConnectionPool, Backend, float]
    task: asyncio.Task[None]


class Monitor:
    """One per process."""

    def __init__(self, fleet: Fleet, *, on_block_size: Callable[[str, int], None] | None = None) -> None:
        self.fleet = fleet
        self._on_block_size = on_block_size
        self._asked: dict[str, _Asked] = {}
        self._health: dict[str, Health] = {}
        self._odd: set[str] = set()
        self.on_news: Callable[[], None] | None = None  # called when capacity may be free, while requests wait
        self._answering: dict[Hashable, Answering] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count: asyncio.TimerHandle | None = None

    # -- attempts -------------------------------------------------------------------------

    def sent(
        self,
        attempt: Hashable,
        candidate: Candidate,
        prompt: PoolEstimate,
        now: float,
        stream: bool,
        session: str = "",
        pace: float | None = None,
        output: int = 256,
    ) -> None:
        """Count an attempt at once: otherwise a burst herds onto one engine. `pace`: promised s per token; `output`:
        expected tokens."""
        self.fleet.on_sent(attempt, candidate, prompt, now, stream, pace, output, session)

    def first_token(self, attempt: Answering, now: float) -> None:
        self.fleet.on_first_token(attempt, now)
        self._answering[attempt] = attempt
        self._count_on()
        self._news()

    def ended(self, attempt: Hashable, ending: AttemptOutcome, now: float, reported: AttemptReport) -> None:
        self.fleet.on_ended(attempt, ending, now, reported)
        self._answering.pop(attempt, None)
        self._news()

    def _news(self) -> None:
        if self.on_news is not None:
            self.on_news()

    def _count_on(self) -> None:
        """While answers are written, the fleet is told how far each has come."""
        if self._count is None and self._answering and self._loop is not None:
            self._count = self._loop.call_later(PROGRESS, self._progress)

    def _progress(self) -> None:
        self._count = None
        self._count_on()
        self.fleet.on_progress([(attempt, attempt.output_tokens) for attempt in self._answering.values()], monotonic())

    def tell_soon(self) -> None:
        """There is something to tell siblings."""
        asyncio.get_running_loop().call_later(TELL, self.fleet.publish)

    def snapshot(self, now: float) -> FleetSnapshot:
        return self.fleet.snapshot(now)

    def loads(self) -> Mapping[str, Load]:
        """By endpoint id, now."""
        return self.snapshot(monotonic()).loads

    def told(self) -> Mapping[str, EngineLoad]:
        """Recent loads as reported by the engines, by endpoint id."""
        return self.fleet.engine_loads(monotonic())

    # -- probes and scrapes ----------------------------------------------------------------

    def watch(self, endpoints: Mapping[str, tuple[ConnectionPool, Backend]], interval: float) -> None:
        """Poll every endpoint that has a health or load page, each `interval` seconds, spread evenly. On another
        call,
        polling of unchanged endpoints continues."""
        self._loop = loop = asyncio.get_running_loop()
        wanted = {key: (*way, interval) for key, way in endpoints.items() if way[1].load() or way[1].probe()}
        for key, asked in [*self._asked.items()]:
            if wanted.get(key) != asked.what:
                self._forget(key)
        for i, (key, what) in enumerate(wanted.items()):
            if key not in self._asked:
                offset = interval * i / len(wanted)
                self._asked[key] = _Asked(what, loop.create_task(self._ask_forever(key, *what, offset)))

    def _forget(self, endpoint: str) -> None:
        self._asked.pop(endpoint).task.cancel()
        self._health.pop(endpoint, None)
        self._odd.discard(endpoint)

    async def close(self) -> None:
        self._loop = None
        if self._count is not None:
            self._count.cancel()
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_forever(
        self, endpoint: str, origin: ConnectionPool, backend: Backend, interval: float, offset: float
    ) -> None:
        await self._ask_safely(endpoint, origin, backend)  # at once: a dead endpoint must not wait
        await asyncio.sleep(offset)
        while True:
            await asyncio.sleep(interval)
            await self._ask_safely(endpoint, origin, backend)

    async def _ask_safely(self, endpoint: str, origin: ConnectionPool, backend: Backend) -> None:
        """Poll; a page that cannot be parsed is logged once and does not end the polling."""
        try:
            await self.ask(endpoint, origin, backend)
        except Exception:
            if endpoint not in self._odd:
                log.exception("the load of endpoint %s could not be read", endpoint)
            self._odd.add(endpoint)

    async def ask(self, endpoint: str, origin: ConnectionPool, backend: Backend) -> None:
        """Poll one endpoint once."""
        call = backend.load() or backend.probe()
        assert call is not None
        try:
            reply = await origin.fetch(call, PROBE_TIMEOUT)
        except TransportError:
            self.fleet.on_probe_failed(endpoint, monotonic())
        else:
            self._answered(endpoint, backend, reply.status, reply.body)
        self._log_change(endpoint)
        self._news()

    def _answered(self, endpoint: str, backend: Backend, status: int, body: bytes) -> None:
        now = monotonic()
        if status >= 500:
            self.fleet.on_probe_failed(endpoint, now)
            return
        self.fleet.on_probe_answered(endpoint, now)
        if status == 200 and backend.load() is not None:
            load = engine_load(backend.read_load(body))
            self.fleet.on_scrape(endpoint, load, now)
            if load.block_size and self._on_block_size is not None:
                self._on_block_size(endpoint.partition("/")[0], load.block_size)

    def _log_change(self, endpoint: str) -> None:
        """One line per change of state."""
        health = self.snapshot(monotonic()).loads[endpoint].health
        if health is not self._health.get(endpoint, Health.UP):
            log.warning("endpoint %s is %s", endpoint, health.value)
        self._health[endpoint] = health


def engine_load(said: Mapping[str, float | None]) -> EngineLoad:
    """Build an EngineLoad from the known fields; counts are whole numbers, and impossible ones are dropped."""
    known = {name: value for name, value in said.items() if name in _LOAD_FIELDS and value is not None}
    for name in _COUNTS & known.keys():
        if 0 <= known[name] <= _MOST:
            known[name] = int(known[name])
        else:
            del known[name]
    return EngineLoad(**known)  # type: ignore[arg-type]
