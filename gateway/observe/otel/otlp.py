"""To an OpenTelemetry collector, over HTTP: batches that wait, are sent, tried again, or lost and counted.

Rules:
- All of it is tasks of the gateway's own loop, and of a thread that does nothing but compress. Whatever the collector
  does (refuses, hangs, drips, answers 500), nobody waits for it but what waits here, and that is bounded in bytes.
- One batch is under way at a time, for TIMEOUT s at most. What may work later (no connection, 429, 502, 503, 504: OTLP
  specification, "OTLP/HTTP Response") is tried again, after longer and longer waits or when the collector says. All
  else is lost.
- The log says when it stops working and when it works again, once each.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import uniform
from typing import NamedTuple

import aiohttp

log = logging.getLogger("firsttoken")

QUEUE = 16_000_000  # bytes that may wait: five thousand requests
BATCH = 500_000  # bytes that are sent at once; collectors take 20 MB
LINGER = 1.0  # s that spans wait for others
TIMEOUT = 10.0  # s for one batch, to the end of its reply
FIRST_WAIT, LONGEST_WAIT, LONGEST_ASKED = 0.5, 4.0, 60.0  # s before another try, give or take a fifth: it is back
# for us within 5 s of its return; the last where the collector says
TRIES = 12  # of one batch
CLOSING = 2.0  # s that what waits gets at the end
MAX_REPLY = 65_536  # bytes that are read of one
LATER = (429, 502, 503, 504)


class Reply(NamedTuple):
    """What came of a batch. `wait`: s, as the collector asked."""

    status: int  # 0: none
    body: bytes = b""
    wait: float | None = None
    why: str = ""

    @property
    def taken(self) -> bool:
        return 200 <= self.status < 300

    @property
    def later(self) -> bool:
        return self.status in LATER or self.status == 0


class Post:
    """The way to one path of a collector. Made on the loop."""

    def __init__(self, url: str, headers: Mapping[str, str], compress: bool, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.headers = {**headers, "content-type": "application/x-protobuf"}
        if compress:
            self.headers["content-encoding"] = "gzip"
        self._compressor = ThreadPoolExecutor(1, "otlp-gzip") if compress else None

    async def send(self, body: bytes) -> Reply:
        """Does not raise."""
        try:
            async with asyncio.timeout(TIMEOUT):
                body = await self._packed(body)
                try:
                    return await self._send(body)
                except (aiohttp.ServerDisconnectedError, ConnectionResetError):  # one that had idled for too long
                    return await self._send(body)
        except TimeoutError:
            return Reply(0, why=f"no reply within {TIMEOUT:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(0, why=str(error) or type(error).__name__)

    async def _packed(self, body: bytes) -> bytes:
        if self._compressor is None:
            return body
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compressor, zlib.compress, body, 1, 31)  # 31: as gzip

    async def _send(self, body: bytes) -> Reply:
        async with self.session.post(self.url, data=body, headers=self.headers, allow_redirects=False) as reply:
            text = b""
            with suppress(aiohttp.ClientError, TimeoutError):  # it was taken, whatever becomes of the rest
                async with asyncio.timeout(1.0):
                    text = await reply.content.read(MAX_REPLY)
            return Reply(reply.status, text, asked(reply.headers.get("retry-after")), f"status {reply.status}")

    def close(self) -> None:
        if self._compressor is not None:
            self._compressor.shutdown(wait=False)


def asked(retry_after: str | None) -> float | None:
    """Seconds. Its other form, a date, is the collector's clock against ours: we wait as we would without it."""
    if retry_after is None or not retry_after.isascii() or not retry_after.replace(".", "", 1).isdigit():
        return None
    return min(float(retry_after), LONGEST_ASKED)


class State:
    """Whether the collector takes something: a line in the log for each change. `what`: spans, metrics."""

    def __init__(self, what: str, url: str) -> None:
        self.what, self.url = what, url
        self.failing = False
        self._lost = 0.0

    def fails(self, why: str, lost: float) -> None:
        if not self.failing:
            self._lost = lost
            log.warning("the collector at %s does not take %s: %s", self.url, self.what, _plain(why))
        self.failing = True

    def works(self, lost: float) -> None:
        if self.failing:
            log.info("the collector at %s takes %s again; %d were lost", self.url, self.what, lost - self._lost)
        self.failing = False


def _plain(text: str) -> str:
    """One line of the log, whatever a collector says."""
    return "".join(c if c.isprintable() else " " for c in text[:200])


class Batch(NamedTuple):
    body: bytes
    spans: int


class SpanQueue:
    """Spans on their way. `put` never waits; `run` is the task that sends. `rejected`: reads how many spans of a batch
    the collector did not want, and why, from its reply."""

    def __init__(self, post: Post, rejected: Callable[[bytes], tuple[int, str]]) -> None:
        self.post, self.rejected = post, rejected
        self.exported = self.lost = 0  # spans
        self.state = State("spans", post.url)
        self._waiting: deque[Batch] = deque()
        self._bytes = self._spans = 0  # that wait or are under way
        self._wait = FIRST_WAIT
        self._filled, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        return self._bytes >= QUEUE

    def put(self, body: bytes, spans: int) -> None:
        """Whole requests of the protocol."""
        self._waiting.append(Batch(body, spans))
        self._bytes += len(body)
        self._spans += spans
        if self._bytes >= BATCH:
            self._filled.set()

    def lose(self, spans: int) -> None:
        """Those that were never put."""
        self.lost += spans

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """One more try for all that waits, within CLOSING s."""
        if self._task is None:
            return
        self._closing.set()
        self._filled.set()
        await asyncio.wait([self._task], timeout=CLOSING)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._spans:
            log.warning("%d spans were not sent before the end", self._spans)
        self.lost += self._spans
        self._spans = 0

    async def _run(self) -> None:
        while not self._closing.is_set() or self._waiting:
            await _until(self._filled, LINGER)
            batch = self._next()
            if batch.spans:
                await self._deliver(batch)

    def _next(self) -> Batch:
        """As many as are sent at once."""
        taken: list[Batch] = []
        size = 0
        while self._waiting and size < BATCH:
            taken.append(self._waiting.popleft())
            size += len(taken[-1].body)
        if self._bytes - size < BATCH and not self._closing.is_set():
            self._filled.clear()
        return Batch(b"".join([each.body for each in taken]), sum(each.spans for each in taken))

    async def _deliver(self, batch: Batch) -> None:
        reply = Reply(0)
        for _ in range(TRIES):
            reply = await self.post.send(batch.body)
            if reply.taken:
                return self._taken(batch, reply)
            self.state.fails(reply.why, self.lost)
            if not reply.later or self._closing.is_set():
                break
            await _until(self._closing, reply.wait if reply.wait is not None else self._next_wait())
        return self._settle(batch, batch.spans)

    def _next_wait(self) -> float:
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return wait * uniform(0.8, 1.2)

    def _taken(self, batch: Batch, reply: Reply) -> None:
        self._wait = FIRST_WAIT
        count, why = self.rejected(reply.body)
        count = min(max(count, 0), batch.spans)
        if count:
            self.state.fails(f"it rejected {count} of {batch.spans}: {why}", self.lost)
        self._settle(batch, count)
        if not count:
            self.state.works(self.lost)

    def _settle(self, batch: Batch, lost: int) -> None:
        self.lost += lost
        self.exported += batch.spans - lost
        self._bytes -= len(batch.body)
        self._spans -= batch.spans


class Reports:
    """Something that is told every so often, whole each time: what did not arrive is in the next one."""

    def __init__(self, post: Post, what: str, interval: float, report: Callable[[], Awaitable[bytes]]) -> None:
        self.post, self.interval, self.report = post, interval, report
        self.state = State(what, post.url)
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """The last report, within CLOSING s."""
        if self._task is not None:
            self._closing.set()
            await asyncio.wait([self._task], timeout=CLOSING)
            self._task.cancel()

    async def _run(self) -> None:
        while not self._closing.is_set():
            await _until(self._closing, self.interval)
            reply = await self.post.send(await self.report())
            if reply.taken:
                self.state.works(0)
            else:
                self.state.fails(reply.why, 0)


async def _until(event: asyncio.Event, at_most: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most):
            await event.wait()
