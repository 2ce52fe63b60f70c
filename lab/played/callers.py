"""Callers of a gateway: raw HTTP, a connection for each request, so that a caller costs little.

Rules:
- Open loop: a request is sent at its time, whatever became of those before; a turn that follows another one comes its
  think time after the end of that. Times count from the time at which a request is due, not from the sending.
- A refused caller comes back as often as the scenario says, when the reply says.
- The TPOT is that of the content: the end of an answer is its last event with content.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lab.live.trace_prompts import TracePrompts
from lab.replay.player import followers
from lab.replay.results import ReplayOutcome, RequestResult, Results
from lab.traffic.traces import Arrival

CONTENT = re.compile(rb'"(?:content|reasoning|reasoning_content|text)": ?"[^"]')
OUTPUT = re.compile(rb'"completion_tokens": ?(\d+)')
DONE = b"data: [DONE]"
RETRY_AFTER = re.compile(rb"\r\nretry-after: ?(\d+)", re.IGNORECASE)
REFUSALS = (429, 503, 529)
READ = 1 << 16  # bytes
FALLBACK_WAIT = 1.0  # s before a refused caller comes back, where the reply names no time


@dataclass(slots=True)
class Reply:
    """`first`, `last`: monotonic times of the first and the last read with content; None: there was none."""

    status: int = 0
    first: float | None = None
    last: float | None = None
    output: int | None = None
    is_complete: bool = False
    retry_after: float = FALLBACK_WAIT


class Callers:
    """`results`: gets each request when it arrives. `returns`: times that a refused caller comes back. `zero`: clock at
    which the arrivals begin, s; `latest`: s that a request was sent after it was due, at most."""

    def __init__(self, url: str, arrivals: Sequence[Arrival], results: Results, seed: int, returns: int = 0) -> None:
        self.zero = self.latest = 0.0
        self._address = urlsplit(url)
        self._arrivals = arrivals
        self._results = results
        self._followers = followers(arrivals)
        self._returns = returns
        self._prompts = TracePrompts(arrivals[0].block, seed)
        self._going: set[asyncio.Task[None]] = set()

    async def play(self, drain: float) -> None:
        """Until the last answer, or `drain` s after the end of the offered traffic."""
        self.zero = monotonic()
        for number, arrival in enumerate(self._arrivals, 1):
            if not arrival.follows:
                await asyncio.sleep(max(self.zero + arrival.at - monotonic(), 0.0))
                self._begin(number, arrival.at)
        end = self.zero + self._results.seconds + drain
        while self._going and monotonic() < end:
            await asyncio.wait(self._going, timeout=end - monotonic(), return_when=asyncio.FIRST_COMPLETED)
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)

    @property
    def _now(self) -> float:
        return monotonic() - self.zero

    def _begin(self, number: int, due: float) -> None:
        arrival = self._arrivals[number - 1]
        sizes = arrival.prompt_tokens, arrival.output_tokens
        result = RequestResult(number, arrival.route, due, *sizes, session=arrival.session, stream=arrival.stream)
        result.new_tokens = self._results.new_tokens(arrival)
        self._results.requests.append(result)
        task = asyncio.create_task(self._call(arrival, result))
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def _call(self, arrival: Arrival, result: RequestResult) -> None:
        raw = self._raw(arrival, result.number)
        reply = await self._reply(raw, result.arrived)
        while reply.status in REFUSALS and len(result.refusals) < self._returns:
            result.refusals.append(self._now - (result.returned_at or result.arrived))
            await asyncio.sleep(reply.retry_after)
            result.returned_at = self._now
            reply = await self._reply(raw, result.returned_at)
        self._note(result, reply)
        await self._follow(result.number)

    async def _reply(self, raw: bytes, due: float) -> Reply:
        self.latest = max(self.latest, self._now - due)
        reply = Reply()
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._ask(raw, reply)
        return reply

    async def _follow(self, number: int) -> None:
        """The next turn of the session, if there is one in time."""
        if (follower := self._followers.get(number)) is not None:
            turn = self._arrivals[follower - 1]
            if turn.logged or self._now + turn.think < self._results.seconds:
                await asyncio.sleep(turn.think)
                self._begin(follower, self._now)

    def _raw(self, arrival: Arrival, number: int) -> bytes:
        """A request whose answer has the length of the trace."""
        tokens = arrival.output_tokens
        body: dict[str, Any] = {"model": arrival.route, **self._prompts.body(arrival), "stream": arrival.stream}
        body |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
        if arrival.stream:
            body["stream_options"] = {"include_usage": True}
        raw = msgspec.json.encode(body)
        headers = {"host": self._address.netloc, "connection": "close", "content-type": "application/json"}
        headers |= {"content-length": str(len(raw)), "x-request-id": request_id(number)}
        head = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(head).encode() + raw

    async def _ask(self, raw: bytes, reply: Reply) -> None:
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            reply.status = int(head.split(maxsplit=2)[1])
            if (found := RETRY_AFTER.search(head)) is not None:
                reply.retry_after = float(found[1])
            await _read(reader, reply)
        finally:
            writer.close()

    def _note(self, result: RequestResult, reply: Reply) -> None:
        result.ended_at = self._now
        result.output_tokens = reply.output or result.output_tokens
        if reply.first is not None and reply.last is not None:
            result.first_at, result.ended_at = reply.first - self.zero, reply.last - self.zero
            is_whole = reply.is_complete or not result.stream
            result.end = ReplayOutcome.COMPLETED if is_whole else ReplayOutcome.BROKEN
        else:
            result.end = ReplayOutcome.SHED if reply.status in REFUSALS else ReplayOutcome.LOST


def request_id(number: int) -> str:
    return f"played-{number}"


async def _read(reader: asyncio.StreamReader, reply: Reply) -> None:
    """To the end of the connection."""
    kept = b""
    while data := await reader.read(READ):
        kept += data
        if reply.status == 200 and CONTENT.search(kept):
            reply.last = monotonic()
            reply.first = reply.first or reply.last
        if (found := OUTPUT.search(kept)) is not None:
            reply.output = int(found[1])
        reply.is_complete |= DONE in kept
        kept = kept.rpartition(b"\n\n")[2]  # an event torn over two reads
