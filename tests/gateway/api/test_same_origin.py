"""Host and Origin of requests to a port that no key protects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.api.api_error import ApiError
from gateway.api.same_origin import SameOrigin


class Port(asyncio.BaseTransport):
    """A connection that came in by port 8080."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 8080) if name == "sockname" else default


def accepts(rule: SameOrigin, **headers: str) -> bool:
    try:
        rule.check(headers, Port())
    except ApiError as refusal:
        return refusal.status != 403
    return True


HERE, NETWORK = SameOrigin(loopback=True), SameOrigin(loopback=False)
LOOPBACK = ["localhost", "LocalHost:80", "127.0.0.1:8080", "127.9.9.9", "[::1]", "[::1]:8080"]
PRIVATE = [
    "10.0.0.5:8080",
    "203.0.113.7",
    "[2001:db8::1]:9090",
    "gateway:9090",
    "gw.llm.svc",
    "gw.llm.svc.cluster.local",
]
PUBLIC = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "svc.example"]
INVALID = ["", "a b", "[::1", "x@localhost", "localhost:80:80", "localhost/", "evil.example#.svc", "127.0.0.1:8080:1"]


@pytest.mark.parametrize("host", LOOPBACK + PRIVATE + PUBLIC + INVALID)
def test_a_loopback_port_is_reached_by_names_of_this_machine(host: str) -> None:
    """The first request included."""
    assert accepts(SameOrigin(loopback=True), host=host) == (host in LOOPBACK)


@pytest.mark.parametrize("host", LOOPBACK + PRIVATE + PUBLIC + INVALID)
def test_a_port_on_a_network_is_reached_by_addresses_and_private_names(host: str) -> None:
    """Kubelet and Prometheus name the address of a pod, docker compose the name of a service."""
    assert accepts(NETWORK, host=host) == (host in LOOPBACK + PRIVATE)


def test_a_listed_name_is_accepted() -> None:
    listed = SameOrigin(loopback=True, names=["Gateway.Example.com"])
    assert accepts(listed, host="gateway.example.COM:443")
    assert not accepts(listed, host="evil.gateway.example.com")


@pytest.mark.parametrize(
    ("rule", "origin", "host", "own"),
    [
        (HERE, "http://localhost:8080", "127.0.0.1:8080", True),
        (HERE, "http://127.0.0.1:9191", "127.0.0.1:9191", True),  # ssh -L 9191:127.0.0.1:8080
        (HERE, "https://localhost", "localhost", True),
        (HERE, "http://localhost:3000", "localhost:8080", False),
        (HERE, "http://evil.example:8080", "localhost:8080", False),
        (HERE, "null", "localhost:8080", False),
        (HERE, "", "localhost:8080", False),
        (HERE, "http://localhost:99999", "localhost:8080", False),
        (HERE, "http://[", "localhost:8080", False),
        (HERE, "http://x@localhost:8080", "localhost:8080", False),
        (NETWORK, "http://10.0.0.5:8080", "10.0.0.5:8080", True),
        (NETWORK, "http://10.6.6.6:8080", "10.0.0.5:8080", False),
    ],
)
def test_a_page_is_served_under_its_own_origin_only(rule: SameOrigin, origin: str, host: str, own: bool) -> None:
    assert accepts(rule, host=host, origin=origin) == own


def test_http_1_0_needs_no_host() -> None:
    assert accepts(HERE)
    assert not accepts(HERE, origin="http://evil.example")
