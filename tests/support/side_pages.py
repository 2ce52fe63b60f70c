"""Engines whose pages of load and health fail in every way, while they answer their callers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from tests.support.builders import STREAMED
from tests.support.certificates import Certificates
from tests.support.upstream import CLOSE, HANG, RESET, Received, Script, Upstream, reply

METRICS, HEALTH, MODELS = "/metrics", "/health", "/v1/models"
ENDLESS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n"
OTHER_PRODUCT = b'# TYPE up gauge\nup 1\nnode_load1 0.5\nhttp_requests_total{code="200"} 17\n'
PAGE = b'vllm:num_requests_running{engine="0",model_name="served"} %d.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
IDLE: Script = [reply(PAGE % 0)]
TLS_FAULT = "TLS"
FAULTS: dict[str, Script] = {
    "404": [reply(b"", "404 Not Found")],
    "500": [reply(b"oops", "500 Internal Server Error")],
    "503": [reply(b"", "503 Service Unavailable")],
    "hang": [HANG],
    "garbage": [b"\x00\xff not HTTP\r\n\r\n", HANG],
    TLS_FAULT: IDLE,
    "unreadable text": [reply(b"\xff\x00{}\n" * 500)],
    "401": [reply(b"", "401 Unauthorized")],
    "redirect": [reply(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/metrics")],
    "huge": [reply(b"# " + b"x" * (3 << 20) + b"\n")],
    "endless": [ENDLESS, HANG],
    "another product": [reply(OTHER_PRODUCT)],
    "reset": [RESET],
    "closed": [CLOSE],
    "cut off": [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nvllm:"],
}


class SidedEngine(Upstream):
    """Answers callers. `pages`: those that fail by `fault`; the rest are well."""

    def __init__(self, fault: str = "", pages: Collection[str] = (METRICS,), tls: ssl.SSLContext | None = None) -> None:
        super().__init__([], tls=tls)
        self.fault, self.pages = fault, pages
        self.running = 0  # by its page
        self.handshakes = 0  # that were refused
        self.refusing = fault == TLS_FAULT

    @property
    def asked(self) -> int:
        """Polls so far."""
        return self.handshakes + sum(each.method == "GET" for each in self.requests)

    @property
    def served(self) -> int:
        """Callers' requests so far."""
        return sum(each.method == "POST" for each in self.requests)

    def script(self, received: Received) -> Script:
        if received.method == "POST":
            return [STREAMED]
        if received.target in self.pages and self.fault:
            return FAULTS[self.fault]
        return [reply(PAGE % self.running)] if received.target == METRICS else [reply(b"{}")]


@asynccontextmanager
async def sided(fault: str, made: Certificates, pages: Collection[str] = (METRICS,)) -> AsyncIterator[SidedEngine]:
    """A started engine; with TLS, its handshakes fail until `refusing` is taken back."""
    tls = made.serving() if fault == TLS_FAULT else None
    engine = SidedEngine(fault, pages, tls)
    if tls is not None:

        def judge(connection: object, name: str | None, context: ssl.SSLContext) -> int | None:
            engine.handshakes += engine.refusing
            return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE if engine.refusing else None

        tls.sni_callback = judge
    async with engine:
        yield engine
