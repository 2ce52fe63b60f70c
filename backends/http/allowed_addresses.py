"""Addresses that an answer of the DNS may name as a backend.

A name leads to servers elsewhere. An answer with an address of this machine or of the link alone, where cloud metadata
services are, would lead prompts and keys into other services: DNS rebinding, or a mistake. Rules:
- Link-local, multicast, unspecified and reserved addresses are refused, and those of SERVICES.
- Loopback addresses belong to `localhost` and the names below (RFC 6761, 6.3), and to the machine's own name, which
  Debian maps to 127.0.1.1.
- An IPv6 address that a translator or a tunnel turns into an IPv4 address is judged by that one: with NAT64 and DNS64,
  as on nodes with IPv6 alone, each server that has IPv4 only is named so. A translator's loopback is never ours.
- An address in the configured URL itself was never an answer and is not judged.
"""

from __future__ import annotations

from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from socket import gethostname

SERVICES = tuple(  # of a cloud for its own machines (metadata, credentials), outside of the link-local networks
    map(
        ip_network,
        (
            "0.0.0.0/8",  # this network (RFC 791)
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure
            "192.0.0.0/24",  # Oracle (192.0.0.192), and translators on the machine itself (RFC 7335)
            "fd00:42::42",  # Scaleway
            "fd00:a9fe:a9fe::/48",  # Akamai
            "fd00:c1::a9fe:a9fe",  # Oracle
            "fd00:ec2::/32",  # AWS: metadata, credentials of pods, DNS, time
            "fd20:ce::254",  # Google
        ),
    )
)
NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052
LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # RFC 8215
ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214: before the IPv4 address in the lower half
# Where an IPv4 address stands in a local prefix of NAT64 (RFC 6052, 2.2): zero bits behind it, parts as (shift, bits).
_LAYOUTS = ((40, (64, 16), (40, 16)), (32, (64, 8), (32, 24)), (24, (24, 32)), (0, (0, 32)))


def is_allowed(name: str, address: str) -> bool:
    """`address`: an answer for the host name."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or IPv6Address(int(ip))  # without the scope, which no comparison expects
    if ip.is_loopback:
        return name == "localhost" or name.endswith(".localhost") or name in _own_names()
    if isinstance(ip, IPv4Address):
        return _is_elsewhere(ip)
    if ip in NAT64:
        return _is_elsewhere(_last_bits(ip))
    if ip in LOCAL_NAT64:
        return _is_elsewhere(_in_local_prefix(int(ip)))
    inside = _tunneled(ip)
    return _is_elsewhere(ip) and (inside is None or _is_elsewhere(inside))


def _is_elsewhere(ip: IPv4Address | IPv6Address) -> bool:
    """Of another machine, beyond the link."""
    here = ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved
    return not here and not any(ip in network for network in SERVICES)


def _tunneled(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address of the end of the tunnel to this address; None: no tunnel is known by it."""
    if int(ip) >> 32 & 0xFFFFFFFF in ISATAP:
        return _last_bits(ip)
    return ip.sixtofour if ip.teredo is None else ip.teredo[1]


def _last_bits(ip: IPv6Address) -> IPv4Address:
    return IPv4Address(int(ip) & 0xFFFFFFFF)


def _in_local_prefix(ip: int) -> IPv4Address:
    """By the shortest prefix behind whose IPv4 address all is zero."""
    parts = next(parts for zeros, *parts in _LAYOUTS if not ip & ((1 << zeros) - 1))
    value = 0
    for shift, bits in parts:
        value = value << bits | ip >> shift & ((1 << bits) - 1)
    return IPv4Address(value)


@cache
def _own_names() -> frozenset[str]:
    own = gethostname().lower()
    return frozenset({own, own.partition(".")[0]})
