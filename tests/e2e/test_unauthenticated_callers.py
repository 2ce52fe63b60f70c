"""A caller without a key, and a web page in a developer's browser: refused by the head alone, in bounded memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gateway.app import Gateway
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

ANSWER = [reply(b'{"choices":[{"message":{"content":"hi"}}]}', "200 OK", "content-type: application/json")]
BODY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()
KEYS = [{"name": "app", "sha256": hashlib.sha256(b"right").hexdigest()}]
PATH = "/v1/chat/completions"


def head(path: str = PATH, *headers: str, method: str = "POST", host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"host: {host}", *headers, "", ""]).encode()


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def gateway_before(upstream: Upstream, **more: object) -> AsyncIterator[Gateway]:
    async with running({"only": pool(upstream.url)}, **more) as gateway:
        yield gateway


async def first_reply(at: int, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; the caller sends nothing after `raw` and waits at most 10 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at)
    try:
        async with asyncio.timeout(10):
            writer.write(raw)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
            return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


# --------------------------------------------------------------------------- before the body


LARGE = "content-length: 30000000"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("/nowhere", LARGE), 404),
        (head("/v1/models", LARGE, "authorization: Bearer right"), 405),
        (head(PATH, LARGE, method="PUT"), 405),
        (head(PATH, LARGE), 401),
        (head(PATH, LARGE, "authorization: Bearer wrong"), 401),
        (head(PATH, "transfer-encoding: chunked"), 401),
        (head("/nowhere", "transfer-encoding: chunked"), 404),
    ],
    ids=["path", "method of a GET", "method", "no key", "wrong key", "chunked, no key", "chunked, path"],
)
async def test_a_request_without_right_is_refused_before_its_body(raw: bytes, status: int) -> None:
    async with Upstream(ANSWER) as upstream, gateway_before(upstream, keys=KEYS) as gateway:
        assert (await first_reply(port(gateway.url), raw))[0] == status
        assert not upstream.requests


async def test_the_bytes_of_all_bodies_are_bounded() -> None:
    """With the bound reached the next large body is 503 with retry-after, and small requests still pass."""
    limits = {"server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "max_body_bytes": "4MB"}}
    async with Upstream(ANSWER) as upstream, gateway_before(upstream, **limits) as gateway:
        writers = []
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port(gateway.url))
            writer.write(head(PATH, "content-length: 1500000") + b"a" * 1_000_000)
            await writer.drain()
            writers.append(writer)
        await eventually(lambda: gateway.core.intake.body_bytes == 3_000_000)
        status, headers, _ = await first_reply(port(gateway.url), head(PATH, "content-length: 1500000"))
        assert status == 503
        assert float(headers["retry-after"]) > 0
        small = head(PATH, f"content-length: {len(BODY)}") + BODY
        assert (await first_reply(port(gateway.url), small))[0] == 200
        for writer in writers:
            writer.transport.abort()
        await eventually(lambda: gateway.core.intake.body_bytes == 0)
        raw = head(PATH, "content-length: 1500000") + b"a" * 1_500_000
        assert (await first_reply(port(gateway.url), raw))[0] == 400, "the bytes of callers that left are given back"


async def test_connections_are_bounded() -> None:
    """A connection above the bound is answered 503 and closed; one that ends makes room."""
    limits = {"server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "max_connections": 3}}
    async with Upstream(ANSWER) as upstream, gateway_before(upstream, **limits) as gateway:
        idle = [await asyncio.open_connection("127.0.0.1", port(gateway.url)) for _ in range(3)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port(gateway.url))
        writer.write(head("/health", method="GET"))
        async with asyncio.timeout(10):
            refused = await reader.read(-1)
        writer.close()
        assert refused.startswith(b"HTTP/1.1 503 ")
        idle[0][1].close()
        await asyncio.sleep(0.05)
        assert (await first_reply(port(gateway.url), head("/health", method="GET")))[0] == 200
        for _, each in idle[1:]:
            each.close()


# --------------------------------------------------------------------------- pages of other origins


FOREIGN = ["origin: http://evil.example"]
JSON_TYPE = "content-type: application/json"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "192.168.0.7", "localhost.evil.example"])
async def test_without_keys_a_foreign_host_is_refused_on_both_ports(host: str) -> None:
    """DNS rebinding makes a page's own host name resolve to this machine."""
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        raw = head(PATH, f"content-length: {len(BODY)}", host=host) + BODY
        assert (await first_reply(port(gateway.url), raw))[0] == 403
        assert (await first_reply(port(gateway.admin_url), head("/config", method="GET", host=host)))[0] == 403
        assert not upstream.requests


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:8080", "[::1]:8080", "127.1.2.3"])
async def test_without_keys_a_loopback_host_is_served(host: str) -> None:
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        raw = head(PATH, f"content-length: {len(BODY)}", host=host) + BODY
        assert (await first_reply(port(gateway.url), raw))[0] == 200
        assert (await first_reply(port(gateway.admin_url), head("/config", method="GET", host=host)))[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example"])
async def test_without_keys_a_foreign_origin_is_refused_on_both_ports(origin: str) -> None:
    """A browser sends Origin with every cross-site POST, `text/plain` ones without a preflight."""
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        extra = [f"origin: {origin}", "content-type: text/plain", f"content-length: {len(BODY)}"]
        assert (await first_reply(port(gateway.url), head(PATH, *extra) + BODY))[0] == 403
        reload = head("/reload", f"origin: {origin}", "content-length: 0")
        assert (await first_reply(port(gateway.admin_url), reload))[0] == 403
        assert not upstream.requests


async def test_the_dashboards_own_origin_is_served() -> None:
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        at = port(gateway.admin_url)
        raw = head("/explain", f"origin: http://127.0.0.1:{at}", f"content-length: {len(BODY)}", JSON_TYPE) + BODY
        assert (await first_reply(at, raw))[0] == 200


async def test_with_keys_any_host_and_origin_is_served() -> None:
    """A key is not sent by a browser on its own, so the key is the protection; CORS decides who may read."""
    async with Upstream(ANSWER) as upstream, gateway_before(upstream, keys=KEYS) as gateway:
        extra = [*FOREIGN, "authorization: Bearer right", f"content-length: {len(BODY)}"]
        status, headers, _ = await first_reply(port(gateway.url), head(PATH, *extra, host="api.example") + BODY)
        assert status == 200
        assert not any(name.startswith("access-control-") for name in headers)


# --------------------------------------------------------------------------- HTTP


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 2000 + b"\r\n",
    ],
    ids=["no host", "two hosts", "two different hosts", "a bad host", "2,000 header lines"],
)
async def test_a_head_that_proxies_read_differently_is_refused(raw: bytes) -> None:
    """RFC 9112, section 3.2: a missing, doubled or invalid Host is a 400."""
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        status, _, body = await first_reply(port(gateway.url), raw)
        assert status in (400, 431)
        assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", ["/health", PATH, "/nowhere"])
async def test_every_reply_has_a_date(path: str) -> None:
    """RFC 9110, section 6.6.1."""
    async with (
        Upstream(ANSWER) as upstream,
        gateway_before(upstream) as gateway,
        aiohttp.ClientSession() as session,
        session.request("POST" if path == PATH else "GET", gateway.url + path, data=BODY) as answer,
    ):
        assert "GMT" in answer.headers["date"]


async def test_an_absolute_target_is_the_same_resource() -> None:
    """RFC 9112, section 3.2.2: a server must accept the absolute form."""
    async with Upstream(ANSWER) as upstream, gateway_before(upstream) as gateway:
        raw = head(f"http://127.0.0.1{PATH}", f"content-length: {len(BODY)}") + BODY
        assert (await first_reply(port(gateway.url), raw))[0] == 200


async def test_the_framing_of_a_chunked_body_counts_towards_the_bound() -> None:
    """A body of one-byte chunks costs five bytes each on the wire and much time: 413 at the bound of the bytes read."""
    defaults = {"max_body": "1MB"}
    async with Upstream(ANSWER) as upstream, gateway_before(upstream, defaults=defaults) as gateway:
        raw = head(PATH, "transfer-encoding: chunked") + b"1\r\na\r\n" * 300_000
        assert (await first_reply(port(gateway.url), raw))[0] == 413
        assert not upstream.requests
