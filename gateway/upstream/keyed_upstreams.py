"""The upstreams of a request with a caller's own key, where a pool takes callers' keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gateway.upstream.upstream import Upstream


class KeyedUpstreams(Mapping[str, Upstream]):
    """By endpoint id. `header`: in which the caller has sent the key."""

    def __init__(self, upstreams: Mapping[str, Upstream], header: str, key: str) -> None:
        self._upstreams = upstreams
        self._header, self._key = header, key
        self._keyed: dict[str, Upstream] = {}

    def __getitem__(self, endpoint: str) -> Upstream:
        if (known := self._keyed.get(endpoint)) is not None:
            return known
        found = self._upstreams[endpoint]
        if not found.backend.keyed_by_callers:
            return found
        keyed = replace(found, backend=found.backend.with_key(self._header, self._key))
        return self._keyed.setdefault(endpoint, keyed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._upstreams)

    def __len__(self) -> int:
        return len(self._upstreams)
