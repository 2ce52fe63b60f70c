"""Rows 29 to 34: hostile bodies, framing and paths."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.e2e.test_bad_input import BODIES, FRAMING, PATHS
from tests.programs.chaos import fuzz
from tests.programs.chaos.callers import ask, ms, post, quantile
from tests.programs.chaos.lab import GatewayProcess, Lab
from tests.programs.chaos.rows import Result, row
from tests.support.builders import WHOLE
from tests.support.gateways import pool
from tests.support.upstream import Upstream, reply

MAX_BODY = 1_000_000
VALID = b'{"model":"chat","messages":[{"role":"user","content":"x"}]}'


@asynccontextmanager
async def guarded(lab: Lab) -> AsyncIterator[tuple[GatewayProcess, Upstream]]:
    """A gateway with a small limit of bodies, and the counting upstream."""
    async with Upstream([reply(WHOLE)]) as upstream:
        sections = {"defaults": {"max_body": "1MB"}}
        async with lab.gateway({"only": pool(upstream.url)}, probe={"stream": False}, **sections) as gateway:
            yield gateway, upstream


@row(
    29,
    "input",
    "fuzzing: raw bytes, bodies by the OpenAPI document, chunk boundaries",
    "no 5xx, no hang; errors in OpenAI's shape",
)
async def fuzzing(lab: Lab) -> Result:
    """`make fuzz`: hypothesis on the data port, schemathesis over docs/openapi.json, any chunking of a stream."""
    cases = lab.size(20_000, 300)
    found = await asyncio.to_thread(fuzz.run, cases)
    return Result(f"{cases} cases: {found.summary}", not found.failures, "; ".join(found.failures)[:600])


@row(30, "input", "JSON that two parsers may read differently", "4xx within 50 ms", quick=True)
async def ambiguous_json(lab: Lab) -> Result:
    """NaN, surrogates, 100,000 levels, duplicate keys, a 5,000-digit integer, UTF-16 and thirty more; each 20 times."""
    times, wrong = list[float](), list[str]()
    async with guarded(lab) as (gateway, upstream):
        for name, body in BODIES.items():
            for _ in range(lab.size(20, 2)):
                got = await ask(gateway.port, body, sent=gateway.sent)
                times.append(got.total)
                wrong += [] if 400 <= got.status < 500 else [f"{name}: {got.status} {got.ended}"]
        reached = len(upstream.requests)
    p99 = quantile(times, 0.99)
    figures = f"{len(BODIES)} bodies: {len(wrong)} not 4xx, {reached} upstream; p99 {ms(p99)}"
    return Result(figures, not wrong and not reached and (p99 <= 0.05 or lab.quick), "; ".join(wrong[:3]))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
BOMB = gzip.compress(b"x" * 50_000_000)
LARGE: dict[str, tuple[bytes, tuple[int, ...]]] = {  # raw request, and the right statuses
    "1 byte over the limit": (post(b"x" * (MAX_BODY + 1)), (413,)),
    "a content-length of 1 TB": (HEAD + b"content-length: 1000000000000\r\n\r\n", (413, 400)),
    "a length that lies": (HEAD + b"content-length: 10\r\n\r\n" + VALID, (400,)),
    "chunks of 1 byte beyond the limit": (
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1_100_000 + b"0\r\n\r\n",
        (413,),
    ),
    "a gzip bomb": (HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB) + BOMB, (415,)),
    "100 MB against the limit of 1 MB": (HEAD + b"content-length: 100000000\r\n\r\n" + b"x" * 2_000_000, (413,)),
    "a chunk extension of 64 KiB": (
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"e" * 65536 + b"\r\nhello\r\n0\r\n\r\n",
        (400, 413, 431),
    ),
}


async def raw_status(port: int, raw: bytes, patience: float = 10.0) -> int:
    """Status of the first reply; 0: closed without a reply, -1: a hang."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(patience):
            writer.write(raw)
            return int((await reader.readline() or b"x 0").split()[1])
    except TimeoutError:
        return -1
    except (OSError, ValueError):
        return 0
    finally:
        writer.transport.abort()


@row(
    31,
    "input",
    "bodies beyond the limit, lengths that lie, a gzip bomb",
    "413 or 400; memory at most +2 limits",
    quick=True,
)
async def large_bodies(lab: Lab) -> Result:
    """Seven kinds with a limit of 1 MB, each 20 times, 5 at once; memory is the peak of the process."""
    wrong = list[str]()
    async with guarded(lab) as (gateway, _):
        await ask(gateway.port, VALID, sent=gateway.sent)
        gateway.reset_peak()
        before = gateway.rss
        for name, (raw, right) in LARGE.items():
            for _ in range(lab.size(20, 4) // 4):
                statuses = await asyncio.gather(*(raw_status(gateway.port, raw) for _ in range(5)))
                wrong += [f"{name}: {status}" for status in statuses if status not in right]
        grown = (gateway.peak_rss - before) / MAX_BODY
    figures = f"{len(wrong)} wrong replies; memory +{grown:.1f} limits, for five at a time"
    return Result(figures, not wrong and grown <= 10, "; ".join(sorted(set(wrong))[:4]))


SMUGGLING = {
    **FRAMING,
    "a second request in the body": HEAD + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello" + HEAD,
    "CL.TE": HEAD + b"content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nG",
    "TE.CL": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n12\r\nGPOST / HTTP/1.1\r\n\r\n0\r\n\r\n",
    "TE with a space": HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "TE obfuscated": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "TE with a vertical tab": HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a bare LF": b"POST /v1/chat/completions HTTP/1.1\nhost: localhost\ncontent-length: 0\n\n",
    "a bare CR": b"POST /v1/chat/completions HTTP/1.1\rhost: localhost\r\r",
    "a folded header": HEAD + b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "two hosts": b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 2\r\n\r\n{}",
    "a length in hex": HEAD + b"content-length: 0x10\r\n\r\n" + b"x" * 16,
    "a length list": HEAD + b"content-length: 5, 5\r\n\r\nhello",
    "a trailer": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 50\r\n\r\n",
    "an overlong chunk size": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 70 + b"5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a sign": HEAD + b"transfer-encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
}


@row(32, "input", "ambiguous framing", "the backend sees no request that was not meant", quick=True)
async def framing(lab: Lab) -> Result:
    """Thirty requests framed differently by parsers, each followed by a valid request on the same connection."""
    wrong = list[str]()
    async with guarded(lab) as (gateway, upstream):
        for name, raw in SMUGGLING.items():
            before = len(upstream.requests)
            status = await raw_status(gateway.port, raw + post(VALID))
            await asyncio.sleep(0.05)
            seen = len(upstream.requests) - before
            wrong += [f"{name}: {status}"] if status >= 500 or status == -1 else []
            wrong += [f"{name}: {seen} upstream"] if seen > 1 else []
    figures = f"{len(SMUGGLING)} requests: {len(wrong)} wrong"
    note = "In front of one parser; uvicorn, nginx and HAProxy as backends are not tried."
    return Result(figures, not wrong, "; ".join(wrong[:4]) or note)


@row(33, "input", "paths", "404 or 400, never upstream", quick=True)
async def paths(lab: Lab) -> Result:
    """//, %2e%2e, /invocations, absolute forms and the paths of the admin port, with GET and POST."""
    wrong = list[str]()
    async with guarded(lab) as (gateway, upstream):
        for path in PATHS:
            for raw in (post(VALID, path=path), f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()):
                status = await raw_status(gateway.port, raw)
                wrong += [] if status in (400, 404) else [f"{path}: {status}"]
        reached = len(upstream.requests)
    return Result(
        f"{2 * len(PATHS)} requests: {len(wrong)} answered, {reached} upstream",
        not wrong and not reached,
        "; ".join(wrong[:4]),
    )
