"""Network time by the connections of a pool."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from backends.http import network_time
from backends.http.connection_pool import ConnectionPool
from backends.http.network_time import CONNECTS, WINDOW, NetworkTime, kernel_rtt
from backends.http.tunnel import ProxyAddress
from tests.backends.http.test_connection import POST, played
from tests.support.connect_proxy import ConnectProxy
from tests.support.upstream import Listener, Upstream, reply

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    """Connected on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as found:
        yield found


@both_loops
async def test_a_round_trip_is_known_from_the_first_connection_on() -> None:
    """By the kernel's clock, and so part of the time to connect by ours."""
    async with played([reply(b"one")], [reply(b"two")]) as (pool, upstream):
        assert pool.network_s() == (0.0, 0.0)
        exchange = await pool.open(POST, listener := Listener())
        rtt, wait = pool.network_s()
        assert 0 < rtt <= exchange.connect_seconds == wait
        await listener.ended()
        assert (pool.idle, pool.network_s()[1]) == (1, 0.0)  # a request sent now waits for no connection
        assert upstream.connections == 1


@both_loops
async def test_behind_a_proxy_only_the_setup_is_known() -> None:
    """The connection ends at the proxy, and so does its round trip."""
    async with Upstream([reply(b"one")]) as upstream, ConnectProxy() as proxy:
        pool = ConnectionPool(upstream.url, connect_timeout=2.0, proxy=ProxyAddress.parse(proxy.url))
        await pool.open(POST, listener := Listener())
        await listener.ended()
        assert pool.network.rtt == 0.0
        assert pool.network.setup_s > 0
        await pool.close()


def test_where_the_kernel_does_not_tell_the_time_to_connect_is_an_upper_bound(
    sock: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake of TLS 1.3 is one more round trip."""
    monkeypatch.setattr(network_time, "TCP_INFO", None)
    for tls, expected in ((False, 0.08), (True, 0.04)):
        time = NetworkTime()
        time.on_connected(sock, 0.08, tls=tls, now=0.0)
        assert time.rtt == expected
        time.on_idle(sock, 1.0)
        assert time.rtt == expected


def test_a_longer_way_is_learned_within_two_windows(sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the least counts: queues on the way only ever add to it."""
    monkeypatch.setattr(network_time, "TCP_INFO", None)
    time = NetworkTime()
    for now, connect, rtt in (
        (0.0, 0.020, 0.020),
        (1.0, 0.090, 0.020),  # a queue
        (WINDOW + 2, 0.100, 0.020),  # another way; the window before counts too
        (2 * WINDOW + 3, 0.110, 0.100),
        (9 * WINDOW, 0.130, 0.130),  # after a night
    ):
        time.on_connected(sock, connect, tls=False, now=now)
        assert time.rtt == rtt


def test_setup_is_the_median_of_the_latest_connections(sock: socket.socket) -> None:
    """One that a stalled loop, or a lost packet, made long is none of its own."""
    time = NetworkTime()
    for seconds in [9.0] + [0.2] * (CONNECTS - 1) + [3.0]:
        time.on_connected(sock, seconds, tls=True, now=0.0)
    assert time.setup_s == 0.2


def test_a_closed_socket_tells_nothing() -> None:
    with socket.socket() as sock:
        assert kernel_rtt(sock) is None  # never connected
    assert kernel_rtt(sock) is None
