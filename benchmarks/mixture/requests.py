"""The requests of `benchmarks.mixed`: every way that one can end, and what its caller sees of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gateway.observe.record import RequestOutcome

KEY, UNKNOWN = "sk-mixed", "sk-nobody"
LONG = 400  # tokens: nobody who leaves has had them all
PATIENCE = 60.0  # s for an answer
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True)
class Kind:
    """One kind of request. `leaves`: its caller does, `early` (before the first token) or `late` (after it)."""

    name: str
    weight: int
    route: str = "good"
    stream: bool = True
    tokens: int = 8
    leaves: str = ""
    key: str = KEY
    body: bytes | None = None  # in place of a chat


LONG_PROMPT = json.dumps({"model": "good", "messages": [{"role": "user", "content": "x " * 40_000}]}).encode()
KINDS = (
    Kind("streams", 30),
    Kind("whole answers", 15, stream=False),
    Kind("failed primaries", 12, "flaky"),
    Kind("failed primaries, whole", 4, "flaky", stream=False),
    Kind("late primaries", 8, "stalling", tokens=4),
    Kind("shed", 6, "impossible"),
    Kind("left before the first token", 5, tokens=LONG, leaves="early"),
    Kind("left before a whole answer", 3, stream=False, tokens=LONG, leaves="early"),
    Kind("left after the first token", 5, tokens=LONG, leaves="late"),
    Kind("cut by the backend", 3, "cut"),
    Kind("broken by the backend's error", 3, "erring"),
    Kind("short, from those that break off", 8, "cut", tokens=2),
    Kind("short, from those that err", 8, "erring", tokens=2),
    Kind("every attempt fails", 2, "failing"),
    Kind("bad JSON", 1, body=b'{"model":"good","messages":['),
    Kind("unknown model", 1, "nobody"),
    Kind("unknown key", 1, key=UNKNOWN),
    Kind("a long prompt", 1, body=LONG_PROMPT),
)


@dataclass
class Asked:
    """One request and what became of it, as its caller saw it."""

    id: str
    kind: Kind
    seen: str = ""  # completed | broke | refused | shed | unavailable | failed | left
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


# What the Record may say of what a caller saw. 429 and 503 are also a backend's own, when all have said so.
MEANT: Mapping[str, frozenset[RequestOutcome]] = {
    "completed": frozenset({RequestOutcome.COMPLETED}),
    "broke": frozenset({RequestOutcome.UPSTREAM_BROKE}),
    "refused": frozenset({RequestOutcome.REFUSED}),
    "shed": frozenset({RequestOutcome.SHED, RequestOutcome.FAILED}),
    "unavailable": frozenset({RequestOutcome.UNAVAILABLE, RequestOutcome.FAILED, RequestOutcome.SHED}),
    "failed": frozenset({RequestOutcome.FAILED}),
    "left": frozenset({RequestOutcome.CLIENT_GONE}),
}


def request(asked: Asked, random: Random) -> bytes:
    kind = asked.kind
    words = " ".join(str(random.randrange(1000)) for _ in range(random.randrange(5, 60)))
    plain: dict[str, Any] = {
        "model": kind.route,
        "stream": kind.stream,
        "max_tokens": kind.tokens,
        "ignore_eos": kind.tokens == LONG,
        "messages": [{"role": "user", "content": words}],
    }
    body = json.dumps(plain).encode() if kind.body is None else kind.body
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: mixed\r\nconnection: close\r\n"
        f"authorization: Bearer {kind.key}\r\nx-request-id: {asked.id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, asked: Asked, random: Random) -> None:
    """To the end of its answer, or of its caller's patience. Raises what nobody should see."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(request(asked, random))
            if asked.kind.leaves == "early":
                await asyncio.sleep(random.choice((0.0, 0.001, 0.005)))
                asked.seen = "left"
                return
            said = await reader.readuntil(b"\r\n\r\n")
            _read_head(asked, said)
            if asked.kind.leaves == "late" and asked.status == 200:
                await reader.readuntil(b"\n\n")
                asked.seen = "left"
                return
            asked.seen = _judged(asked, await _body(reader))
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _body(reader: asyncio.StreamReader) -> bytes:
    said = b""
    with suppress(ConnectionError):  # cut short: what came is judged
        while more := await reader.read(65536):
            said += more
    return said


def _read_head(asked: Asked, head: bytes) -> None:
    first, *lines = head.decode("latin-1").split("\r\n")
    asked.status = int(first.split()[1])
    asked.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _judged(asked: Asked, body: bytes) -> str:
    if asked.status == 200:
        return _answer(asked, body)
    error = json.loads(body)["error"]
    assert error["message"]
    assert error["type"]
    return {429: "shed", 503: "unavailable"}.get(asked.status, "refused" if asked.status < 500 else "failed")


def _answer(asked: Asked, body: bytes) -> str:
    if "transfer-encoding" in asked.headers:
        whole = body.endswith(LAST_CHUNK)
        return "completed" if whole and b"data: [DONE]" in body and b'"error"' not in body else "broke"
    if len(body) < int(asked.headers["content-length"]):
        return "broke"
    return "completed" if json.loads(body).get("choices") else "broke"
