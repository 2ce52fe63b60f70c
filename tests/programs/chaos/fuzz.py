"""`python -m tests.programs.chaos.fuzz [CASES]`: random input against a gateway in this process.

Three properties, a third of the cases each:

    raw bytes   any bytes on the data port get no 5xx and no hang, and nothing reaches a backend but valid requests
    bodies      bodies generated from docs/openapi.json, valid and broken, get answers in the right dialect, never 5xx
    chunking    a stream reaches the caller byte for byte, for any cut into chunks and reads
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from backends.interface import Operation
from gateway.app import Gateway
from tests.programs.chaos.callers import ask, post
from tests.support.builders import DONE, FINISH, TOKEN
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, chunk, reply

OPENAPI = Path(__file__).parents[3] / "docs" / "openapi.json"
SILENCE = 0.01  # s after which an incomplete request is ended
PATIENCE = 10.0  # s: a hang
VALID = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
JSON = "content-type: application/json"
WHOLE = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'


@dataclass
class Findings:
    """`statuses` by property; `failures`: a line each."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.statuses.items()))


# --------------------------------------------------------------------------- strategies

VALID_REQUESTS = st.sampled_from(
    [
        post(json.dumps(VALID).encode()),
        post(json.dumps({**VALID, "stream": True}).encode()),
        post(json.dumps({"model": "chat", "prompt": "x"}).encode(), path="/v1/completions"),
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\n{}\n\r\n0\r\n\r\n",
    ]
)
PATHS = [operation.value for operation in Operation]
OPENAIS, ANTHROPICS = {"message", "type", "param", "code"}, {"type", "message"}  # members of an error
HEADERS = st.sampled_from(
    b"content-length transfer-encoding host connection expect x-slo-ttft-ms authorization content-encoding"
    b" x-request-id traceparent x-priority upgrade trailer te".split()
)
VALUES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"chunked", b"0", b"-1", b"99999999999999", b"close", b"100-continue", b"websocket", b"nan", b"1e308"]
    ),
)


@st.composite
def mutated(draw: Callable[..., Any]) -> bytes:
    """A valid request with bytes replaced, inserted, removed or repeated."""
    raw = bytearray(draw(VALID_REQUESTS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        to = draw(st.integers(at, min(len(raw), at + 20)))
        raw[at:to] = draw(st.one_of(st.binary(max_size=20), st.just(bytes(raw[at:to]) * 2)))
    return bytes(raw)


@st.composite
def with_headers(draw: Callable[..., Any]) -> bytes:
    """A valid request with additional headers."""
    line, _, rest = draw(VALID_REQUESTS).partition(b"\r\n")
    more = draw(st.lists(st.tuples(HEADERS, VALUES), max_size=4))
    return bytes(line + b"\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in more) + rest)


RAW = st.one_of(mutated(), with_headers(), st.binary(max_size=300))
TEXTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters='"\\'), min_size=1, max_size=20), min_size=1, max_size=6
)
CUTS = st.lists(st.integers(1, 400), max_size=12)


def bodies() -> st.SearchStrategy[Any]:
    """Bodies of all operations, valid and broken, by the OpenAPI document."""
    schema = schemathesis.openapi.from_path(OPENAPI)
    operations = [schema[operation.value]["POST"] for operation in Operation]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return st.one_of([each.as_strategy(generation_mode=mode) for each in operations for mode in modes])


class Responder:
    """Backend with an answer to every request, streamed on demand. `pieces`: writes of the next streams, if set."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []  # target and body
        self.pieces: list[bytes] = []
        self.url = ""

    async def __aenter__(self) -> Responder:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                self.requests.append((head.split()[1], body))
                for piece in self.pieces if json.loads(body).get("stream") else [reply(WHOLE, "200 OK", JSON)]:
                    writer.write(piece)
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


# --------------------------------------------------------------------------- properties


class Fuzzer:
    """A gateway before an upstream, driven by hypothesis case by case."""

    def __init__(self, gateway: Gateway, upstream: Responder, findings: Findings) -> None:
        self.upstream, self.findings = upstream, findings
        self.sent = self.received = 0  # requests by raw bytes, at most; at the backend
        self.port = int(gateway.url.rpartition(":")[2])

    async def raw_bytes(self, raw: bytes) -> None:
        answer = await self._exchange(raw, eof=True)
        statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        self.findings.statuses[f"raw {statuses[0] if statuses else 'closed'}"] += 1
        assert all(status < 500 for status in statuses), f"{statuses} for {raw!r}"
        for target, body in self.upstream.requests:
            assert target in PATHS, f"{target} upstream for {raw!r}"
            assert isinstance(json.loads(body)["model"], str), f"{body!r} upstream for {raw!r}"
        self.sent += raw.count(b"POST")
        self.received += len(self.upstream.requests)  # a late request may belong to an earlier case, after a disconnect
        self.upstream.requests.clear()
        assert self.received <= self.sent, f"a request too many upstream, by {raw!r}"

    async def _exchange(self, raw: bytes, *, eof: bool) -> bytes:
        """Read the whole answer. `eof`: half-close the connection once the gateway is silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            async with asyncio.timeout(PATIENCE):
                answer = await self._first(reader) if eof else b""
                if eof:
                    writer.write_eof()
                return answer + await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    async def _first(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(SILENCE):
                return await reader.read(65536)
        except TimeoutError:
            return b""

    async def body(self, case: Any) -> None:
        raw = case.body if isinstance(case.body, bytes) else json.dumps(_plain(case.body)).encode()
        status, answer = await self._post(raw, case.operation.path)
        self.findings.statuses[f"body {status}"] += 1
        assert status < 500, f"{status} for {raw!r}"
        if status >= 400:
            members = ANTHROPICS if case.operation.path.startswith("/v1/messages") else OPENAIS
            error = json.loads(answer)["error"]
            error.pop("details", None)  # an Anthropic error that names its code
            assert set(error) == members, f"{answer!r} for {raw!r}"
        self.upstream.requests.clear()

    async def _post(self, raw: bytes, path: str) -> tuple[int, bytes]:
        answer = await self._exchange(post(raw, {"connection": "close"}, path), eof=False)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head, f"no answer to {raw!r}"
        return int(head.split()[1]), body

    async def chunking(self, texts: list[str], chunks: list[int], reads: list[int]) -> None:
        events = [
            json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False) for text in texts
        ]
        body = b"".join(b"data: " + event.encode() + b"\n\n" for event in events) + FINISH + DONE
        framed = STREAM_HEAD + b"".join(map(chunk, cut(body, chunks))) + LAST_CHUNK
        self.upstream.pieces = cut(framed, reads)
        request = json.dumps({**VALID, "stream": True, "stream_options": {"include_usage": True}}).encode()
        got = await ask(self.port, request)
        self.findings.statuses[f"chunking {got.status}"] += 1
        assert got.body == body, f"{got.body!r} in place of {body!r}, chunks {chunks}, reads {reads}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, dict | list | str | int | float | bool | None) else str(value)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Pieces of these sizes, in turn; without sizes, the whole."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)] if sizes else len(data)
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


Check = Callable[..., Coroutine[Any, Any, None]]


def examine(runner: asyncio.Runner, cases: int, check: Check, findings: Findings, **strategies: Any) -> None:
    """Examine a property; a counterexample becomes a finding."""

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(**strategies)
    def holds(**values: Any) -> None:
        runner.run(check(**values))

    try:
        holds()
    except Exception as error:
        told = error.exceptions[0] if isinstance(error, ExceptionGroup) else error  # of one that came once
        findings.failures.append(f"{check.__name__}: {type(error).__name__}: {str(told)[:500]}")


def run(cases: int) -> Findings:
    """Examine all properties with `cases` cases in all. Blocks."""
    findings, each = Findings(), max(cases // 3, 1)
    with asyncio.Runner() as runner:
        upstream = runner.run(_enter(Responder()))
        context = running({"only": pool(upstream.url)}, defaults={"max_body": "64KB"}, passthrough="only")
        gateway = runner.run(_enter(context))
        upstream.pieces = [STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK]
        fuzzer = Fuzzer(gateway, upstream, findings)
        examine(runner, each, fuzzer.raw_bytes, findings, raw=RAW)
        examine(runner, each, fuzzer.body, findings, case=bodies())
        examine(runner, each, fuzzer.chunking, findings, texts=TEXTS, chunks=CUTS, reads=CUTS)
        runner.run(context.__aexit__(None, None, None))
        runner.run(upstream.__aexit__(None, None, None))
    return findings


async def _enter(context: Any) -> Any:
    return await context.__aenter__()


def main() -> int:
    logging.disable(logging.WARNING)
    found = run(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    print(found.summary)
    print("\n".join(found.failures) or "no counterexample")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
