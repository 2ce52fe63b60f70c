"""Persists learned engine state across restarts, in a file or in Redis.

Rules:
- Every process reads at start. A single process writes (the only worker, or the leader): every SAVE_INTERVAL if
  anything was learned, and at stop.
- Nothing is written before a successful read: a gateway started without Redis does not overwrite stored state.
- A file is replaced as a whole, by a rename. It is read only if regular and at most MAX_BYTES long.
- State is decoded and checked in a thread, and used whole or not at all (`policies.latency.learned_state`). State that
  is broken, of another version, too old or from the future is ignored with a log line.
- Learned state belongs to a pool, a model and a URL, a rate limit to a pool and a URL: no other server gets the state.
  A new rate limit is saved at once, since the limit may be over at the next interval.
- The loop collects a few endpoints at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Protocol

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.cluster.redis_client import RedisClient, Unavailable
from gateway.cluster.redis_names import DEFAULT_NAMESPACE, redis_name
from gateway.config.models import StateSection
from gateway.files import NotAFile, read_regular, replace_file
from gateway.observe.metrics.series import counter, gauge
from gateway.runtime import RuntimeHolder
from policies.fleet.fleet import Fleet
from policies.latency.learned_state import LearnedEndpoint, LearnedLengths, LearnedRegression
from policies.rate_limit.endpoint_limits import SavedLimits

log = logging.getLogger("firsttoken")

VERSION = 1  # of the format, and of the meaning of the coefficients
FILE = "learned.json"
MAX_BYTES = 64 << 20
MAX_AGE = 7 * 86_400.0  # s: what is older is ignored, and expires in Redis
MAX_AHEAD = 300.0  # s by which the clock of the writer may have been ahead of ours
SAVE_INTERVAL = 30.0  # s
START_WAIT = 1.0  # s at the start to connect to Redis; later, what is read is restored while requests are served
READ_LIMIT, WRITE_LIMIT = 2.0, 2.0  # s
AT_ONCE = 16  # endpoints collected in one turn of the loop


@dataclass(frozen=True, slots=True)
class SavedState:
    """The document. `servers`: by endpoint, `tokenizers`: by pool: what the learned values belong to."""

    version: int
    saved_at: float  # Unix time, s
    servers: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, LearnedEndpoint] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)
    scales: dict[str, LearnedRegression] = field(default_factory=dict)
    lengths: dict[str, LearnedLengths] = field(default_factory=dict)
    limits: dict[str, SavedLimits] = field(default_factory=dict)  # by endpoint


@dataclass(frozen=True, slots=True)
class _Head:
    version: int
    saved_at: float


class UnusableState(Exception):
    """The reason not to use what was read."""


_head = msgspec.json.Decoder(_Head).decode
_document = msgspec.json.Decoder(SavedState).decode


def decode_state(raw: bytes, now: float) -> SavedState:
    """`now`: Unix time. Raises UnusableState."""
    if len(raw) > MAX_BYTES:
        raise UnusableState(f"larger than {MAX_BYTES >> 20} MiB")
    try:
        head = _head(raw)
        if head.version != VERSION:
            raise UnusableState(f"of version {head.version}; this gateway reads version {VERSION}")
        if not -MAX_AHEAD <= now - head.saved_at <= MAX_AGE:
            raise UnusableState("saved more than 7 days ago" if head.saved_at < now else "saved in the future")
        return _document(raw)
    except (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError) as error:
        raise UnusableState(f"broken: {' '.join(str(error).split())[:200]}") from None


class StateStore(Protocol):
    """A place for the document. OSError and Unavailable: it cannot be asked now."""

    name: str

    async def read(self) -> bytes | None:
        """None: nothing was saved. Raises UnusableState."""
        ...

    async def write(self, raw: bytes) -> None: ...


class StateFile:
    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / FILE
        self.name = str(self._path)

    async def read(self) -> bytes | None:
        try:
            return await asyncio.to_thread(read_regular, self._path, MAX_BYTES)
        except NotAFile as reason:
            raise UnusableState(str(reason)) from None

    async def write(self, raw: bytes) -> None:
        await asyncio.to_thread(replace_file, self._path, raw)


class StateKey:
    """A key of Redis, common to all replicas: they learn of the same engines, and the last one to write wins."""

    def __init__(self, redis: RedisClient, namespace: str) -> None:
        self._redis = redis
        self._key = redis_name(namespace, "learned")
        self._names = [self._key]
        if namespace == DEFAULT_NAMESPACE:
            self._names.append(redis_name(namespace, "learned", namespace))  # before 0.2.0
        self.name = f"key {self._key} in Redis"

    async def read(self) -> bytes | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT):
                while not self._redis.up:  # noqa: ASYNC110 - the probe has no notification for one more reader
                    await asyncio.sleep(0.02)
        for name in self._names:
            if (found := await self._saved(name)) is not None:
                return found
        return None

    async def _saved(self, key: str) -> bytes | None:
        size = await self._redis.call(lambda redis: redis.strlen(key), READ_LIMIT)
        if size > MAX_BYTES:
            raise UnusableState(f"larger than {MAX_BYTES >> 20} MiB")
        found = await self._redis.call(lambda redis: redis.get(key), READ_LIMIT)
        return found if isinstance(found, bytes) else None

    async def write(self, raw: bytes) -> None:
        await self._redis.call(lambda redis: redis.set(self._key, raw, ex=int(MAX_AGE)), WRITE_LIMIT)


def state_store(state: StateSection, redis: RedisClient | None) -> StateStore | None:
    """The store that the configuration names; None: there is none."""
    if state.dir is not None:
        return StateFile(state.dir)
    return None if redis is None else StateKey(redis, state.namespace)


class LearnedKeeper(Collector):
    """Saves state at intervals between `start` and `close`. `writes`: this worker is the writer."""

    def __init__(self, store: StateStore, fleet: Fleet, runtime: RuntimeHolder, writes: bool = True) -> None:
        self._store = store
        self._fleet = fleet
        self._runtime = runtime
        self._writes = writes
        self._read = False  # the store has answered
        self._restored = 0  # endpoints
        self._saves = counter("firsttoken_learned_state_saves_total")
        self._unread = self._failing = False  # and logged
        self._closed = False  # before 3.12, `wait_for` in redis-py may lose a cancellation (python/cpython#86296)
        self._limited = asyncio.Event()  # a limit has begun since the latest save
        self._task: asyncio.Task[None] | None = None

    def save_soon(self) -> None:
        """A limit has begun."""
        self._limited.set()

    async def start(self) -> None:
        """Restores before the first request, where the store answers."""
        await self.restore()
        self._task = asyncio.get_running_loop().create_task(self._save_forever())

    def stop_writing(self) -> None:
        """Leave the store to another process."""
        self._writes = False

    async def close(self) -> None:
        if self._task is not None:
            self._closed = True
            self._task.cancel()
            await asyncio.wait([self._task])
            if self._writes and self._read:
                await self.save()

    def collect(self) -> Iterable[Metric]:
        yield from self._saves.collect()
        yield gauge("firsttoken_learned_state_restored_endpoints", [((), self._restored)])

    async def _save_forever(self) -> None:
        saved = self._experience()
        while not self._closed and (self._writes or not self._read):
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_INTERVAL):
                    await self._limited.wait()
            limited = self._limited.is_set()
            self._limited.clear()
            if not self._read:
                await self.restore()
            elif ((experience := self._experience()) != saved or limited) and await self.save():
                saved = experience

    def _experience(self) -> list[int]:
        """First tokens seen of each endpoint."""
        now = monotonic()
        return [self._fleet.view.statistics(name, now).samples for name in self._runtime.current.upstreams]

    # -- save -------------------------------------------------------------------------------

    async def save(self) -> bool:
        """Replace the stored state. False: the store failed, with a log line."""
        try:
            state = await self._state()
            await self._store.write(await asyncio.to_thread(msgspec.json.encode, state))
        except (OSError, Unavailable) as error:
            self._saves.of[("failed",)].value += 1
            if not self._failing:
                log.warning("learned state cannot be saved to %s: %s", self._store.name, error)
            self._failing = True
            return False
        except Exception:
            log.exception("learned state could not be collected")
            return False
        if self._failing:
            log.info("learned state is saved to %s again", self._store.name)
        self._failing = False
        self._saves.of[("saved",)].value += 1
        return True

    async def _state(self) -> SavedState:
        self._fleet.learn()
        servers, endpoints = self._servers(), dict[str, LearnedEndpoint]()
        for number, name in enumerate(servers, 1):
            with suppress(ValueError):
                if (learned := self._fleet.view.learned(name, monotonic())) is not None:
                    endpoints[name] = learned
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        tokenizers, scales = self._tokenizers(), dict[str, LearnedRegression]()
        for pool in tokenizers:
            with suppress(ValueError):
                scales[pool] = self._fleet.view.token_scale(pool).learned()
        lengths = dict(self._fleet.answer_lengths.learned())
        limits, now = dict[str, SavedLimits](), monotonic()
        for name in servers:
            with suppress(ValueError):
                if (saved := self._fleet.view.saved_limits(name, now)) is not None:
                    limits[name] = saved
        return SavedState(VERSION, time(), servers, endpoints, tokenizers, scales, lengths, limits)

    def _servers(self) -> dict[str, str]:
        """Model and URL, by endpoint."""
        runtime = self._runtime.current
        models = {endpoint.id: pool.model for pool in runtime.pools.values() for endpoint in pool.endpoints}
        return {name: f"{models[name]} at {url}" for name, url in runtime.config.urls().items() if name in models}

    def _tokenizers(self) -> dict[str, str]:
        """Model and tokenizer, by pool."""
        pools = self._runtime.current.config.pools
        return {name: f"{pool.model} by {pool.tokenizer}" for name, pool in pools.items()}

    # -- restore ----------------------------------------------------------------------------

    async def restore(self) -> None:
        """Brings back what is stored of the present servers; what cannot be used is ignored, with a line in the log."""
        name = self._store.name
        try:
            raw = await self._store.read()
            self._read = True
            if raw is not None:
                self._apply(await asyncio.to_thread(decode_state, raw, time()))
        except UnusableState as reason:
            self._read = True
            log.warning("learned state in %s is ignored: %s", name, reason)
        except (OSError, Unavailable) as error:
            if not self._unread:
                log.warning("learned state in %s cannot be read: %s", name, error)
            self._unread = True
            self._read = isinstance(error, OSError)
        except Exception:
            log.exception("learned state in %s is ignored", name)
            self._read = True

    def _apply(self, state: SavedState) -> None:
        """Restores what belongs to the present servers."""
        age = max(time() - state.saved_at, 0.0)
        servers, tokenizers = self._servers(), self._tokenizers()
        known = {name: learned for name, learned in state.endpoints.items() if _same(name, servers, state.servers)}
        restored = self._fleet.restore(known, age, monotonic())
        same = {name for name in servers if _url(servers[name]) == _url(state.servers.get(name, ""))}
        limits = {name: found for name, found in state.limits.items() if name in same}
        self._fleet.restore_limits(limits, age, monotonic())
        learned_pools = {self._fleet.view.pool_of(name) for name in restored}
        for pool, scale in state.scales.items():
            if pool in learned_pools and _same(pool, tokenizers, state.tokenizers):
                with suppress(ValueError):
                    self._fleet.restore_scale(pool, scale, age)
        routes = {route.name for route in self._runtime.current.routes.all}
        self._fleet.answer_lengths.restore(
            {name: found for name, found in state.lengths.items() if name in routes}, age
        )
        self._restored = len(restored)
        text = "learned state of %d of %d endpoints restored from %s, saved %.0f s ago"
        log.info(text, len(restored), len(servers), self._store.name, age)


def _url(server: str) -> str:
    """Of a model and a URL."""
    return server.rpartition(" at ")[2]


def _same(name: str, now: Mapping[str, str], before: Mapping[str, str]) -> bool:
    return name in now and now[name] == before.get(name)
