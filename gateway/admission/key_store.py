"""Callers' keys in Redis: written by `firsttoken keys`, read by running gateways.

Rules:
- A hash holds the keys by name, as JSON with the digest of the key; a separate field counts the changes.
- A gateway reads the count once a second, and all keys after a change. Requests are checked against this copy: no
  request waits for Redis.
- While Redis is unavailable, or after Redis has lost all keys, the last known keys stay valid: no revocation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gateway.cluster.redis_client import PREFIX, RedisClient, Unavailable
from gateway.config.models import Key

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

HASH = PREFIX + "keys"
CHANGES = " changes"  # a key's name has no space
CHECK_INTERVAL = 1.0  # s
READ_TIMEOUT = 1.0  # s, of all keys

_ADD = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[1], ' changes', 1)
return 1
"""
_REVOKE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], ' changes', 1)
return 1
"""


class Keyring:
    """`known`: the keys as last read. `on_change` is called when another set of keys was read."""

    def __init__(self, redis: RedisClient, on_change: Callable[[], None]) -> None:
        self._redis, self._on_change = redis, on_change
        self.known: Sequence[Key] = ()
        self._seen: bytes | None = None  # count of changes
        self._lost = self._closed = False
        self._checking: asyncio.Task[None] | None = None
        self._check_now = asyncio.Event()
        redis.on_up(self._check_now.set)

    def start(self) -> None:
        self._checking = asyncio.get_running_loop().create_task(self._check_forever())

    async def close(self) -> None:
        if self._checking is not None:
            self._closed = True
            self._checking.cancel()
            await asyncio.wait([self._checking])

    async def _check_forever(self) -> None:
        while not self._closed:  # a cancellation may be lost within redis-py (python/cpython#86296)
            with suppress(Unavailable):
                await self._check()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL):
                    await self._check_now.wait()
            self._check_now.clear()

    async def _check(self) -> None:
        count = await self._redis.call(changes)
        if count is not None and count != self._seen:
            self.known = await self._redis.call(all_keys, READ_TIMEOUT)
            self._on_change()
            self._seen, self._lost = count, False
        elif count is None and self._seen is not None and not self._lost:
            self._lost = True
            log.warning("redis %s: has lost the keys; the last known keys stay valid", self._redis.url.redacted)


async def changes(redis: Redis) -> Any:
    """Number of changes; None if there was never a key."""
    return await redis.hget(HASH, CHANGES)


async def all_keys(redis: Redis) -> list[Key]:
    """Keys in order of name."""
    found: dict[Any, Any] = await redis.hgetall(HASH)
    return [key for name in sorted(found) if (key := _parse(name, found[name])) is not None]


async def add(redis: Redis, key: Key) -> bool:
    """False if the name is taken."""
    return bool(await redis.eval(_ADD, 1, HASH, key.name, key.model_dump_json(exclude_defaults=True)))


async def revoke(redis: Redis, name: str) -> bool:
    """False if there is no key of this name."""
    return bool(await redis.eval(_REVOKE, 1, HASH, name))


def _parse(name: bytes, text: bytes) -> Key | None:
    if name == CHANGES.encode():
        return None
    try:
        return Key.model_validate_json(text)
    except ValidationError:
        log.warning("keys: '%s' in Redis is not a valid key of this version; ignored", name.decode("ascii", "replace"))
        return None
