"""Scripts for Redis: those that are asked in one turn of the loop go in one round trip.

Rules:
- A script is sent by its digest; one that Redis does not know is loaded, and sent again: it has not run.
- What a script answers is its asker's; what fails is `Unavailable`, with all that went along.
- Who stops waiting stops nobody else: a flight is nobody's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.admission.redis_scripts import Script
from gateway.cluster.redis_client import RedisClient, Unavailable

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST = 500  # scripts in one round trip


@dataclass(slots=True, eq=False)
class Asked:
    script: Script
    keys: Sequence[str]
    args: Sequence[str | int]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ScriptPipeline:
    """One per process, on one link."""

    def __init__(self, link: RedisClient) -> None:
        self.link = link
        self._waiting: list[Asked] = []
        self._under_way: set[asyncio.Task[None]] = set()

    def ask(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> asyncio.Future[Any]:
        """Its answer; Unavailable, at once while Redis is away."""
        asked = Asked(script, keys, args)
        if not self.link.up:
            asked.answer.set_exception(Unavailable("away"))
            return asked.answer
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._depart)
        self._waiting.append(asked)
        return asked.answer

    async def close(self) -> None:
        """What has departed arrives, or fails."""
        self._depart()
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _depart(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            task = asyncio.get_running_loop().create_task(self._fly(batch))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _fly(self, batch: list[Asked]) -> None:
        try:
            await self.link.call(lambda redis: _played(redis, batch))
        except Unavailable as error:
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_exception(error)
                    asked.answer.exception()  # whoever asked may be gone: that is not worth a warning


async def _played(redis: Redis, batch: list[Asked]) -> None:
    """Raises what the first of them failed by, when all others have their answers."""
    from redis.exceptions import NoScriptError

    left = await _sent(redis, batch)
    if any(isinstance(error, NoScriptError) for _, error in left):
        unknown = [asked for asked, error in left if isinstance(error, NoScriptError)]
        for script in {asked.script.sha: asked.script for asked in unknown}.values():
            await redis.script_load(script.text)
        left = [*(pair for pair in left if pair[0] not in unknown), *await _sent(redis, unknown)]
    if left:
        raise left[0][1]


async def _sent(redis: Redis, batch: list[Asked]) -> list[tuple[Asked, Exception]]:
    """Those that failed."""
    if len(batch) == 1:  # without a pipeline: half the time
        try:
            answers = [await redis.evalsha(*_command(batch[0]))]
        except Exception as error:
            return [(batch[0], error)]
    else:
        async with redis.pipeline(transaction=False) as pipeline:
            for asked in batch:
                pipeline.evalsha(*_command(asked))
            answers = await pipeline.execute(raise_on_error=False)
    failed = []
    for asked, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            failed.append((asked, answer))
        elif not asked.answer.done():
            asked.answer.set_result(answer)
    return failed


def _command(asked: Asked) -> Iterable[Any]:
    return (asked.script.sha, len(asked.keys), *asked.keys, *asked.args)
