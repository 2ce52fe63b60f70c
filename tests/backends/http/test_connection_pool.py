"""The connections to one backend."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from backends.failures import TOO_LARGE, TransportError
from backends.http import name_lookup as address_race
from backends.http.connection_pool import BufferedReply, ConnectionPool
from backends.http.name_lookup import Answer, NameLookup
from backends.interface import Failure, FailureKind, HttpCall
from tests.backends.http.test_connection import POST, ask, played
from tests.support.ports import closed_port
from tests.support.upstream import (
    CLOSE,
    GATE,
    HANG,
    RESET,
    STREAM_HEAD,
    Act,
    Listener,
    Pause,
    Script,
    Upstream,
    chunk,
    reply,
    turn_until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

GET = HttpCall("GET", "/health")


async def refused(origin: ConnectionPool) -> Failure:
    with pytest.raises(TransportError) as raised:
        await origin.open(POST, Listener())
    return raised.value.failure


# --------------------------------------------------------------------------- reuse


async def test_an_idle_connection_is_reused_at_once() -> None:
    """The second request is sent in the same call."""
    async with played([reply(b"one")], [reply(b"two")]) as (origin, upstream):
        assert origin.start(POST, Listener()) is None
        first = await origin.open(POST, listener := Listener())
        await listener.ended()
        second = origin.start(POST, listener := Listener())
        assert second is not None
        assert (await listener.ended(), listener.body, upstream.connections) == (None, b"two", 1)
        assert (first.reused, second.reused, second.connect_seconds) == (False, True, 0.0)
        assert 0 < first.connect_seconds < 2
        assert first.sent_at < second.sent_at


async def test_concurrent_requests_have_separate_connections() -> None:
    """All are kept, up to `max_idle`."""
    async with Upstream([GATE, reply()]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2, max_idle=2)
        listeners = [Listener() for _ in range(3)]
        for listener in listeners:
            await origin.open(POST, listener)
        assert repr(origin).endswith("idle=0 active=3>")
        for listener in listeners:
            upstream.proceed()
            assert await listener.ended() is None
        await upstream.until(lambda up: up.hangups == 1)
        assert repr(origin).endswith("idle=2 active=0>")
        await origin.close()


async def test_the_most_recently_used_connection_is_taken_first() -> None:
    """So older connections can expire."""
    async with played([GATE, reply()]) as (origin, upstream):
        first, second = Listener(), Listener()
        await origin.open(POST, first)
        await upstream.until(lambda up: len(up.requests) == 1)
        await origin.open(POST, second)
        await upstream.until(lambda up: len(up.requests) == 2)
        for listener in (first, second):
            upstream.proceed()
            await listener.ended()
        upstream.proceed()
        await ask(origin)
        assert [request.connection for request in upstream.requests] == [1, 2, 2]


async def test_idle_connections_expire() -> None:
    """By one timer, in order of their idle time."""
    async with Upstream([reply()], [Pause(0.01), reply()]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2, idle_timeout=0.5)
        await asyncio.gather(*(ask(origin) for _ in range(3)))
        assert origin.idle == upstream.connections == 3
        await upstream.until(lambda up: up.hangups == 3)
        assert repr(origin).endswith("idle=0 active=0>")


async def test_an_expired_connection_is_not_used_before_the_timer() -> None:
    """A busy event loop runs timers late."""
    seen: list[object] = []

    class Eager(Listener):
        def on_end(self) -> None:
            seen.extend([origin.idle, origin.start(POST, Listener()), origin.idle])
            super().on_end()

    async with Upstream([reply()]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2, idle_timeout=0.0)
        await origin.open(POST, listener := Eager())
        await listener.ended()
    assert seen == [1, None, 0]


async def test_connections_to_a_name_have_a_maximum_age() -> None:
    """The name may have moved; a connection to an address stays valid."""
    async with Upstream([reply(b"one")], [reply(b"two")]) as upstream:
        service, localhost = (upstream.url.replace("127.0.0.1", name) for name in ("engines.svc", "localhost"))
        by_name = ConnectionPool(localhost, connect_timeout=2, max_age=0.0)
        by_address = ConnectionPool(upstream.url, connect_timeout=2, max_age=0.0)
        at = ConnectionPool(service, connect_timeout=2, max_age=0.0, connect_to="127.0.0.1")
        for origin, kept in ((by_name, 0), (by_address, 1), (at, 1)):
            await ask(origin)
            assert origin.idle == kept
            await origin.close()
    assert upstream.requests[-1].headers["host"].startswith("engines.svc:")


async def test_a_connection_that_the_server_closes_while_idle_is_forgotten() -> None:
    """Without a failure."""
    async with played([reply(b"one"), CLOSE], [reply(b"two")]) as (origin, _):
        await ask(origin)
        await turn_until(lambda: not origin.idle)
        assert ((await ask(origin)).body, origin.stale_retries) == (b"two", 0)


# --------------------------------------------------------------------------- stale connections


@pytest.mark.parametrize("act", [RESET, CLOSE])
async def test_a_request_on_a_stale_connection_is_sent_again(act: Act) -> None:
    """The server closed the idle connection during the write. The request is sent again on a new connection, and the
    sink sees only the reply."""
    async with played([reply(b"one")], [act], [reply(b"two")]) as (origin, upstream):
        await ask(origin)
        listener = Listener()
        exchange = origin.start(POST, listener)
        assert exchange is not None
        assert (await listener.ended(), listener.calls, listener.body) == (None, ["head", "body", "end"], b"two")
        assert (exchange.reused, exchange.connect_seconds > 0, origin.stale_retries) == (False, True, 1)
        assert [request.body for request in upstream.requests] == [POST.body] * 3


async def test_a_request_is_sent_again_once_only() -> None:
    """A server that resets every connection is down, not stale."""
    async with played([reply(b"one")], [RESET]) as (origin, upstream):
        await ask(origin)
        failure = (await ask(origin)).done.result()
        assert failure is not None
        assert (failure.kind, len(upstream.requests)) == (FailureKind.RESET, 3)


async def test_a_fresh_connection_is_not_retried() -> None:
    """A new connection cannot be stale."""
    async with played([RESET]) as (origin, upstream):
        failure = (await ask(origin)).done.result()
        assert failure == Failure(FailureKind.RESET, "The backend closed the connection without an answer.")
        assert len(upstream.requests) == 1


async def test_after_the_first_byte_of_a_reply_nothing_is_sent_again() -> None:
    """The request may have been served."""
    async with played([reply(b"one")], [b"H", RESET]) as (origin, upstream):
        await ask(origin)
        assert (await ask(origin)).calls == ["failure"]
        assert (len(upstream.requests), origin.stale_retries) == (2, 0)


async def test_a_connection_lost_after_a_round_trip_is_not_stale() -> None:
    """A stale connection fails within a round trip; later, the request was being served and may be billed."""
    async with played([reply(b"one")], [GATE, CLOSE]) as (origin, upstream):
        await ask(origin)
        exchange = origin.start(POST, listener := Listener())
        assert exchange is not None
        exchange.sent_at -= 2.0
        upstream.proceed()
        await listener.ended()
        assert (listener.calls, len(upstream.requests), origin.stale_retries) == (["failure"], 2, 0)


async def test_a_retry_that_cannot_connect_is_a_failure() -> None:
    """The server has gone."""
    async with Upstream([reply(b"one")], [GATE, RESET]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2)
        await ask(origin)
        listener = Listener()
        await origin.open(POST, listener)
        await upstream.until(lambda up: len(up.requests) == 2)
        upstream._server.close()
        upstream.proceed()
        failure = await listener.ended()
        assert failure is not None
        assert failure.kind is FailureKind.CONNECT


async def test_cancel_during_a_resend_leaves_nothing() -> None:
    """Neither a reply nor a connection."""
    async with Upstream([reply(b"one")], [GATE, RESET], [HANG]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2)
        await ask(origin)
        listener = Listener()
        exchange = await origin.open(POST, listener)
        await upstream.until(lambda up: len(up.requests) == 2)
        upstream.proceed()
        await turn_until(lambda: origin.stale_retries)
        exchange.cancel()
        await turn_until(lambda: not origin.active and not origin._resends)
        assert listener.calls == []


# --------------------------------------------------------------------------- connecting


async def test_a_refused_connection_is_named_without_its_address() -> None:
    """Callers see the failure, not the address."""
    origin = ConnectionPool(f"http://127.0.0.1:{closed_port()}", connect_timeout=2)
    assert await refused(origin) == Failure(FailureKind.CONNECT, "The backend refused the connection.")
    assert origin.active == 0


async def test_an_unresolvable_name_is_a_connect_failure() -> None:
    """RFC 6761 reserves `.invalid`."""
    failure = await refused(ConnectionPool("http://nowhere.invalid:8000", connect_timeout=2))
    assert failure == Failure(FailureKind.CONNECT, "The backend's name could not be resolved.")


@pytest.mark.parametrize("name", ["127.1", "0x7f000001"])
async def test_a_name_that_resolves_to_loopback_gets_no_connection(name: str) -> None:
    """Resolvers read these names as 127.0.0.1. The configuration must have the address, or localhost."""
    async with Upstream([reply(b"secret")]) as upstream:
        origin = ConnectionPool(upstream.url.replace("127.0.0.1", name), connect_timeout=2)
        failure = await refused(origin)
        assert failure.message == "The backend's name leads to an address that no backend may have."
        assert (upstream.connections, origin.active) == (0, 0)


async def test_connecting_is_bounded() -> None:
    """A listener with a full backlog leaves a SYN unanswered."""
    with socket.socket() as listening, socket.socket() as filler:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        filler.connect(listening.getsockname())
        origin = ConnectionPool(f"http://127.0.0.1:{listening.getsockname()[1]}", connect_timeout=0.05)
        failure = await refused(origin)
    assert failure == Failure(FailureKind.CONNECT, "The backend did not accept a connection in time.")
    assert failure.cause == "no connection within 0.05 s"


async def test_a_stall_of_our_own_loop_is_no_silence_of_the_server() -> None:
    """The connection, or the reply, was there in time; the loop could not know."""
    async with Upstream([reply(b"{}")]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1.0)
        asyncio.get_running_loop().call_soon(time.sleep, 1.1)
        await origin.open(POST, listener := Listener())
        assert await listener.ended() is None
        asyncio.get_running_loop().call_soon(time.sleep, 1.1)
        assert (await origin.fetch(GET, timeout=1.0)).body == b"{}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_sockets_have_nodelay_and_a_bounded_receive_buffer(host: str) -> None:
    """A receive buffer bounds the bytes held for a stalled reader."""
    async with Upstream([reply()]) as upstream:
        origin = ConnectionPool(upstream.url.replace("127.0.0.1", host), connect_timeout=2, receive_buffer=16384)
        await ask(origin)
        sock = next(iter(origin._idle))._transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * 16384  # Linux counts its own overhead
        await origin.close()


# --------------------------------------------------------------------------- names with several addresses

NAMED = "engines.localhost"
DEAD, GOOD = "127.0.0.2", "127.0.0.1"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the addresses of every name, in order."""

    def answer(*addresses: str) -> None:
        def found(name: str) -> Answer:
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (one, 0)) for one in addresses]

        monkeypatch.setattr(address_race, "CONNECT_NAMES", NameLookup(ask=found))

    return answer


@contextmanager
def blackhole(port: int) -> Iterator[None]:
    """A listener with a full backlog, at DEAD."""
    with socket.socket() as listening, socket.socket() as filler:
        listening.bind((DEAD, port))
        listening.listen(0)
        filler.connect((DEAD, port))
        yield


async def test_an_address_that_does_not_answer_costs_no_connect_timeout(
    answers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next address is tried meanwhile, and the attempt without an answer leaves no socket."""
    monkeypatch.setattr(address_race, "ATTEMPT_DELAY", 0.01)
    async with Upstream([reply(b"hello")]) as upstream:
        origin = ConnectionPool(upstream.url.replace(GOOD, NAMED), connect_timeout=5)
        with blackhole(origin.address.port):
            answers(DEAD, GOOD)
            sockets = count_sockets()
            received = await asyncio.wait_for(ask(origin), 4)
            assert received.body == b"hello"
            await turn_until(lambda: count_sockets() == sockets + 2)  # both ends of one connection
        await origin.close()


def count_sockets() -> int:
    """Sockets of this process."""
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory's own
            count += os.readlink(file).startswith("socket:")
    return count


@pytest.mark.parametrize("addresses", [(DEAD, GOOD), (GOOD, DEAD), (GOOD,)])
async def test_an_address_that_refuses_is_followed_by_the_next(
    answers: Callable[..., None], addresses: tuple[str, ...]
) -> None:
    """In whatever order."""
    async with Upstream([reply(b"hello")]) as upstream:
        origin = ConnectionPool(upstream.url.replace(GOOD, NAMED), connect_timeout=5)
        answers(*addresses)
        assert (await ask(origin)).body == b"hello"
        await origin.close()


async def test_a_name_whose_addresses_all_refuse_is_refused(answers: Callable[..., None]) -> None:
    """Callers see the failure, not the addresses."""
    origin = ConnectionPool(f"http://{NAMED}:{closed_port()}", connect_timeout=5)
    answers(DEAD, GOOD)
    assert await refused(origin) == Failure(FailureKind.CONNECT, "The backend refused the connection.")
    assert origin.active == 0


async def test_a_name_whose_addresses_do_not_answer_is_bounded(answers: Callable[..., None]) -> None:
    """By the connect timeout, for all addresses together."""
    port = closed_port()
    with blackhole(port):
        origin = ConnectionPool(f"http://{NAMED}:{port}", connect_timeout=0.05)
        answers(DEAD, DEAD)
        failure = await refused(origin)
    assert failure == Failure(FailureKind.CONNECT, "The backend did not accept a connection in time.")
    assert origin.active == 0


async def test_a_forbidden_address_of_a_name_is_never_connected_to(answers: Callable[..., None]) -> None:
    """The others of the name are used."""
    async with Upstream([reply(b"hello")]) as upstream, Upstream([reply(b"no")], host=DEAD) as metadata:
        origin = ConnectionPool(upstream.url.replace(GOOD, NAMED), connect_timeout=5)
        answers("169.254.169.254", GOOD)
        assert (await ask(origin)).body == b"hello"
        outside = ConnectionPool(metadata.url.replace(DEAD, "engines.example"), connect_timeout=5)
        answers(DEAD)
        assert (await refused(outside)).message == "The backend's name leads to an address that no backend may have."
        assert metadata.connections == 0
        await origin.close()


# --------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            path,
            "-out",
            f"{path}.crt",
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_tls_carries_streams_and_reuses_connections(certificate: Path) -> None:
    """The same rules behind a handshake."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    stream = [STREAM_HEAD, chunk(b"one"), chunk(b"two"), b"0\r\n\r\n"]
    async with Upstream(stream, [reply(b"three")], tls=server_tls(certificate)) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2, tls=trusted)
        assert [(await ask(origin)).body for _ in range(2)] == [b"onetwo", b"three"]
        assert upstream.connections == 1
        await origin.close()


async def test_an_untrusted_certificate_is_refused(certificate: Path) -> None:
    """Before any byte of the request, or of the key, is sent."""
    async with Upstream([reply()], tls=server_tls(certificate)) as upstream:
        failure = await refused(ConnectionPool(upstream.url, connect_timeout=2))
        assert failure == Failure(FailureKind.CONNECT, "The backend's certificate could not be verified.")
        assert upstream.requests == []


async def test_a_server_without_tls_is_a_failed_handshake() -> None:
    """`https` in the configuration, `http` from the server."""
    async with Upstream(banner=[reply(), CLOSE]) as upstream:
        failure = await refused(ConnectionPool(upstream.url.replace("http:", "https:"), connect_timeout=2))
        assert failure == Failure(FailureKind.CONNECT, "The TLS handshake with the backend failed.")


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("greeting", [[RESET], [CLOSE], [b"220 ready\r\n", HANG], [b"220 ready\r\n", CLOSE]])
async def test_a_server_that_hangs_up_or_speaks_first_is_a_failure(
    certificate: Path, greeting: Script, secure: bool
) -> None:
    """Before the request a connect failure, after the request a failure of the reply."""
    async with Upstream([HANG], tls=server_tls(certificate) if secure else None, banner=greeting) as upstream:
        trusted = ssl.create_default_context(cafile=str(certificate))
        origin = ConnectionPool(upstream.url, connect_timeout=2, tls=trusted)
        try:
            failure = (await ask(origin)).done.result()
        except TransportError as error:
            failure = error.failure
        assert failure is not None
        assert failure.kind in (FailureKind.CONNECT, FailureKind.RESET, FailureKind.PROTOCOL)
        await turn_until(lambda: not origin.active)


async def test_cancel_closes_a_tls_connection_at_once(certificate: Path) -> None:
    """Without waiting for the server's close_notify."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    async with Upstream([STREAM_HEAD, HANG], tls=server_tls(certificate)) as upstream:
        exchange = await ConnectionPool(upstream.url, connect_timeout=2, tls=trusted).open(POST, Listener())
        await upstream.until(lambda up: len(up.requests) == 1)
        exchange.cancel()
        await upstream.until(lambda up: up.hangups == 1)


# --------------------------------------------------------------------------- whole replies


async def test_a_fetch_returns_a_whole_reply() -> None:
    """With any status."""
    async with played([reply(b"no", "503 Service Unavailable", "Retry-After: 1")]) as (origin, _):
        answer = await origin.fetch(GET, 1)
        assert (answer.status, answer.headers["retry-after"], answer.body) == (503, "1", b"no")


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([HANG], FailureKind.TIMEOUT),
        ([STREAM_HEAD + chunk(b"a"), HANG], FailureKind.TIMEOUT),
        ([STREAM_HEAD, *[chunk(b"a" * 1000)] * 20, HANG], FailureKind.PROTOCOL),
        ([b"garbage"], FailureKind.PROTOCOL),
        ([RESET], FailureKind.RESET),
    ],
)
async def test_a_fetch_that_fails_leaves_nothing_behind(script: Script, kind: FailureKind) -> None:
    """Silence, excess, garbage or a reset: one error, and the connection is closed."""
    async with played(script) as (origin, _):
        with pytest.raises(TransportError) as raised:
            await origin.fetch(GET, 0.1 if kind is FailureKind.TIMEOUT else 5.0, limit=10_000)
        assert raised.value.failure.kind is kind
        assert raised.value.failure.cause == "no answer within 0.1 s" or kind is not FailureKind.TIMEOUT
        await turn_until(lambda: not origin.active)
        assert origin.idle == 0


async def test_a_fetch_is_bounded_while_connecting_too() -> None:
    """The timeout covers connecting; a refused connection is a connect failure."""
    with pytest.raises(TransportError) as raised:
        await ConnectionPool(f"http://127.0.0.1:{closed_port()}", connect_timeout=2).fetch(GET, 1)
    assert raised.value.failure.kind is FailureKind.CONNECT


async def test_a_cancelled_fetch_closes_its_connection() -> None:
    """A stopped monitor leaves no probe behind."""
    async with played([HANG]) as (origin, upstream):
        task = asyncio.create_task(origin.fetch(GET, 5))
        await upstream.until(lambda up: len(up.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await upstream.until(lambda up: up.hangups == 1)


# --------------------------------------------------------------------------- closing


async def test_closing_breaks_no_stream() -> None:
    """Idle connections are closed at once, busy connections at their end; later requests are served without
    keep-alive."""
    async with played([reply()], [GATE, reply(b"late")]) as (origin, upstream):
        await asyncio.gather(ask(origin))
        busy = Listener()
        await origin.open(POST, busy)
        await origin.close()
        upstream.proceed()
        assert (await busy.ended(), busy.body) == (None, b"late")
        upstream.proceed()
        assert (await ask(origin)).body == b"late"
        await upstream.until(lambda up: up.hangups == 2)
        assert repr(origin).endswith("idle=0 active=0>")


async def test_a_connection_made_during_a_cancellation_is_not_counted() -> None:
    """Both in one turn of a blocked event loop, which may never report the loss."""
    for _ in range(20):
        async with played([HANG]) as (origin, _):
            task = asyncio.create_task(origin.fetch(GET, 0.05))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(time.sleep, 0.06)
            with pytest.raises(TransportError):
                await task
            await turn_until(lambda: not origin.active)


@pytest.mark.parametrize("length", ["content-length: 2000000", "transfer-encoding: chunked"])
async def test_a_reply_above_the_limit_is_refused_and_nothing_of_it_is_held(length: str) -> None:
    """By its length, before a byte of it is read, where the server tells one; no cycle keeps what was read."""
    head = f"HTTP/1.1 200 OK\r\n{length}\r\n\r\n".encode()
    large = b"" if "content" in length else chunk(b"x" * 60_000) * 3
    async with Upstream([head + large, HANG]) as upstream:
        connections = ConnectionPool(upstream.url, connect_timeout=1.0)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(TransportError) as refused:
                await connections.fetch(GET, 60.0, limit=100_000)
            assert refused.value.failure is TOO_LARGE
            del refused
            await asyncio.sleep(0)
            assert not [one for one in gc.get_objects() if isinstance(one, BufferedReply)]
        finally:
            gc.enable()
            await connections.close()
