"""Builders of test values, attempts and callers, with a default for every field that a test does not set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from time import monotonic
from typing import Any

from backends import catalog
from backends.http.connection import Exchange
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, BackendConfig, BackendRequest, Failure, Operation
from gateway.api import inference_request as ingress
from gateway.api.inference_request import InferenceRequest
from gateway.app import Gateway
from gateway.observe.columns import Note
from gateway.observe.part_notes import (
    CACHE,
    DIAGNOSIS,
    LEFT_OUT,
    ON_SCREEN,
    RESCUE,
    SHORTCOMING,
    SIGHT,
    TAGS,
)
from gateway.observe.record import UNROUTED, AnswerFacts, AskedFacts, Budgets, Placed, Record, RequestOutcome
from gateway.parts.prefix_doctor.part import LINEAGE
from gateway.upstream.attempt import BrokenOff, Milestone, WireAttempt, WireEvent
from gateway.upstream.attempt_sinks import AnswerSink, AttemptSink
from gateway.upstream.routed_request import Upstream as Target
from policies import types as facts
from policies.fleet.fleet import AttemptReport, Fleet
from policies.routes.route import Route
from policies.types import (
    Attempt,
    AttemptKind,
    AttemptOutcome,
    Candidate,
    Decision,
    Endpoint,
    Forecast,
    Placement,
    PoolEstimate,
)
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

PREAMBLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'  # noqa: E501
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n'
ANSWER = TOKEN + FINISH + DONE
STREAMED = STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK
WHOLE = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}'

POOL = facts.Pool("small", "served", (Endpoint("small/a", "small"), Endpoint("small/b", "small")))
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


# --------------------------------------------------------------------------- values


def candidate(id: str = "small/a", p50: float = 0.2, *, tokens: int = 100, hit: int = 0, **more: Any) -> Candidate:
    given = {"tier": 0, "probability": 0.95, "price": 0.0, **more}
    return Candidate(Endpoint(id, id.partition("/")[0]), prompt_tokens=tokens, hit=hit, forecast=Forecast(p50), **given)


def decided(*ranked: Candidate, deadline: float = facts.FOREVER, at: float = 0.0) -> Decision:
    return Decision(Placement.PLACE, at, deadline, ranked or (candidate(),), scorer="predicted")


def route(name: str = "chat", **more: Any) -> Route:
    return Route.model_validate({"name": name, "tiers": ["small"], **more})


def request(headers: Mapping[str, str] | None = None, **body: Any) -> InferenceRequest:
    raw = json.dumps({**CHAT, **body}).encode()
    return ingress.parse(Operation.CHAT, raw, headers or {}, 0.0, "req-1")


ORIGINS = {"asked": AskedFacts, "budgets": Budgets, "placed": Placed, "answer": AnswerFacts}
NOTES: dict[str, Note[Any]] = {
    "diagnosis": DIAGNOSIS,
    "lineage": LINEAGE,
    "escalated": SHORTCOMING,
    "rescue": RESCUE,
    "cache": CACHE,
    "tags": TAGS,
    "sight": SIGHT,
    "left_out": LEFT_OUT,
    "on_screen": ON_SCREEN,
}
FLAT = {  # short names of facts, for tests
    **{name: ("asked", name) for name in AskedFacts._fields},
    **{f"{name}_budget": ("budgets", name) for name in Budgets._fields},
    **{name: ("placed", name) for name in ("tier", "chance", "scorer", "rejected")},
    "max_tokens_lowered": ("placed", "max_tokens"),
    "prompt_tokens_estimated": ("placed", "prompt_tokens"),
    "cached_tokens_predicted": ("placed", "cached_tokens"),
    **{f"{what}_predicted_{q}": ("placed", f"{what}_{q}") for what in ("ttft", "total") for q in ("p50", "p90")},
    **{name: ("answer", name) for name in AnswerFacts._fields},
    **{f"{name}_reported": ("answer", name) for name in AnswerFacts._fields if name.endswith("_tokens")},
}


def record(**known: Any) -> Record:
    """Record of a streamed answer that met its budgets; `known` replaces facts and notes, by their own names."""
    given: dict[str, Any] = {
        "request_id": "req-1",
        "arrival": 100.0,
        "wall": 1.7e9,
        "stream": True,
        "end": RequestOutcome.COMPLETED,
        "status": 200,
        "pool": "small",
        "model": "served",
        "endpoint": "small/a",
        "ttft": 0.2,
        "ttft_budget": 0.8,
        "total": 1.0,
        "output_tokens": 10,
        **known,
    }
    own, name = given.pop("ttft_of", "any"), given.pop("route", "chat")
    more = {"ttft": {"budget": "800ms", "of": own}} if own != "any" else {}
    more |= {"total": {"budget": "5s"}} if given.pop("weighs_completion", False) else {}
    given["route"] = UNROUTED if name == "-" else _route(name, given.pop("workload", "chat"), json.dumps(more))
    given["endpoint"] = Endpoint(given["endpoint"], given.pop("pool"), given.pop("region", ""))
    facts: dict[str, dict[str, Any]] = {origin: {} for origin in ORIGINS}
    for flat in given.keys() & FLAT.keys():
        origin, fact = FLAT[flat]
        facts[origin][fact] = given.pop(flat)
    noted = {flat: given.pop(flat) for flat in given.keys() & NOTES.keys()}
    notes = tuple(each for flat, value in noted.items() for each in (NOTES[flat], value))
    made = {origin: ORIGINS[origin](**values) for origin, values in facts.items()}
    return Record(**made, notes=notes, is_judged=noted.get("cache") != "hit", **given)


@cache
def _route(name: str, workload: str, more: str) -> Route:
    return Route.model_validate({"name": name, "workload": workload, "tiers": ["small"], **json.loads(more)})


# --------------------------------------------------------------------------- attempts


class RecordingFleet(Fleet):
    """Fleet that records attempt outcomes and reports."""

    def __init__(self, *pools: facts.Pool) -> None:
        super().__init__(pools or (POOL,))
        self.endings: list[AttemptOutcome] = []
        self.reports: list[AttemptReport] = []

    def on_ended(self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport | None = None) -> None:
        self.endings.append(outcome)
        if report is not None:
            self.reports.append(report)
        super().on_ended(key, outcome, now, report)

    def loads(self) -> Mapping[str, facts.Load]:
        return self.snapshot(monotonic()).loads


class RecordingAnswer:
    """Answer to a caller that records every read."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.only = None

    def write(self, data: bytes, framed: bytes) -> None:
        self.reads.append(data)

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        self.reads.append(data)
        return None

    def replace_held(self, data: bytes) -> Failure | None:
        self.reads.append(data)
        return None


class RecordingSink(AttemptSink):
    """Records what the attempt returns, and joins an answer at the first token, like a race."""

    def __init__(self, wire: WireAttempt) -> None:
        super().__init__(wire, self._follow, lambda wire, failure: self._follow(wire, wire.on_failure(failure)))
        self.answer = RecordingAnswer()
        self.events: list[WireEvent] = []
        self.joined: AnswerSink | None = None

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        """As by the exchange, whose sink is another from the commit on."""
        if self.joined is None:
            super().on_body(data, framed)
        else:
            self.joined.on_body(data, framed)

    def _follow(self, wire: WireAttempt, event: WireEvent) -> None:
        if event is None:
            return
        self.events.append(event)
        if event is Milestone.WHOLE:
            wire.stop(AttemptOutcome.COMPLETED)
        if event is Milestone.FIRST_TOKEN:
            self.answer.body(wire.held.take())
            self._follow(wire, self.join())
            if wire.stream and wire.times.first_in is not None:
                wire.fleet.on_first_token(wire, wire.times.first_in)

    def join(self) -> WireEvent:
        self.joined = AnswerSink(self.wire, self.tell, self.lose, self.answer)
        return self.joined.join()

    @property
    def failures(self) -> list[Failure]:
        """Before the first token."""
        return [event for event in self.events if isinstance(event, Failure)]

    @property
    def breaks(self) -> list[Failure]:
        """After the first token."""
        return [event.failure for event in self.events if isinstance(event, BrokenOff)]


class RecordingExchange(Exchange):
    """Exchange without a connection that records flow control calls."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.sent_at, self.connect_seconds, self.bytes_in = monotonic(), 0.0, 0

    def pause(self) -> None:
        self.steps.append("pause")

    def resume(self) -> None:
        self.steps.append("resume")

    def rest(self, seconds: float) -> None:
        self.steps.append("rest")

    def cancel(self) -> None:
        self.steps.append("cancel")


def backend(kind: str = "vllm") -> Backend:
    return catalog.build(BackendConfig(kind, "served", "sk-backend"))


def forward(stream: bool = True, **body: Any) -> BackendRequest:
    return BackendRequest(Operation.CHAT, {**CHAT, "stream": stream, **body}, "served", stream)


def wire(fleet: Fleet, *, stream: bool = True, chosen: Candidate | None = None) -> WireAttempt:
    """An attempt registered with the fleet; the test feeds the reply bytes."""
    attempt = Attempt(1, AttemptKind.PRIMARY, chosen or candidate())
    target = Target(ConnectionPool("http://127.0.0.1:9", connect_timeout=1.0), backend(), "served")
    sent = WireAttempt(attempt, target, forward(stream), fleet)
    fleet.on_sent(sent, attempt.candidate, PoolEstimate(attempt.candidate.prompt_tokens), sent.times.opened, stream)
    return sent


# --------------------------------------------------------------------------- callers


def post(body: Mapping[str, Any] | bytes, *headers: str, version: str = "1.1", path: str = "") -> bytes:
    """An HTTP POST request as raw bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path or Operation.CHAT.value} HTTP/{version}",
        "host: localhost",
        f"content-length: {len(raw)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


class Caller:
    """A raw connection to a server: exposes the bytes on the wire without a client library's interpretation."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        self.writer.write(raw)
        return await self.head()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(30):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def whole(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request; status, headers and body of an answer with a content-length."""
        status, headers = await self.ask(raw)
        return status, headers, await self.body(headers)

    async def body(self, headers: dict[str, str]) -> bytes:
        """Body of `content-length` bytes."""
        return await self.reader.readexactly(int(headers["content-length"]))

    async def chunks(self) -> list[bytes]:
        """Chunks of an answer up to the last chunk."""
        chunks = []
        async with asyncio.timeout(30):
            while size := int(await self.reader.readline(), 16):
                chunks.append(await self.reader.readexactly(size))
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
        return chunks

    async def rest(self) -> bytes:
        """All bytes until the connection ends."""
        async with asyncio.timeout(30):
            return await self.reader.read()


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


async def stream_status(gateway: Gateway) -> int:
    """Status of a streamed answer, read to its end on a connection of its own."""
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({**CHAT, "stream": True}))
        if status == 200:
            await caller.chunks()
    return status


@asynccontextmanager
async def conversing(*scripts: Script, **more: Any) -> AsyncIterator[tuple[Gateway, Caller, Upstream]]:
    """A gateway over one scripted backend, and a connection to the gateway. `more`: configuration sections."""
    async with (
        Upstream(*scripts) as upstream,
        running({"only": pool(upstream.url)}, **more) as gateway,
        calling(gateway.url) as caller,
    ):
        yield gateway, caller, upstream


async def get(url: str, path: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Send one request without a body on a new connection; status, headers and body."""
    async with calling(url) as caller:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
        status, found = await caller.ask("\r\n".join(lines).encode() + b"\r\n\r\n")
        return status, found, await caller.rest()


def last(gateway: Gateway) -> Record:
    return gateway.recorder.recent[-1]
