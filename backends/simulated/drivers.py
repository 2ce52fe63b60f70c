"""What makes a simulated backend run in real time: plans become timers, events reach their answers.

The engine's clock is the loop's, times `speed`. A driver never lets lateness accumulate: the next
step starts where the last one should have ended, unless the machine fell behind by more than
`_LATE`; then the engine is slowed down rather than made to catch up in a burst.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Protocol

from backends.simulated.answer import AnswerWriter
from backends.simulated.engine import Engine
from backends.simulated.events import EngineRequest, RequestId, StepResult
from backends.simulated.faults import Faults
from backends.simulated.hosted import ApiTiming, HostedApi

_LATE = 0.020  # s


class Driver(Protocol):
    """Runs until closed."""

    def now(self) -> float: ...

    def submit(self, request: EngineRequest, answer: AnswerWriter) -> None:
        """May raise Refused."""
        ...

    def abort(self, request_id: RequestId) -> None: ...

    async def close(self) -> None: ...


class _Clock:
    def __init__(self, speed: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()
        self._speed = speed

    def now(self) -> float:
        return (self._loop.time() - self._zero) * self._speed

    def real(self, at: float) -> float:
        """The loop's time at which the engine's clock shows `at`."""
        return self._zero + at / self._speed

    async def sleep_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, self.real(at) - self._loop.time()))


class EngineDriver:
    """Steps an `Engine`, in one task."""

    def __init__(self, engine: Engine, faults: Faults, speed: float) -> None:
        self._engine = engine
        self._faults = faults
        self._clock = _Clock(speed)
        self._late = _LATE * speed
        self._answers: dict[RequestId, AnswerWriter] = {}
        self._submitted = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="simulated engine")

    def now(self) -> float:
        return self._clock.now()

    def submit(self, request: EngineRequest, answer: AnswerWriter) -> None:
        self._engine.submit(request, self.now())
        self._answers[request.id] = answer
        self._submitted.set()

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)
        self._answers.pop(request_id, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        ended = -inf
        while True:
            now = self.now()
            self._engine.slow(self._faults.slow)
            step = self._engine.step(ended if now - ended <= self._late else now)
            if step is None:
                await self._wait_for_work()
                ended = -inf
            else:
                await self._clock.sleep_until(step.ends_at)
                self._deliver(step)
                ended = step.ends_at

    async def _wait_for_work(self) -> None:
        wakes_at = self._engine.wakes_at(self.now())
        if wakes_at is not None:
            await self._clock.sleep_until(wakes_at)
        else:
            self._submitted.clear()
            await self._submitted.wait()

    def _deliver(self, step: StepResult) -> None:
        answers, at = self._answers, step.ends_at
        for first in step.first:
            if first.id in answers:
                answers[first.id].begin(at, first.queue_time, first.cached_tokens)
        for request_id in step.tokens:
            if request_id in answers:
                answers[request_id].token(at)
        for finished in step.finished:
            if finished.id in answers:
                answers.pop(finished.id).finish()


class HostedDriver:
    """Runs the answers of a `HostedApi`, one timer each."""

    def __init__(self, api: HostedApi, faults: Faults, speed: float) -> None:
        self._api = api
        self._faults = faults
        self._clock = _Clock(speed)
        self._timers: dict[RequestId, asyncio.TimerHandle] = {}

    def now(self) -> float:
        return self._clock.now()

    def submit(self, request: EngineRequest, answer: AnswerWriter) -> None:
        self._api.slow(self._faults.slow)
        course = self._api.submit(request, self.now())
        self._arm(request.id, answer, course)

    def abort(self, request_id: RequestId) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        self._api.abort(request_id)

    async def close(self) -> None:
        for request_id in tuple(self._timers):
            self.abort(request_id)

    def _arm(self, request_id: RequestId, answer: AnswerWriter, course: ApiTiming) -> None:
        at = course.first_at + course.gap * answer.tokens
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_at(self._clock.real(at), self._token, request_id, answer, course, at)

    def _token(self, request_id: RequestId, answer: AnswerWriter, course: ApiTiming, at: float) -> None:
        if answer.tokens == 0:
            answer.begin(at, 0.0, 0)
        answer.token(at)
        if answer.tokens < course.tokens:
            self._arm(request_id, answer, course)
        else:
            del self._timers[request_id]
            self._api.run_until(at)
            answer.finish()
