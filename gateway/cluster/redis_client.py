"""The one connection to Redis: what replicas share goes over it, and nobody waits for it when it is away.

Rules:
- A call has `PATIENCE` to be answered. A few failures in a row open the link: from then on every call raises
  `Unavailable` at once, and asks nobody.
- One task of our own asks whether Redis is there: at the start, each second, and while the link is open. It closes the
  link when Redis has taken a write twice within half the patience, at most `LONGEST_PAUSE` after it could. So Redis may
  be absent at the start, hang, be slow, be read-only, or have no name in DNS.
- A time-out that our own loop was too late to notice in time is nobody's failure.
- One line in the log per change of state. Never the password, and no traceback.

redis-py is an extra (`firsttoken[redis]`): it is imported where a link is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.cluster.redis_url import RedisTopology, RedisUrl, parsed
from gateway.observe.metrics.series import gauge, total

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

T = TypeVar("T")

PATIENCE = 0.05  # s that a call has; a healthy Redis in the same place takes 0.0005
CONNECTING = 2.0  # s that our own task has to connect: TLS, sentinels, a cluster's map. No request waits for that
EVERY = 1.0  # s between two looks while all is well
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # s between two looks while it is not
TOO_MANY, FORGIVEN = 2.5, 0.9  # the link opens at the third failure in a row, or if one call in four fails for a while
SOON = 10.0  # s: who fails again sooner than this is given the longer pause at once
LATE = 0.02  # s that a time-out may come late, or it was our loop that stood still
CONNECTIONS = 64
PREFIX = "firsttoken:"  # of every key that we write
PROBE = PREFIX + "probe"


class Unavailable(Exception):
    """Redis is away, or did not answer in time."""


class RedisClient(Collector):
    """`up`: calls are asked. `url` is the config's and holds what `gateway.cluster.redis_url` found valid."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.address, self.patience = parsed(url), patience
        self.client = connected(self.address)
        self.up = False
        self.errors = 0
        self._failures = 0.0  # of late
        self._told: bool | None = None  # the state that the log knows of
        self._reason = ""
        self._since = 0.0  # when it came up last
        self._on_up: list[Callable[[], None]] = []
        self._opened = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False  # before 3.12, `wait_for` in redis-py may lose a cancellation (python/cpython#86296)

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """What is under way is cut."""
        self.up, self._closed = False, True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        try:
            async with asyncio.timeout(self.patience):
                await self.client.aclose()
        except Exception as error:
            log.debug("Redis: closing: %s", error)

    def on_up(self, callback: Callable[[], None]) -> None:
        """Called each time Redis is there (again): at once, if it is. What was told to it before may be lost."""
        self._on_up.append(callback)
        if self.up:
            callback()

    async def call(self, ask: Callable[[Redis], Awaitable[T]], patience: float | None = None) -> T:
        """What `ask(client)` comes to. Raises Unavailable: at once while Redis is away, else after `patience`."""
        if not self.up:
            raise Unavailable(self._reason or "not connected yet")
        began, patience = monotonic(), patience or self.patience
        try:
            async with asyncio.timeout(patience):
                answer = await ask(self.client)
        except Exception as error:  # of redis-py, of TLS, of DNS; and what is our bug fails no request either
            late = isinstance(error, TimeoutError) and monotonic() - began > patience + LATE
            self._failed(error, counts=not late)
            raise Unavailable(self._reason) from None
        self._failures *= FORGIVEN
        return answer

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_redis_up", [((), float(self.up))])
        yield from total("firsttoken_redis_errors_total", self.errors)

    # -- its own state ----------------------------------------------------------------------

    def _failed(self, error: BaseException, counts: bool = True) -> None:
        self.errors += 1
        self._reason = said(error, self.address)
        self._failures += counts
        if self.up and self._failures > TOO_MANY:
            self._turn(False)

    def _turn(self, up: bool) -> None:
        self.up, self._failures = up, 0.0
        if up:
            self._since = monotonic()
            self._opened.clear()
            for callback in self._on_up:
                callback()
        else:
            self._opened.set()
        self._tell()

    def _tell(self) -> None:
        """Once per change."""
        if self._told == self.up:
            return
        first, self._told = self._told is None, self.up
        if self.up:
            log.info("redis %s: %s", self.address.shown, "connected" if first else "back")
        else:
            log.warning("redis %s: away: %s; this process goes on by itself", self.address.shown, self._reason)

    async def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._closed:
            if self.up:
                try:
                    async with asyncio.timeout(EVERY):
                        await self._opened.wait()
                except TimeoutError:
                    await self._look()
                    continue
                pause = LONGEST_PAUSE if monotonic() - self._since < SOON else FIRST_PAUSE
                await asyncio.sleep(pause)
            if await self._answers():
                if not self._closed:
                    self._turn(True)
            else:
                self._tell()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _look(self) -> None:
        """Nobody may have asked for a while: we do, and again if it fails, until we know."""
        while self.up:
            try:
                await self.call(probe)
            except Unavailable:
                continue
            return

    async def _answers(self) -> bool:
        """Whether Redis takes what is written, in time, twice; after however long it takes to connect."""
        try:
            async with asyncio.timeout(CONNECTING):
                await probe(self.client)
            for _ in range(2):
                async with asyncio.timeout(self.patience / 2):
                    await probe(self.client)
        except Exception as error:
            self._failed(error)
            return False
        return True


async def probe(client: Redis) -> None:
    """A write: what is read-only, or full, is of no use to us."""
    await client.set(PROBE, "1", px=10_000)


def said(error: BaseException, address: RedisUrl) -> str:
    """One line, without what nobody should read."""
    text = " ".join(str(error).split())[:200].rstrip(".") or "no answer in time"
    if not isinstance(error, (OSError, TimeoutError)):
        text = f"{type(error).__name__}: {text}"
    for secret in (address.password, address.options.get("sentinel_password")):
        if secret:
            text = text.replace(secret, "***")
    return text


def connected(address: RedisUrl) -> Redis:
    """A client that opens connections when they are needed, does not try again by itself, and has its patience."""
    from redis.asyncio import Redis, RedisCluster, Sentinel
    from redis.asyncio.cluster import ClusterNode
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    classes: dict[str, Any] = {"single": Redis, "cluster": RedisCluster, "sentinel": Sentinel}
    once = Retry(NoBackoff(), 0)
    within: dict[str, Any] = {"socket_timeout": CONNECTING, "socket_connect_timeout": CONNECTING, "protocol": 2}
    within |= {"ssl": True} if address.tls else {}
    common = {
        "username": address.username or None,
        "password": address.password or None,
        "max_connections": CONNECTIONS,
        **within,
        **_options(address),
    }
    client: Redis
    if address.kind is RedisTopology.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        client = classes["cluster"](startup_nodes=nodes, retry=Retry(NoBackoff(), 1), **common)
    elif address.kind is RedisTopology.SENTINEL:
        asked = {name: value for name, value in common.items() if name.startswith("ssl_")} | within
        asked |= {name: address.options.get(f"sentinel_{name}") for name in ("username", "password")}
        sentinel = classes["sentinel"](list(address.hosts), sentinel_kwargs={**asked, "retry": once})
        client = sentinel.master_for(address.service, db=address.db, retry=once, **common)
    elif address.kind is RedisTopology.UNIX:
        client = classes["single"](unix_socket_path=address.path, db=address.db, retry=once, **common)
    else:
        host, port = address.hosts[0]
        client = classes["single"](host=host, port=port, db=address.db, retry=once, **common)
    return client


def _options(address: RedisUrl) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: value for name, value in address.options.items() if not name.startswith("sentinel_")
    }
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() not in ("false", "no", "0")
    return options
