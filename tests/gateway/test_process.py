"""Sockets shared by workers."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from gateway.config.field_types import ListenAddress
from gateway.process import bind, reserve_port, url_of

HERE = ListenAddress("127.0.0.1", 0)


def test_a_reserved_port_can_be_shared_by_workers_only() -> None:
    """Two gateways on one port would each get half of the requests."""
    with ExitStack() as stack:
        held = stack.enter_context(reserve_port(HERE))
        port = ListenAddress("127.0.0.1", held.getsockname()[1])
        for _ in range(2):
            stack.enter_context(bind(port, shared=True)).listen()
        for take in (reserve_port, bind):
            with pytest.raises(OSError, match="in use"):
                take(port)


def test_connections_reach_only_listening_workers() -> None:
    """Neither the reserving socket nor the socket of an exited worker."""
    with reserve_port(HERE) as held:
        port = ListenAddress("127.0.0.1", held.getsockname()[1])
        with bind(port, shared=True) as gone:
            gone.listen()
        with bind(port, shared=True) as worker:
            worker.listen()
            for _ in range(20):
                socket.create_connection((port.host, port.port)).close()
            for _ in range(20):
                worker.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((port.host, port.port))


def test_a_name_and_an_ipv6_address_can_be_listened_on() -> None:
    """The URL shows the configured host."""
    with bind(ListenAddress("localhost", 0)) as named, bind(ListenAddress("::1", 0)) as six:
        assert named.family == socket.AF_INET
        assert url_of(named, "localhost") == f"http://localhost:{named.getsockname()[1]}"
        assert url_of(six, "::1") == f"http://[::1]:{six.getsockname()[1]}"
