"""Cross-origin resource sharing: web pages of listed origins may read answers of the data port (fetch.spec.whatwg.org).

Cookies and other credentials of a browser are never asked for: a page sends its key in a header. So every header may be
exposed, and `*` may be an origin, where callers need a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
