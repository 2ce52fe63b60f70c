"""Stores of kept answers: the memory of a process, or Redis.

Rules:
- A store is bounded in bytes. Beyond the bound, the group with most bytes gives up the answers that expire first: no
  group's traffic takes the answers of a smaller one.
- A look into Redis takes LOOK_TIMEOUT at most, and waits as long at most while LOOKS others look; a store is never
  waited for. The client is one of its own: large or slow answers open no circuit breaker of quotas.
- Redis sees groups and requests as digests, and answers as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Annotated, Any, Protocol

import msgspec

from gateway.caches import FairCache
from gateway.cluster.redis_client import RedisClient, ScriptPipeline, Unavailable, ignore_result
from gateway.cluster.redis_names import redis_name
from gateway.config.models import StateSection

LOOK_TIMEOUT = 0.05  # s
LOOKS = 32  # at once: below the client's connections, and that many megabytes of answers
STORE_TIMEOUT = 0.5  # s, of up to a megabyte
OVERHEAD = 500  # bytes of an entry beside its body
LATEST = 1e11  # s of Unix time
LONGEST = 8 * 86_400_000  # ms after which Redis forgets the index: each answer in it has expired


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """`group`: digest of the cache group; `digest`: of group, route and request. Both in hex."""

    group: str
    digest: str


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`stored_at`: Unix time, s."""

    stored_at: Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
    content_type: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z")]  # a header line
    body: bytes
    lines: tuple[Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z")], ...] = ()  # of the head, about the request
    pool: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z")] = "-"  # that has answered
    model: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z")] = "-"


class AnswerStore(Protocol):
    async def find(self, key: AnswerKey) -> KeptAnswer | None: ...

    def put(self, key: AnswerKey, answer: KeptAnswer, ttl: float) -> None: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


def answer_store(state: StateSection) -> AnswerStore:
    """The store that `state.answers` names."""
    if state.answers == "redis" and state.redis is not None:
        client = RedisClient(state.redis.get_secret_value(), STORE_TIMEOUT, state.namespace)
        return RedisAnswers(client, state.namespace, state.answer_bytes)
    return MemoryAnswers(state.answer_bytes)


class MemoryAnswers:
    """Of a group, the answer stored first is dropped first."""

    def __init__(self, most: int, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._kept: FairCache[tuple[float, KeptAnswer]] = FairCache(most, lambda kept: _size(kept[1]))  # with its end

    @property
    def size(self) -> int:
        return self._kept.size

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def find(self, key: AnswerKey) -> KeptAnswer | None:
        expires, answer = self._kept.get(key.group, key.digest) or (0.0, None)
        if answer is not None and expires <= self._clock():
            self._kept.drop(key.group, key.digest)
            return None
        return answer

    def put(self, key: AnswerKey, answer: KeptAnswer, ttl: float) -> None:
        self._kept.put(key.group, key.digest, (self._clock() + ttl, answer))


def _size(answer: KeptAnswer) -> int:
    return len(answer.body) + OVERHEAD


# Keys: BASE:DIGEST an answer; BASE:of:GROUP digests by time of expiry; BASE:groups bytes by group; BASE:sizes bytes by
# digest, and of all. BASE has a hash tag: all are in one slot of a cluster.
PUT = """
local base, digest, group, value = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local ttl, most, overhead, longest = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local sizes, groups = base .. ':sizes', base .. ':groups'
local function drop(owner, name)
  local size = tonumber(redis.call('HGET', sizes, name) or '0')
  redis.call('DEL', base .. ':' .. name)
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', base .. ':of:' .. owner, name)
  redis.call('ZINCRBY', groups, -size, owner)
  redis.call('HINCRBY', sizes, 'all', -size)
  if redis.call('ZCARD', base .. ':of:' .. owner) == 0 then redis.call('ZREM', groups, owner) end
end
local own = base .. ':of:' .. group
for _, name in ipairs(redis.call('ZRANGEBYSCORE', own, '-inf', now, 'LIMIT', 0, 100)) do drop(group, name) end
if redis.call('HEXISTS', sizes, digest) == 1 then drop(group, digest) end
local size = #value + overhead
redis.call('SET', base .. ':' .. digest, value, 'PX', ttl)
redis.call('HSET', sizes, digest, size)
redis.call('ZADD', own, now + ttl, digest)
redis.call('ZINCRBY', groups, size, group)
local all = redis.call('HINCRBY', sizes, 'all', size)
while all > most do
  local owner = redis.call('ZREVRANGE', groups, 0, 0)[1]
  local name = owner and redis.call('ZRANGE', base .. ':of:' .. owner, 0, 0)[1]
  if not name then
    redis.call('DEL', sizes, groups)
    break
  end
  drop(owner, name)
  all = tonumber(redis.call('HGET', sizes, 'all'))
end
for _, name in ipairs({sizes, groups, own}) do redis.call('PEXPIRE', name, longest) end
return all
"""


class RedisAnswers:
    def __init__(self, redis: RedisClient, namespace: str, most: int) -> None:
        self._redis, self._most = redis, most
        self._name = partial(redis_name, namespace, slot="answers")
        self._pipeline = ScriptPipeline(redis)
        self._looks = asyncio.Semaphore(LOOKS)
        self._decode = msgspec.msgpack.Decoder(KeptAnswer).decode

    def start(self) -> None:
        self._redis.start()

    async def close(self) -> None:
        await self._pipeline.close()
        await self._redis.close()

    async def find(self, key: AnswerKey) -> KeptAnswer | None:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT):
                await self._looks.acquire()
        except TimeoutError:
            return None
        try:
            found: Any = await self._redis.call(lambda redis: redis.get(self._name(key.digest)), LOOK_TIMEOUT)
            return None if found is None else self._decode(found)
        except (Unavailable, msgspec.DecodeError):
            return None
        finally:
            self._looks.release()

    def put(self, key: AnswerKey, answer: KeptAnswer, ttl: float) -> None:
        value = msgspec.msgpack.encode(answer)
        args: list[str | int | bytes] = [key.digest, key.group, value, int(ttl * 1000), self._most, OVERHEAD, LONGEST]
        stored = self._pipeline.call(PUT, [self._name()], args)
        stored.add_done_callback(ignore_result)  # without a place in Redis, the next equal request is sent to an engine
