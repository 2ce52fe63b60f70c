"""Listens to the prefix cache events of engines, over ZMQ, and updates `policies.prefix_cache.endpoint_cache`.

Rules:
- Events are applied as a gapless sequence. Missing batches are requested again if the engine has a replay endpoint;
  batches that stay missing void the known contents.
- A sequence number that goes back means a restart: the cache is empty. Only after a replay may a number come twice, and
  then no later by the engine's clock; otherwise that clock decides nothing, as it may jump.
- ZMQ reconnects by itself. Events missed meanwhile show as a gap, or as a restart.
- Events are applied for at most 2 ms before the event loop runs other tasks: first tokens do not wait. Messages without
  events count too.
- A replay ends with the batch that showed the gap, or without news for 2 s, or after 30 s.
- Batches of another data-parallel rank than the endpoint's are not used, and told once.
- Each change of an engine's state is one line in the log, of a kind at most one a minute.

ZMQ is an extra (`firsttoken[kvevents]`): this module is imported only if some endpoint has `kv_events`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from time import monotonic, perf_counter
from typing import Protocol

import zmq
import zmq.asyncio

from backends import kv_events as kvevents
from backends.kv_events import GPU, Cleared, KvEventBatch, MalformedKvEvents, PublisherRank, Removed, Stored
from gateway.parts.kv_events.kv_event_connection import BOUNDS, SOCKET_OPTIONS, ConnectionWatch
from policies.fleet.fleet import Fleet

log = logging.getLogger("firsttoken")

TIME_SLICE = 0.002  # s
CLOCK_EVERY = 32  # blocks between two looks at the clock: some 0.1 ms
REPLAY_TIMEOUT = 2.0  # s of a replay without a batch that is missing
REPLAY_LIMIT = 30.0  # s of a replay
REPEAT = 60.0  # s until a line of the same kind about the same engine is logged again


class KvEventSource(Protocol):
    """ZMQ addresses of an endpoint's events."""

    @property
    def kv_events(self) -> str | None: ...

    @property
    def kv_replay(self) -> str | None: ...

    @property
    def kv_rank(self) -> PublisherRank | None: ...


class KvEvents:
    """Listeners of all engines."""

    def __init__(self, fleet: Fleet, sources: Mapping[str, KvEventSource]) -> None:
        self._fleet, self._sources = fleet, sources
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.listeners: list[Listener] = []
        self._turn = ListenSlot()

    def start(self) -> None:
        self.listen(self._sources)

    def listen(self, sources: Mapping[str, KvEventSource]) -> None:
        """Listen to these sources; listeners of unchanged sources continue."""
        known = {listener.endpoint: listener for listener in self.listeners}
        for listener in self.listeners:
            if not listener.hears(sources.get(listener.endpoint)):
                listener.end()
                del known[listener.endpoint]
        for endpoint, source in sources.items():
            if endpoint not in known:
                known[endpoint] = Listener(self._context, self._fleet, endpoint, source, self._turn)
        self._sources, self.listeners = sources, [*known.values()]

    async def close(self) -> None:
        tasks = [task for listener in self.listeners for task in listener.tasks]
        for listener in self.listeners:
            listener.end()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


class Listener:
    """Listener of one engine."""

    def __init__(
        self, context: zmq.asyncio.Context, fleet: Fleet, endpoint: str, source: KvEventSource, turn: ListenSlot
    ) -> None:
        self.endpoint = endpoint
        self.fleet = fleet
        self.url = source.kv_events or ""
        self.replay_url = source.kv_replay
        self.rank = source.kv_rank
        self.expected: int | None = None  # the next sequence number; None: nothing has come yet
        self._at = 0.0  # of the last batch, the engine's clock
        self._replayed_from: float = inf  # batches from here on may come again; inf: none
        self._malformed = False  # the last message was no batch, or could not be applied
        self._is_foreign = False  # a batch has named another rank
        self._said_at: dict[str, float] = {}  # by the text of a log line
        self._context = context
        self._turn = turn
        if (cache := fleet.cache(endpoint)) is None:
            raise KeyError(endpoint)
        self.cache = cache
        cache.enable_events()
        self._socket = context.socket(zmq.SUB)
        for option, value in SOCKET_OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._watch = ConnectionWatch(self._socket, endpoint, self.url)
        self.tasks = asyncio.create_task(self.listen()), asyncio.create_task(self._watch.run())

    @property
    def connected(self) -> bool:
        return self._watch.connected

    def hears(self, source: KvEventSource | None) -> bool:
        """The source is unchanged, and so is the model behind the address."""
        known = self.url, self.replay_url, self.rank
        same = source is not None and (source.kv_events, source.kv_replay, source.kv_rank) == known
        return same and self.fleet.cache(self.endpoint) is self.cache

    def end(self) -> None:
        """Stop listening and void the known contents, if the endpoint still exists."""
        for task in self.tasks:
            task.cancel()
        self._watch.close()
        self._socket.close(linger=0)
        self.cache.disable_events()

    async def listen(self) -> None:
        self._socket.connect(self.url)
        while True:
            message = asyncio.ensure_future(self._socket.recv_multipart())
            idle = not message.done()
            frames = await message
            if idle:
                self._turn.began = perf_counter()
            await self.hear(frames)
            await self._turn.share()

    async def hear(self, frames: list[bytes]) -> None:
        """Apply one message, in or out of order."""
        try:
            if (batch := self._decoded(frames)) is not None:
                await self._in_order(batch)
            self._malformed = False
        except MalformedKvEvents as error:
            self.cache.on_event_gap()
            if not self._malformed:
                self._say(logging.WARNING, "malformed batch: %s", error)
            self._malformed = True
        except Exception:
            self.cache.on_event_gap()
            if not self._malformed:
                log.exception("cache events of %s: a message could not be applied", self.endpoint)
            self._malformed = True

    def _decoded(self, frames: list[bytes]) -> KvEventBatch | None:
        """None: of another rank. Raises MalformedKvEvents."""
        batch = kvevents.decode(frames)
        self._watch.on_batch()
        if self.rank is None or self.rank.is_named_by(batch.rank):
            return batch
        if not self._is_foreign:
            self._is_foreign = True
            self.cache.on_event_gap()
            text = (
                "cache events of %s: %s publishes those of data-parallel rank %d, not of rank %d: they are not used;"
                " each rank has a port of its own"
            )
            log.warning(text, self.endpoint, self.url, batch.rank, self.rank.rank)
        return None

    def _say(self, level: int, text: str, *values: object) -> None:
        now = monotonic()
        if now - self._said_at.get(text, -inf) >= REPEAT:
            self._said_at[text] = now
            log.log(level, f"cache events of %s: {text}", self.endpoint, *values)

    async def _in_order(self, batch: KvEventBatch) -> None:
        if batch.sequence == self.expected:
            self._replayed_from = inf
        if self.expected is not None and batch.sequence < self.expected:
            if batch.sequence >= self._replayed_from and batch.at <= self._at:
                return  # known from a replay
            self._say(logging.INFO, "the engine has restarted")
            self.fleet.on_cache_cleared(self.endpoint)
            self.expected = 0
        if batch.sequence > (self.expected or 0) and self.replay_url is not None:
            await self._replay(batch.sequence)
        await self._next(batch, begun=self.expected is not None)

    async def _replay(self, until: int) -> None:
        """Request all missing batches below number `until` that the engine still has."""
        begun = self.expected is not None
        self._replayed_from = self.expected or 0
        ends_at, quiet_at = monotonic() + REPLAY_LIMIT, monotonic() + REPLAY_TIMEOUT
        async with self._replay_socket(self.expected or 0) as socket:
            while (left := min(ends_at, quiet_at) - monotonic()) > 0 and await socket.poll(left * 1e3):
                batch = self._of_replay(await socket.recv_multipart())
                if batch is None or batch.sequence >= until:
                    return
                if batch.sequence >= (self.expected or 0):
                    await self._next(batch, begun)
                    begun, quiet_at = True, monotonic() + REPLAY_TIMEOUT
        self._say(logging.WARNING, "the replay from %s has not ended in time", self.replay_url)

    def _of_replay(self, frames: list[bytes]) -> KvEventBatch | None:
        """None: the end, or of another rank. Raises MalformedKvEvents."""
        if len(frames) < 3:
            raise MalformedKvEvents(f"{len(frames)} frames in a replay")
        if kvevents.sequence_of(frames[-2]) == kvevents.END:
            return None
        return self._decoded([b"", *frames[-2:]])

    async def _next(self, batch: KvEventBatch, begun: bool) -> None:
        """Batches before the first one are not missing: nothing was derived from them."""
        missing = batch.sequence - (self.expected or 0)
        if missing < 0:
            return
        if missing and begun:
            self.cache.on_event_gap()
            self._say(logging.WARNING, "%d batches are lost", missing)
        self.expected, self._at = batch.sequence + 1, batch.at
        async with self._turn as turn:
            await turn.share()
            blocks = 0
            for event in batch.events():
                if (blocks := blocks + _weight(event)) >= CLOCK_EVERY:
                    await turn.share()
                    blocks = 0
                self._apply(event)
            self.cache.on_events()

    @asynccontextmanager
    async def _replay_socket(self, since: int) -> AsyncIterator[zmq.asyncio.Socket]:
        """Request batches like a REQ socket, but take several replies."""
        socket = self._context.socket(zmq.DEALER)
        for option, value in BOUNDS.items():
            socket.setsockopt(option, value)
        try:
            socket.connect(self.replay_url or "")
            await socket.send_multipart([b"", since.to_bytes(8, "big")])
            yield socket
        finally:
            socket.close(linger=0)

    def _apply(self, event: Stored | Removed | Cleared) -> None:
        if isinstance(event, Cleared):
            self.fleet.on_cache_cleared(self.endpoint)
        elif (engine := self.cache.residency) is not None:
            if isinstance(event, Removed):
                engine.on_removed(event.hashes, event.group, event.medium)
            elif event.medium == GPU:
                engine.on_stored(
                    event.hashes,
                    event.parent,
                    event.block_size,
                    event.group,
                    event.kind,
                    event.session,
                    event.adapter,
                    is_last=event.is_last,
                )
            else:
                engine.on_offloaded(event.hashes, event.group, event.medium)


def _weight(event: Stored | Removed | Cleared) -> int:
    """In blocks."""
    return CLOCK_EVERY if isinstance(event, Cleared) else len(event.hashes) or 1


class ListenSlot:
    """Share of the event loop for bookkeeping: one engine at a time, for 2 ms."""

    def __init__(self) -> None:
        self._engine = asyncio.Lock()
        self.began = 0.0

    async def __aenter__(self) -> ListenSlot:
        waited = self._engine.locked()
        await self._engine.acquire()
        if waited:
            self.began = perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.release()

    async def share(self) -> None:
        """Yield to other tasks once the share is used up."""
        if perf_counter() - self.began > TIME_SLICE:
            await asyncio.sleep(0)
            self.began = perf_counter()
