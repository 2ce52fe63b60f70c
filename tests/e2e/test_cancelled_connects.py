"""An attempt that ends while connecting writes nothing to the backend: no prompt is computed or billed in vain."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.http import connection_pool
from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from tests.support import gateways
from tests.support.simulated import eventually
from tests.support.upstream import STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

PROMPT = "the prompt that nobody waits for"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = STREAM_HEAD + chunk(TOKEN) + b"0\r\n\r\n"


class SlowListener:
    """A listening socket that lets connections wait until `accept`: in the TLS handshake, or in the SYN queue."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(0 if tls is None else 64)
        self.sock.setblocking(False)
        self.port = self.sock.getsockname()[1]
        self.received = b""
        self.accepted = 0
        self.fillers: list[socket.socket] = []
        if tls is None:  # a full backlog: the kernel drops the SYN of the next connection, and the client repeats it
            self.fillers.append(socket.create_connection(("127.0.0.1", self.port)))

    async def accept(self, seconds: float) -> None:
        """Accept and read everything for `seconds`."""
        server = await asyncio.start_server(self._read, sock=self.sock, ssl=self.tls)
        for filler in self.fillers:
            filler.close()
        await asyncio.sleep(seconds)
        server.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            while data := await reader.read(65536):
                self.received += data
        except ConnectionError:
            pass
        writer.close()


@pytest.fixture
def server_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """TLS of a server with a certificate trusted by the gateway."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(connection_pool, "_default_tls", lambda: trusted)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@asynccontextmanager
async def caller(gateway: Gateway) -> AsyncIterator[asyncio.StreamWriter]:
    """A caller with a sent request."""
    body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    yield writer
    writer.transport.abort()


async def connecting(gateway: Gateway) -> None:
    """Wait until an attempt connects."""
    await eventually(lambda: any(load.in_flight for load in gateway.monitor.loads().values()))
    await asyncio.sleep(0.05)


async def test_a_caller_that_leaves_before_the_backend_accepts_sends_no_byte() -> None:
    """The SYN waits in a full backlog while the caller leaves; then the backend accepts all connections."""
    slow = SlowListener()
    async with gateways.running({"only": gateways.pool(f"http://127.0.0.1:{slow.port}")}) as gateway:
        async with caller(gateway):
            await connecting(gateway)
        await eventually(lambda: gateway.recorder.recent)
        assert gateway.recorder.recent[0].end is RequestOutcome.CLIENT_GONE
        await slow.accept(1.6)  # the kernel repeats a SYN after 1 s
    assert slow.accepted >= 1
    assert slow.received == b""


async def test_a_caller_that_leaves_during_the_handshake_sends_no_byte(server_tls: ssl.SSLContext) -> None:
    """The backend's TLS handshake is delayed until the caller has left."""
    slow = SlowListener(server_tls)
    async with gateways.running({"only": gateways.pool(f"https://localhost:{slow.port}")}) as gateway:
        async with caller(gateway):
            await connecting(gateway)
        await eventually(lambda: gateway.recorder.recent)
        await slow.accept(0.3)
        assert (slow.received, gateway.proxy.dispatcher.tasks) == (b"", set())


async def test_the_handshake_of_a_caller_that_stays_carries_the_prompt(server_tls: ssl.SSLContext) -> None:
    """Control: the same listener receives the prompt of a waiting caller."""
    slow = SlowListener(server_tls)
    async with gateways.running({"only": gateways.pool(f"https://localhost:{slow.port}")}) as gateway, caller(gateway):
        await connecting(gateway)
        await slow.accept(0.3)
    assert PROMPT.encode() in slow.received


async def test_a_losing_attempt_that_is_still_connecting_sends_no_byte(server_tls: ssl.SSLContext) -> None:
    """A hedge wins during the TLS handshake of the first attempt."""
    slow = SlowListener(server_tls)
    async with Upstream([ANSWER]) as quick:
        pools = {
            "first": gateways.pool(f"https://localhost:{slow.port}"),
            "second": gateways.pool(quick.url),
        }
        routes = {"chat": {"tiers": ["first", "second"], "ttft": {"budget": "1s"}, "hedge": {"max_extra": "100%"}}}
        async with gateways.running(pools, routes) as gateway, caller(gateway):
            await eventually(lambda: gateway.recorder.recent)
            (record,) = gateway.recorder.recent
            assert (record.end, record.endpoint.pool) == (RequestOutcome.COMPLETED, "second")
            await slow.accept(0.3)
            assert slow.received == b""
