"""The Redis client of all shared state, with a circuit breaker: no request waits for an absent Redis.

Rules:
- A call is answered within `timeout`. Three failures in a row open the breaker: later calls raise `Unavailable` at
  once.
- One task probes Redis: at the start, each second, and while the breaker is open. Two writes within half the timeout
  close the breaker. So Redis may be absent at the start, hang, be slow, be read-only, or have no name in DNS.
- An error about a stored value (of another type than the gateway writes, say) is the call's own: it is `UnusableKey`,
  named in the log once, and opens no breaker, so that one broken key takes Redis from no other caller.
- At each connect a script has to run: Redis without the right to EVAL is of no use. A `maxmemory-policy` that may drop
  costs and keys is named in the log.
- A reply that came in during a stall of our own loop counts; a time-out after a stall is not counted as a failure.
- One log line per change of state. Never the password, and no traceback.
- All calls of Lua scripts within one turn of the loop share one round trip. A script is called by digest; a script
  unknown to Redis has not run, and is sent whole. A failure of Redis is `Unavailable` for all unanswered calls of a
  round trip.
- A cancelled caller cancels no round trip, which belongs to no single caller.

redis-py is an optional dependency (`firsttoken[redis]`), imported with the first client.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha1
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backends.http.loop_aware_timer import LoopAwareTimer
from gateway.cluster.redis_names import DEFAULT_NAMESPACE, redis_name
from gateway.config.field_types import RedisTopology, RedisUrl, parse_redis_url
from gateway.observe.metrics.series import gauge, totals

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

T = TypeVar("T")

TIMEOUT = 0.05  # s for a call; a healthy Redis in the same place takes 0.0005
CONNECT_TIMEOUT = 2.0  # s for a probe to connect: TLS, sentinels, the map of a cluster. No request waits for this
PROBE_INTERVAL = 1.0  # s, while the breaker is closed
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # s between probes while the breaker is open
MAX_FAILURES, FAILURE_DECAY = 2.5, 0.9  # opens at the third failure in a row, or if one call in four fails for a while
FLAPPING = 10.0  # s: after a shorter time closed, the first pause is the longest
LATE = 0.02  # s of delay of a time-out from which our own loop has stalled
CONNECTIONS = 64
BATCH = 500  # scripts in one round trip
MAX_NAMED = 1_000  # unusable values named in the log
PROBE_KEPT = 10_000  # ms
SAFE_POLICY = "noeviction"
CHECK = "redis.call('TIME') return redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])"
_OF_A_VALUE = re.compile(  # of Redis, and of Lua within a script
    "WRONGTYPE|not an integer|not a valid float|not a float|would overflow|out of range|attempt to |bad argument"
)


class Unavailable(Exception):
    """Redis is unavailable, or did not answer in time."""


class UnusableKey(Unavailable):
    """Value of this call that is not as the gateway writes it."""


class RedisClient(Collector):
    """`up`: the breaker is closed. `url`: from a validated configuration. `namespace`: of all names in Redis."""

    def __init__(self, url: str, timeout: float = TIMEOUT, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.namespace = namespace
        self.url = parse_redis_url(url)
        self.timeout = timeout
        self.client = create_client(self.url)
        self.up = False
        self.errors = 0
        self._failures = 0.0  # recent
        self._logged: bool | None = None  # last state in the log
        self._reason = "not connected yet"
        self._up_since = 0.0
        self._unusable: set[str] = set()  # in the log already
        self._policy = SAFE_POLICY
        self._on_up: list[Callable[[], None]] = []
        self._opened = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._closed = False  # before 3.12, `wait_for` in redis-py may lose a cancellation (python/cpython#86296)

    def start(self) -> None:
        self._probing = asyncio.get_running_loop().create_task(self._probe_forever())

    async def close(self) -> None:
        """Aborts calls under way."""
        self.up = False
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
        try:
            async with asyncio.timeout(self.timeout):
                await self.client.aclose()
        except Exception as error:
            log.debug("Redis: closing: %s", error)

    def on_up(self, callback: Callable[[], None]) -> None:
        """Calls back when Redis comes up, and now if Redis is up. Earlier writes may be lost."""
        self._on_up.append(callback)
        if self.up:
            callback()

    async def call(self, ask: Callable[[Redis], Awaitable[T]], timeout: float | None = None) -> T:
        """Result of `ask(client)`. Raises Unavailable: at once while the breaker is open, else after `timeout`; and
        UnusableKey."""
        if not self.up:
            raise Unavailable(self._reason)
        timer = LoopAwareTimer(LATE)
        try:
            async with timer.timeout(timeout or self.timeout):
                answer = await ask(self.client)
        except Exception as error:  # of redis-py, TLS, DNS; our own bug must not fail a request either
            if is_about_a_value(error):
                raise self.unusable("", error) from None
            self._on_failure(error, counts=not (timer.stalled and isinstance(error, TimeoutError)))
            raise Unavailable(self._reason) from None
        self._failures *= FAILURE_DECAY
        return answer

    def unusable(self, names: str, error: Exception) -> UnusableKey:
        """The error of a call, in the log once. `names`: of Redis that the call uses, where known."""
        self.errors += 1
        text = error_text(error, self.url)
        if (named := names or text) not in self._unusable and len(self._unusable) < MAX_NAMED:
            self._unusable.add(named)
            message = (
                "redis %s: %s: not as the gateway writes it: %s; decided by this process alone until it is deleted"
            )
            log.warning(message, self.url.redacted, names or "a value", text)
        return UnusableKey(text)

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_redis_up", [((), float(self.up))])
        yield from totals("firsttoken_redis_errors_total", [((), self.errors)])

    # -- breaker ----------------------------------------------------------------------------

    def _on_failure(self, error: BaseException, counts: bool = True) -> None:
        self.errors += 1
        self._reason = error_text(error, self.url)
        self._failures += counts
        if self.up and self._failures > MAX_FAILURES:
            self.up = False
            self._opened.set()
            self._log_state()

    def _close_breaker(self) -> None:
        self.up = True
        self._failures = 0.0
        self._up_since = monotonic()
        self._opened.clear()
        for callback in self._on_up:
            callback()
        self._log_state()

    def _log_state(self) -> None:
        if self._logged == self.up:
            return
        first, self._logged = self._logged is None, self.up
        if self.up:
            log.info("redis %s: %s", self.url.redacted, "connected" if first else "reconnected")
        else:
            log.warning("redis %s: unavailable: %s; using local state", self.url.redacted, self._reason)

    async def _probe_forever(self) -> None:
        pause = FIRST_PAUSE
        while not self._closed:
            if self.up:
                try:
                    async with asyncio.timeout(PROBE_INTERVAL):
                        await self._opened.wait()
                except TimeoutError:
                    await self._check()
                    continue
                pause = LONGEST_PAUSE if monotonic() - self._up_since < FLAPPING else FIRST_PAUSE
                await asyncio.sleep(pause)
            if await self._takes_writes():
                if not self._closed:
                    self._close_breaker()
                    await self._warn_of_eviction()
            else:
                self._log_state()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _check(self) -> None:
        """Finds an outage without calls: repeats a failed probe until success or an open breaker."""
        while self.up:
            with suppress(Unavailable):
                await self.call(self._probe)
                return

    async def _takes_writes(self) -> bool:
        """True after a script and two writes in time; connecting may take longer."""
        try:
            for limit, ask in ((CONNECT_TIMEOUT, self._run_script), *((self.timeout / 2, self._probe),) * 2):
                async with asyncio.timeout(limit):
                    await ask(self.client)
        except Exception as error:
            self._on_failure(error)
            return False
        return True

    async def _probe(self, client: Redis) -> None:
        """Writes: a read-only or full Redis is of no use."""
        await client.set(redis_name(self.namespace, "probe"), "1", px=PROBE_KEPT)

    async def _run_script(self, client: Redis) -> None:
        """Writes by a script, as all calls of quotas and keys do."""
        await _run(client, [ScriptCall(CHECK, (1, redis_name(self.namespace, "probe"), PROBE_KEPT))], self)

    async def _warn_of_eviction(self) -> None:
        """Redis tells where its user may ask (INFO)."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                found = _policies(await self.client.info("memory"))
        except Exception as error:
            log.debug("redis %s: INFO: %s", self.url.redacted, error_text(error, self.url))
            return
        policy = next((each for each in found if each != SAFE_POLICY), SAFE_POLICY)
        if policy not in (self._policy, SAFE_POLICY):
            text = "redis %s: maxmemory-policy is %s: keys and costs of the month may be dropped; set %s"
            log.warning(text, self.url.redacted, policy, SAFE_POLICY)
        self._policy = policy


def _policies(info: Any) -> list[str]:
    """Of one server, or of each node of a cluster."""
    each = info.values() if all(isinstance(one, dict) for one in info.values()) else [info]
    return [str(one["maxmemory_policy"]) for one in each if "maxmemory_policy" in one]


def is_about_a_value(error: BaseException) -> bool:
    """Redis has answered, and refuses what is stored under a name of the call."""
    from redis.exceptions import ResponseError

    return isinstance(error, ResponseError) and _OF_A_VALUE.search(str(error)) is not None


def error_text(error: BaseException, url: RedisUrl) -> str:
    """One line without secrets."""
    text = " ".join(str(error).split())[:200].rstrip(".") or "no answer in time"
    if not isinstance(error, (OSError, TimeoutError)):
        text = f"{type(error).__name__}: {text}"
    for secret in (url.password, url.options.get("sentinel_password")):
        if secret:
            text = text.replace(secret, "***")
    return text


def create_client(url: RedisUrl) -> Redis:
    """Opens connections on demand, without retries, which are up to the breaker."""
    from redis import asyncio as typed
    from redis.asyncio.cluster import ClusterNode
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    redis: Any = typed  # the types of redis-py do not know all options
    once = Retry(NoBackoff(), 0)
    transport: dict[str, Any] = {
        "socket_timeout": CONNECT_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "protocol": 2,
        **({"ssl": True} if url.tls else {}),
    }
    options: dict[str, Any] = {
        "username": url.username or None,
        "password": url.password or None,
        "max_connections": CONNECTIONS,
        **transport,
        **{name: value for name, value in url.options.items() if not name.startswith("sentinel_")},
    }
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() not in ("false", "no", "0")
    if url.kind is RedisTopology.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in url.hosts]
        client: Redis = redis.RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 1), **options)
    elif url.kind is RedisTopology.SENTINEL:
        sentinel_options = {name: value for name, value in options.items() if name.startswith("ssl_")} | transport
        sentinel_options |= {name: url.options.get(f"sentinel_{name}") for name in ("username", "password")}
        sentinel = redis.Sentinel(list(url.hosts), sentinel_kwargs={**sentinel_options, "retry": once})
        client = sentinel.master_for(url.service, db=url.db, retry=once, **options)
    else:
        single = url.kind is RedisTopology.SINGLE
        address = {"host": url.hosts[0][0], "port": url.hosts[0][1]} if single else {"unix_socket_path": url.path}
        client = redis.Redis(**address, db=url.db, retry=once, **options)
    return client


# -- Lua scripts ---------------------------------------------------------------------------


@cache
def digest(script: str) -> str:
    """The name of a script in Redis."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()


@dataclass(slots=True, eq=False)
class ScriptCall:
    script: str
    args: Sequence[str | int | bytes]  # number of keys, keys, other arguments
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def names(self) -> str:
        """Names of Redis, for the log."""
        return ", ".join(map(str, self.args[1 : 1 + int(self.args[0])]))

    def fail(self, error: Unavailable) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks it as retrieved: the caller may be gone


class ScriptPipeline:
    """One per process and Redis client."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._waiting: list[ScriptCall] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, script: str, keys: Sequence[str], args: Sequence[str | int | bytes]) -> asyncio.Future[Any]:
        """The future answer; fails with Unavailable, at once while Redis is unavailable."""
        call = ScriptCall(script, (len(keys), *keys, *args))
        if not self._redis.up:
            call.answer.set_exception(Unavailable("unavailable"))
            return call.answer
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(call)
        return call.answer

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._tasks)

    async def close(self) -> None:
        """Returns when every call has its answer or has failed."""
        self._flush()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            task = asyncio.get_running_loop().create_task(self._round_trip(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _round_trip(self, batch: list[ScriptCall]) -> None:
        try:
            await self._redis.call(lambda redis: _run(redis, batch, self._redis))
        except Unavailable as error:
            for call in batch:
                call.fail(error)


def ignore_result(answer: asyncio.Future[Any]) -> None:
    """A callback for the answer of a call that nobody waits for."""
    if not answer.cancelled():
        answer.exception()  # marks it as retrieved


async def _run(redis: Redis, batch: list[ScriptCall], client: RedisClient) -> None:
    """Raises the first error of Redis, when all other calls have their answers."""
    from redis.exceptions import NoScriptError

    errors = await _send(redis, batch, by_digest=True)
    if unknown := [call for call, error in errors.items() if isinstance(error, NoScriptError)]:
        resent = await _send(redis, unknown, by_digest=False)
        errors = {call: error for call, error in errors.items() if call not in unknown} | resent
    for call, error in errors.items():
        if not is_about_a_value(error):
            raise error
        call.fail(client.unusable(call.names, error))


async def _send(redis: Any, batch: list[ScriptCall], by_digest: bool) -> dict[ScriptCall, Exception]:
    """Answers calls. Returns the errors of the others."""
    commands = [
        ("EVALSHA", digest(call.script), *call.args) if by_digest else ("EVAL", call.script, *call.args)
        for call in batch
    ]
    if len(batch) == 1:  # without a pipeline: half the time
        try:
            answers = [await redis.execute_command(*commands[0])]
        except Exception as error:
            return {batch[0]: error}
    else:
        async with redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers = await pipeline.execute(raise_on_error=False)
    errors = {}
    for call, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            errors[call] = answer
        elif not call.answer.done():
            call.answer.set_result(answer)
    return errors
