"""Lua scripts on Redis: all calls within one turn of the loop share one round trip.

Rules:
- A script is called by digest. A script unknown to Redis has not run: it is loaded and called again.
- Each caller gets its own answer; a failure is `Unavailable` for all unanswered calls of the round trip.
- A cancelled caller cancels nothing: a round trip belongs to no single caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from typing import TYPE_CHECKING, Any

from gateway.cluster.redis_client import RedisClient, Unavailable

if TYPE_CHECKING:
    from redis.asyncio import Redis

BATCH = 500  # scripts in one round trip


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its digest in Redis."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True, eq=False)
class ScriptCall:
    script: Script
    keys: Sequence[str]
    args: Sequence[str | int]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def command(self) -> Iterable[Any]:
        return (self.script.sha, len(self.keys), *self.keys, *self.args)


class ScriptPipeline:
    """One per process and Redis client."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._waiting: list[ScriptCall] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> asyncio.Future[Any]:
        """The future answer; fails with Unavailable, at once while Redis is unavailable."""
        call = ScriptCall(script, keys, args)
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
            await self._redis.call(lambda redis: _run(redis, batch))
        except Unavailable as error:
            for call in batch:
                if not call.answer.done():
                    call.answer.set_exception(error)
                    call.answer.exception()  # marks it as retrieved: the caller may be gone


async def _run(redis: Redis, batch: list[ScriptCall]) -> None:
    """Raises the first error, when all other calls have their answers."""
    from redis.exceptions import NoScriptError

    failed = await _send(redis, batch)
    unknown = [call for call, error in failed if isinstance(error, NoScriptError)]
    if unknown:
        for script in {call.script for call in unknown}:
            await redis.script_load(script.text)
        failed = [*(pair for pair in failed if pair[0] not in unknown), *await _send(redis, unknown)]
    if failed:
        raise failed[0][1]


async def _send(redis: Redis, batch: list[ScriptCall]) -> list[tuple[ScriptCall, Exception]]:
    """The calls that failed."""
    if len(batch) == 1:  # without a pipeline: half the time
        try:
            answers = [await redis.evalsha(*batch[0].command())]
        except Exception as error:
            return [(batch[0], error)]
    else:
        async with redis.pipeline(transaction=False) as pipeline:
            for call in batch:
                pipeline.evalsha(*call.command())
            answers = await pipeline.execute(raise_on_error=False)
    failed = []
    for call, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            failed.append((call, answer))
        elif not call.answer.done():
            call.answer.set_result(answer)
    return failed
