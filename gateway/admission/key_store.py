"""Callers' keys in Redis: kept by `firsttoken keys`, looked for by running gateways.

Rules:
- A hash has them by name, as JSON, with the digest of the key alone; a field of its own counts the changes.
- A gateway looks at the count once a second and reads all when it has changed. What a request is checked against is its
  own copy: nobody asks Redis who a caller is.
- While Redis is away the last known keys hold. So they do when Redis has lost all of them: that is no revocation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gateway.cluster.redis_client import PREFIX, RedisClient, Unavailable
from gateway.config.models import Key

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

HASH = PREFIX + "keys"
CHANGES = " changes"  # a name has no space
EVERY = 1.0  # s
READING = 1.0  # s that reading all may take; no request waits for it

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
    """`known`: the keys as they were last seen. `changed` is called whenever they are others."""

    def __init__(self, link: RedisClient, changed: Callable[[], None]) -> None:
        self._link, self._changed = link, changed
        self.known: Sequence[Key] = ()
        self._seen: bytes | None = None
        self._lost = self._closed = False
        self._looking: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        link.on_up(self._now.set)

    def start(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look_forever())

    async def close(self) -> None:
        if self._looking is not None:
            self._closed = True
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look_forever(self) -> None:
        while not self._closed:  # a cancellation may be lost within redis-py (python/cpython#86296)
            try:
                await self._look()
            except Unavailable:
                log.debug("keys: Redis is away")
            try:
                async with asyncio.timeout(EVERY):
                    await self._now.wait()
            except TimeoutError:
                continue
            self._now.clear()

    async def _look(self) -> None:
        count = await self._link.call(changes)
        if count is None:
            self._missing()
        elif count != self._seen:
            self.known = await self._link.call(all_keys, READING)
            self._changed()
            self._seen, self._lost = count, False

    def _missing(self) -> None:
        if self._seen is not None and not self._lost:
            self._lost = True
            log.warning("redis %s: has lost the keys; the last known ones hold", self._link.url.redacted)


async def changes(redis: Redis) -> Any:
    """How many there were so far; None: there was never a key."""
    return await redis.hget(HASH, CHANGES)


async def all_keys(redis: Redis) -> list[Key]:
    """In the order of their names."""
    found: dict[Any, Any] = await redis.hgetall(HASH)
    return [key for name in sorted(found) if (key := _read(name, found[name])) is not None]


async def add(redis: Redis, key: Key) -> bool:
    """False: there is one of this name."""
    return bool(await redis.eval(_ADD, 1, HASH, key.name, key.model_dump_json(exclude_defaults=True)))


async def revoke(redis: Redis, name: str) -> bool:
    """False: there is none of this name."""
    return bool(await redis.eval(_REVOKE, 1, HASH, name))


def _read(name: bytes, text: bytes) -> Key | None:
    if name == CHANGES.encode():
        return None
    try:
        return Key.model_validate_json(text)
    except ValidationError:
        log.warning(
            "keys: what Redis has for '%s' is not a key of this version; it is left out",
            name.decode("ascii", "replace"),
        )
        return None
