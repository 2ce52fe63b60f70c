"""Addresses that an answer of the DNS may name as a backend.

A name leads to servers elsewhere. An answer with an address of this machine or of the link alone, where cloud metadata
services are, would lead prompts and keys into other services: DNS rebinding, or a mistake. Rules:
- Link-local, multicast, unspecified and reserved addresses are refused.
- Loopback addresses belong to `localhost` and the names below (RFC 6761, 6.3), and to the machine's own name, which
  Debian maps to 127.0.1.1.
- An address in the configured URL itself was never an answer and is not judged.
"""

from __future__ import annotations

from functools import cache
from ipaddress import IPv6Address, ip_address
from socket import gethostname

METADATA = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200")))  # AWS, Alibaba: not link-local


def is_allowed(name: str, address: str) -> bool:
    """`address`: an answer for the host name."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return name == "localhost" or name.endswith(".localhost") or name in _own_names()
    elsewhere = ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved
    return not elsewhere and ip not in METADATA


@cache
def _own_names() -> frozenset[str]:
    own = gethostname().lower()
    return frozenset({own, own.partition(".")[0]})
