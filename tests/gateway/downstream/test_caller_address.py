"""The address of a caller, which tells callers without keys apart."""

from __future__ import annotations

import asyncio

import pytest

from gateway.downstream.http_request import caller_address


class Peer(asyncio.Transport):
    def __init__(self, name: object) -> None:
        super().__init__({"peername": name})


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        (("10.1.2.3", 4000), "10.1.2.3"),
        (("::ffff:10.1.2.3", 4000, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2::3", 4000, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4000, 0, 2), "fe80::/64"),
    ],
)
def test_a_host_is_one_caller_whatever_its_address(peer: object, caller: str) -> None:
    """A network of 64 bits belongs to one host: its addresses are no witnesses of each other."""
    assert caller_address(Peer(peer)) == caller


@pytest.mark.parametrize("peer", [None, "", ()])
def test_an_unknown_caller_is_not_taken_for_the_gateway_itself(peer: object) -> None:
    """The empty name is the gateway's own, which needs no second witness."""
    assert caller_address(Peer(peer)) == "?"
