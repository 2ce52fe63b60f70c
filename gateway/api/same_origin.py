"""Refusal of requests that a web page sends without its reader's knowledge, where no key protects a port.

- DNS rebinding: a page's own host name is made to resolve to this machine. The browser then sends that name as `Host`,
  so names that anyone may register are refused. No page of another machine has an IP address of ours as its host.
- Cross-site requests: a page may send a POST of `text/plain` to any address. The browser adds the page's `Origin`.

Callers that are no browsers send no `Origin`, and reach the port by an address or by a name known here.

By cross-origin resource sharing, web pages of listed origins may read answers of the data port (fetch.spec.whatwg.org).
Cookies and other credentials of a browser are never asked for: a page sends its key in a header. So every header may be
exposed, and `*` may be an origin, where callers need a key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from gateway.api.api_error import ApiError

MAX_AGE = 7200  # s for which a browser may keep the answer to a preflight; Chromium's maximum
ANY = "*"
ASKED_METHOD = "access-control-request-method"  # makes an OPTIONS a preflight


class Cors:
    """`origins`: as browsers write them; `*` is every origin."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins

    def lines(self, headers: Mapping[str, str]) -> tuple[str, ...]:
        """Header lines of every reply to a request with these headers."""
        if ANY in self._origins:
            return _shared_with(ANY)
        origin = headers.get("origin", "")
        return (*(_shared_with(origin) if origin in self._origins else ()), "vary: origin")

    def preflight(self, headers: Mapping[str, str], methods: Sequence[str]) -> tuple[str, ...]:
        """Header lines of the answer to a preflight of an allowed origin, which may send any header: SDKs have many."""
        return (
            f"access-control-allow-methods: {', '.join(methods)}",
            f"access-control-allow-headers: {headers.get('access-control-request-headers', '')}",
            f"access-control-max-age: {MAX_AGE}",
        )


def _shared_with(origin: str) -> tuple[str, ...]:
    return (
        f"access-control-allow-origin: {origin}",
        "access-control-expose-headers: *",
        f"timing-allow-origin: {origin}",
    )


# RFC 9112, section 3.2, and RFC 3986, section 3.2.2: a name or an address, and a port.
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::([0-9]*))?")
PRIVATE_SUFFIXES = (".svc", ".cluster.local", ".internal")  # of names not open to registration


class SameOrigin:
    """`loopback`: the port is reachable from this machine only, by names of this machine and `names`. Otherwise also
    by any address, by names without a dot (containers, short names of a cluster) and by private names. Pages of the
    origins in `cors` may send requests; the check of `Host` applies to them too."""

    def __init__(self, loopback: bool, names: Iterable[str] = (), cors: Cors | None = None) -> None:
        self.loopback = loopback
        self.cors = cors
        self.names = frozenset(name.lower() for name in names)
        self._latest: str | None = None  # the latest host found to be known: callers repeat themselves

    def check(self, headers: Mapping[str, str], transport: asyncio.BaseTransport) -> None:
        """Raises ApiError (403). `headers`: names in lower case. HTTP/1.0, which no browser speaks, has no `Host`."""
        host = headers.get("host")
        if host is not None and host != self._latest:
            if not self._known(host):
                message = "The Host header is no name of this gateway; list it in server.hosts, or require keys."
                raise ApiError(403, message, code="host_not_allowed", close=True)
            self._latest = host
        origin = headers.get("origin")
        if origin is not None and not self._own(origin, host or "", transport.get_extra_info("sockname")[1]):
            message = "Pages of other origins may not use this port without an API key."
            raise ApiError(403, message, code="origin_not_allowed", close=True)

    def _own(self, origin: str, host: str, port: int) -> bool:
        """A page of a listed origin, or one that came from this port: under the same name, be it through a tunnel, or
        under another of our names."""
        if self.cors is not None and self.cors.allows(origin):
            return True
        try:
            page = urlsplit(origin)
            return page.netloc.lower() == host.lower() or (page.port == port and self._listed(page.netloc))
        except ValueError:
            return False

    def _known(self, host: str) -> bool:
        """`host`: a name or an address, and a port."""
        name = _name(host)
        if self.loopback or not name or self._listed(host):
            return self._listed(host)
        return _address(name) is not None or "." not in name or name.endswith(PRIVATE_SUFFIXES)

    def _listed(self, host: str) -> bool:
        name = _name(host)
        address = _address(name)
        return name == "localhost" or name in self.names or (address is not None and address.is_loopback)


def _name(host: str) -> str:
    """Lower case, without the port; empty where the value is no host."""
    found = HOST.fullmatch(host)
    return "" if found is None else found[1].lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
