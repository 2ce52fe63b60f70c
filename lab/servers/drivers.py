"""Drivers run a simulated backend in real time: plans become timers, events become bytes on the callers' sockets.

The engine's clock is the loop's, times `speed`. Writes go straight to the transport, framed as HTTP/1.1 chunks (RFC
9112, section 7.1): no task is woken per token, so hundreds of streams cost little. An answer is buffered as a
whole if the caller does not read.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random
from typing import Any

import msgspec

from lab.engines.engine import Engine
from lab.engines.engine_events import EngineRequest, RequestId, StepResult
from lab.engines.virtual_engine import ApiTiming, HostedApi
from lab.servers.reply import DONE, GARBAGE, ReplyWriter, error_event


class StreamFault(msgspec.Struct, frozen=True):
    """A fault of an answer, due with token number `after` (from 0)."""

    kind: str  # cut | garbage | error | stall
    after: int
    seconds: float | None = None  # of a stall; None: for ever


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """Faults of a simulated server, for tests and for the demo; all off by default.

    Set as attributes of `SimulatedServer.faults`, or as a whole with `POST /simulate/faults` and a JSON object of these
    names; omitted names return to their defaults, so `{}` heals the server.
    """

    silent: bool = False  # accept, and never answer
    headers_then_silence: bool = False  # 200 and headers, and never a token
    status: int | None = None  # answer with this error ...
    status_share: float = 1.0  # ... this share of the requests
    retry_after: float | None = None  # s, sent with this error
    slow: float = 1.0  # factor on the duration of every step
    stall_share: float = 0.0  # this share of the answers stops ...
    stall_after_tokens: int = 0  # ... after so many tokens (0: 200 and headers only) ...
    stall_seconds: float | None = None  # ... for this long; None: for ever
    cut_after_tokens: int | None = None  # reset the connection in mid-stream
    error_after_tokens: int | None = None  # an error event in place of a token; the stream ends
    garbage_after_tokens: int | None = None  # an event of invalid JSON in place of a token
    omit_done: bool = False  # no [DONE] at the end
    thinking_tokens: int = 0  # tokens of a streamed chat that are reasoning

    def of_stream(self, random: Random) -> StreamFault | None:
        if self.headers_then_silence:
            return StreamFault("stall", 0)
        if self.stall_share and random.random() < self.stall_share:
            return StreamFault("stall", self.stall_after_tokens, self.stall_seconds)
        for kind in ("cut", "error", "garbage"):
            after: int | None = getattr(self, f"{kind}_after_tokens")
            if after is not None:
                return StreamFault(kind, after)
        return None


MAX_LATENESS = 0.020  # s


class AnswerWriter:
    """Counts the tokens of an answer and keeps the times (of the engine's clock). `done` is set at the end.

    `per_event`: tokens of an event of the stream; the first one is an event of its own, as with vLLM's
    `--stream-interval`.
    """

    def __init__(
        self, prompt_tokens: int, submitted_at: float, fault: StreamFault | None = None, per_event: int = 1
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.tokens = 0
        self.broken = False  # by a simulated fault, not by the caller
        self.done = asyncio.Event()
        self._submitted_at = self._first_at = self._last_at = submitted_at
        self._queue_time = 0.0
        self._fault = fault
        self._per_event = per_event
        self._written = 0  # tokens
        self._buffered: list[bytes] | None = None  # output during a stall
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._writer: ReplyWriter | None = None

    def stream_to(self, transport: asyncio.Transport, writer: ReplyWriter) -> None:
        """Write tokens as soon as generated; without this call the answer is only timed."""
        self._transport = transport
        self._writer = writer

    @property
    def ttft(self) -> float:
        return self._first_at - self._submitted_at

    @property
    def generation(self) -> float:
        """Seconds from the first to the last token."""
        return self._last_at - self._first_at

    def metrics(self) -> dict[str, float]:
        """vLLM's `metrics`, in milliseconds; the time to the first token excludes the queue."""
        gaps = max(self.tokens - 1, 1)
        return {
            "time_to_first_token_ms": (self.ttft - self._queue_time) * 1e3,
            "queue_time_ms": self._queue_time * 1e3,
            "generation_time_ms": self.generation * 1e3,
            "mean_itl_ms": self.generation * 1e3 / gaps,
            "tokens_per_second": gaps / self.generation if self.generation > 0 else 0.0,
        }

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "completion_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def begin(self, at: float, queue_time: float, cached_tokens: int) -> None:
        """Called before the first token."""
        self._first_at = at
        self._queue_time = queue_time
        self.cached_tokens = cached_tokens

    def token(self, at: float) -> None:
        index = self.tokens
        self.tokens += 1
        self._last_at = at
        fault = self._fault if self._fault is not None and index == self._fault.after else None
        garbage = fault is not None and fault.kind == "garbage"
        if fault is not None and not garbage:
            self._apply(fault)
        if self._writer is not None and garbage:
            self._write(GARBAGE)
            self._written = self.tokens
        elif index % self._per_event == 0:
            self._flush()

    def _flush(self) -> None:
        """Write the tokens that are not written yet, as one event."""
        if self._writer is not None and self._written < self.tokens:
            self._write(self._writer.tokens(self._written, self.tokens))
            self._written = self.tokens

    def finish(self) -> None:
        """Called after the last token."""
        self._flush()
        if self._writer is not None:
            self._write(self._writer.ending(self.usage, self.metrics()))
        self._ended = True
        if self._buffered is None:
            self.done.set()

    def _write(self, data: bytes) -> None:
        if self._buffered is not None:
            self._buffered.append(data)
        elif data and self._transport is not None and not self.broken and not self._transport.is_closing():
            # uvloop raises on a closing transport where asyncio only warns, and would end the engine's only task
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _apply(self, fault: StreamFault) -> None:
        if fault.kind == "stall":
            self._buffered = []
            if fault.seconds is not None:
                asyncio.get_running_loop().call_later(fault.seconds, self._resume)
            return
        if fault.kind == "error":
            self._write(error_event("the engine failed (simulated)") + DONE)
        elif self._transport is not None:
            self._transport.abort()
        self.broken = True
        self.done.set()

    def _resume(self) -> None:
        buffered, self._buffered = self._buffered or [], None
        for data in buffered:
            self._write(data)
        if self._ended:
            self.done.set()


class _RealTime:
    """The engine's clock: the loop's, times `speed`."""

    def __init__(self, faults: Faults, speed: float) -> None:
        self._faults = faults
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()

    def now(self) -> float:
        return (self._loop.time() - self._zero) * self._speed

    async def _sleep_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, (at - self.now()) / self._speed))


class EngineDriver(_RealTime):
    """Steps an `Engine`, in a single task.

    Lateness does not accumulate: the next step starts at the planned end of the last, unless the machine fell behind
    by more than `max_lateness`; then the engine is slowed down rather than made to catch up in a burst.
    """

    def __init__(self, engine: Engine, faults: Faults, speed: float, max_lateness: float = MAX_LATENESS) -> None:
        super().__init__(faults, speed)
        self._engine = engine
        self._max_lateness = max_lateness * speed
        self._answers: dict[RequestId, AnswerWriter] = {}
        self._submitted = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="simulated engine")

    def submit(self, request: EngineRequest, answer: AnswerWriter) -> None:
        """Raises Refused."""
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
            self._engine.slowness = self._faults.slow
            step = self._engine.step(ended if now - ended <= self._max_lateness else now)
            ended = -inf if step is None else step.ends_at
            if step is not None:
                await self._sleep_until(step.ends_at)
                self._deliver(step)
            elif (wakes_at := self._engine.wakes_at(self.now())) is not None:
                await self._sleep_until(wakes_at)
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


class HostedDriver(_RealTime):
    """Runs the answers of a `HostedApi`, a task each."""

    def __init__(self, api: HostedApi, faults: Faults, speed: float) -> None:
        super().__init__(faults, speed)
        self._api = api
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    def submit(self, request: EngineRequest, answer: AnswerWriter) -> None:
        """Raises Refused."""
        self._api.slow(self._faults.slow)
        timing = self._api.submit(request, self.now())
        self._tasks[request.id] = asyncio.create_task(self._write(request.id, answer, timing))

    def abort(self, request_id: RequestId) -> None:
        self._api.abort(request_id)
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        for request_id in tuple(self._tasks):
            self.abort(request_id)

    async def _write(self, request_id: RequestId, answer: AnswerWriter, timing: ApiTiming) -> None:
        for index in range(timing.tokens):
            at = timing.first_at + timing.gap * index
            await self._sleep_until(at)
            if index == 0:
                answer.begin(at, 0.0, 0)
            answer.token(at)
        del self._tasks[request_id]
        self._api.run_until(timing.ends_at)
        answer.finish()


Driver = EngineDriver | HostedDriver
