"""Requests and fleet of `benchmarks.mixed`: every outcome of a request, and its view by the caller."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.tokenize.tokenizers import encoder
from lab.servers.drivers import Faults
from lab.servers.simulated_server import SimulatedServer

KEY, UNKNOWN = "sk-mixed", "sk-nobody"
LONG = 400  # tokens: more than a disconnecting caller receives
PATIENCE = 60.0  # s for an answer
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True)
class RequestKind:
    """One kind of request. `leaves`: the caller disconnects, `early` (before the first token) or `late` (after)."""

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
    RequestKind("streams", 30),
    RequestKind("whole answers", 15, stream=False),
    RequestKind("failed primaries", 12, "flaky"),
    RequestKind("failed primaries, whole", 4, "flaky", stream=False),
    RequestKind("late primaries", 8, "stalling", tokens=4),
    RequestKind("shed", 6, "impossible"),
    RequestKind("left before the first token", 5, tokens=LONG, leaves="early"),
    RequestKind("left before a whole answer", 3, stream=False, tokens=LONG, leaves="early"),
    RequestKind("left after the first token", 5, tokens=LONG, leaves="late"),
    RequestKind("cut by the backend", 3, "cut"),
    RequestKind("broken by the backend's error", 3, "erring"),
    RequestKind("short, from those that break off", 8, "cut", tokens=2),
    RequestKind("short, from those that err", 8, "erring", tokens=2),
    RequestKind("every attempt fails", 2, "failing"),
    RequestKind("bad JSON", 1, body=b'{"model":"good","messages":['),
    RequestKind("unknown model", 1, "nobody"),
    RequestKind("unknown key", 1, key=UNKNOWN),
    RequestKind("a long prompt", 1, body=LONG_PROMPT),
)


@dataclass
class SentRequest:
    """One request and its outcome, as seen by the caller."""

    id: str
    kind: RequestKind
    seen: str = ""  # completed | broke | refused | shed | unavailable | failed | left
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


# Outcomes in the Record by the caller's view. 429 and 503 are also a backend's own, when all backends said so.
EXPECTED_OUTCOMES: Mapping[str, frozenset[RequestOutcome]] = {
    "completed": frozenset({RequestOutcome.COMPLETED}),
    "broke": frozenset({RequestOutcome.UPSTREAM_BROKE}),
    "refused": frozenset({RequestOutcome.REFUSED}),
    "shed": frozenset({RequestOutcome.SHED, RequestOutcome.FAILED}),
    "unavailable": frozenset({RequestOutcome.UNAVAILABLE, RequestOutcome.FAILED, RequestOutcome.SHED}),
    "failed": frozenset({RequestOutcome.FAILED}),
    "left": frozenset({RequestOutcome.CLIENT_GONE}),
}


def request(asked: SentRequest, random: Random) -> bytes:
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
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"authorization: Bearer {kind.key}\r\nx-request-id: {asked.id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, asked: SentRequest, random: Random) -> None:
    """Read to the end of the answer, or of the caller's patience. Raises on impossible replies."""
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
    with suppress(ConnectionError):  # cut short: the received part is judged
        while more := await reader.read(65536):
            said += more
    return said


def _read_head(asked: SentRequest, head: bytes) -> None:
    first, *lines = head.decode("latin-1").split("\r\n")
    asked.status = int(first.split()[1])
    asked.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _judged(asked: SentRequest, body: bytes) -> str:
    if asked.status == 200:
        return _answer(asked, body)
    error = json.loads(body)["error"]
    assert error["message"]
    assert error["type"]
    return {429: "shed", 503: "unavailable"}.get(asked.status, "refused" if asked.status < 500 else "failed")


def _answer(asked: SentRequest, body: bytes) -> str:
    if "transfer-encoding" in asked.headers:
        whole = body.endswith(LAST_CHUNK)
        return "completed" if whole and b"data: [DONE]" in body and b'"error"' not in body else "broke"
    if len(body) < int(asked.headers["content-length"]):
        return "broke"
    return "completed" if json.loads(body).get("choices") else "broke"


# -- the fleet -----------------------------------------------------------------------------

WELL = Faults()
TEMPERS: dict[str, tuple[Faults, ...]] = {
    "good": (WELL, WELL),
    "flaky": (Faults(status=500, status_share=0.3), Faults(status=500, status_share=0.2)),
    "stalling": (Faults(stall_share=0.3), Faults(stall_share=0.1)),
    "cut": (Faults(cut_after_tokens=3),),
    "erring": (Faults(error_after_tokens=3),),
    "failing": (Faults(status=500),),
}
PLAIN = {"ttft": {"budget": "20s"}, "tpot": "off", "hedge": "off"}
OF_ITS_OWN: dict[str, dict[str, Any]] = {
    "stalling": {"ttft": {"budget": "500ms"}, "hedge": {"max_extra": "50%"}},
    "impossible": {"tiers": ["good"], "ttft": {"budget": "1ms"}, "on_miss": "shed"},
}


def fleet_config(urls: dict[str, list[str]], access_log: str) -> dict[str, Any]:
    pools = {name: {"backend": "simulated", "model": "served", "endpoints": found} for name, found in urls.items()}
    routes = {name: {"tiers": [name], **PLAIN} for name in pools}
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": pools,
        "routes": {**routes, **{name: {**PLAIN, **routes.get(name, {}), **own} for name, own in OF_ITS_OWN.items()}},
        "defaults": {"first_token": "5s"},
        "keys": [{"name": "mixed", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "telemetry": {"access_log": access_log},
    }


@asynccontextmanager
async def fleet(access_log: str) -> AsyncIterator[tuple[Gateway, list[SimulatedServer]]]:
    async with AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        servers = []
        for name, tempers in TEMPERS.items():
            for faults in tempers:
                server = SimulatedServer(
                    PROFILES["8b-h100"], model="served", encode=encoder("o200k_base").encode, seed=len(servers)
                )
                await server.start()
                stack.push_async_callback(server.stop)
                for fault in Faults.__struct_fields__:
                    setattr(server.faults, fault, getattr(faults, fault))
                urls.setdefault(name, []).append(server.url)
                servers.append(server)
        gateway = Gateway(Config.model_validate(fleet_config(urls, access_log)))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        yield gateway, servers
