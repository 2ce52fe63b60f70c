"""Connections through an HTTP proxy: a real one, on both event loops."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from pathlib import Path

import pytest

from backends.failures import TransportError
from backends.http.connection_pool import ConnectionPool
from backends.http.tunnel import HEAD_LIMIT, ProxyAddress
from backends.interface import Failure, FailureKind
from tests.support.certificates import Certificates, made
from tests.support.connect_proxy import ConnectProxy
from tests.support.scripted_connection import POST, ask
from tests.support.upstream import LAST_CHUNK, NEVER, STREAM_HEAD, Listener, Upstream, chunk, reply

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

STREAM = [STREAM_HEAD, chunk(b"one"), chunk(b"two"), LAST_CHUNK]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("tls"))


def through(proxy: ConnectProxy, url: str, **more: object) -> ConnectionPool:
    return ConnectionPool(url, connect_timeout=2, proxy=ProxyAddress.parse(proxy.url), **more)  # type: ignore[arg-type]


async def failed(origin: ConnectionPool) -> Failure:
    with pytest.raises(TransportError) as caught:
        await origin.open(POST, Listener())
    return caught.value.failure


async def test_a_tunnel_carries_streams_and_is_reused() -> None:
    async with ConnectProxy() as proxy, Upstream(STREAM, [reply(b"three")]) as upstream:
        origin = through(proxy, upstream.url)
        assert [(await ask(origin)).body for _ in range(2)] == [b"onetwo", b"three"]
        assert proxy.targets == [upstream.url.removeprefix("http://")]
        assert upstream.connections == 1
        await origin.close()


async def test_tls_begins_inside_the_tunnel(certificates: Certificates) -> None:
    """The proxy resolves the name, and reads nothing of the request."""
    trusted = ssl.create_default_context(cafile=certificates.ca)
    async with ConnectProxy() as proxy, Upstream(STREAM, [reply(b"three")], tls=certificates.serving()) as upstream:
        origin = through(proxy, upstream.url, tls=trusted)
        assert [(await ask(origin)).body for _ in range(2)] == [b"onetwo", b"three"]
        assert proxy.targets == [upstream.url.removeprefix("https://")]
        assert b"model" not in proxy.upward
        assert upstream.requests[0].body == POST.body
        await origin.close()


async def test_a_proxy_without_the_certificate_of_the_backend_gets_nothing(certificates: Certificates) -> None:
    """A proxy that ends TLS itself is refused like any other server."""
    async with ConnectProxy() as proxy, Upstream([reply()], tls=certificates.serving()) as upstream:
        failure = await failed(through(proxy, upstream.url))
        assert failure == Failure(FailureKind.CONNECT, "The backend's certificate could not be verified.")
        assert upstream.requests == []


async def test_credentials_go_to_the_proxy_alone() -> None:
    wanted = "Basic " + b64encode(b"user:p@ss").decode()
    async with ConnectProxy(authorization=wanted) as proxy, Upstream([reply(b"ok")]) as upstream:
        address = ProxyAddress.parse(f"http://user:p%40ss@{proxy.address}")
        origin = ConnectionPool(upstream.url, connect_timeout=2, proxy=address)
        assert (await ask(origin)).body == b"ok"
        assert "proxy-authorization" not in upstream.requests[0].headers
        assert "p@ss" not in repr(address)
        await origin.close()
        failure = await failed(through(proxy, upstream.url))
        assert failure == Failure(FailureKind.CONNECT, "The proxy refused the gateway's credentials.")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",  # an answer before the question
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2 * HEAD_LIMIT,
    ],
)
async def test_a_proxy_that_opens_no_tunnel_is_a_failure(answer: bytes) -> None:
    """Before any byte of the request is sent, and without the text of the proxy."""
    async with ConnectProxy(answer=answer) as proxy, Upstream([reply()]) as upstream:
        failure = await failed(through(proxy, upstream.url))
        assert failure == Failure(FailureKind.CONNECT, "The proxy opened no connection to the backend.")
        assert upstream.connections == 0


async def test_a_proxy_that_is_silent_or_absent_is_a_failure() -> None:
    held: list[asyncio.StreamWriter] = []  # Python 3.13 closes a connection whose writer nobody holds
    listening = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    silent = ConnectionPool("http://a.example:1", connect_timeout=0.1, proxy=ProxyAddress("127.0.0.1", port))
    assert (await failed(silent)).message == "The backend did not accept a connection in time."
    for writer in held:
        writer.close()
    listening.close()
    await listening.wait_closed()
    absent = ConnectionPool("http://a.example:1", connect_timeout=2, proxy=ProxyAddress("127.0.0.1", port))
    assert (await failed(absent)).kind is FailureKind.CONNECT


async def test_cancelling_a_handshake_closes_the_connection_to_the_proxy() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        closed.set()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = ProxyAddress("127.0.0.1", listening.sockets[0].getsockname()[1])
    opening = asyncio.create_task(ConnectionPool("http://a:1", connect_timeout=9, proxy=proxy).open(POST, Listener()))
    await asyncio.sleep(0.05)
    opening.cancel()
    async with asyncio.timeout(NEVER):
        await closed.wait()
    listening.close()


@pytest.mark.parametrize(
    "url",
    ["socks5://proxy:1080", "https://proxy:443", "proxy:3128", "http://", "http://proxy:3128/path", "http://a b:1", ""],
)
async def test_a_proxy_url_of_another_form_is_refused_without_repeating_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write it like") as caught:
        ProxyAddress.parse(url)
    assert "b:1" not in str(caught.value)
