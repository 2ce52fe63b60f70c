"""Connections, dialect and configured values of an endpoint; with a caller's own key, where the pool takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, Operation
from policies.types import Price

EVERYWHERE = (Operation.CHAT, Operation.COMPLETION)  # served by every backend: a 404 is the server's fault


@dataclass(frozen=True, slots=True)
class Upstream:
    """Connections to an endpoint, and the dialect of the server."""

    connections: ConnectionPool
    backend: Backend
    model: str
    pool: str = ""
    kv_events: bool = False  # the engine publishes cache events, in which the session id names the request
    priority: bool = False  # the engine schedules by priority
    traced: bool = True  # the endpoint gets the trace context, with tracing on
    price: Price = field(default_factory=Price)


class KeyedUpstreams(Mapping[str, Upstream]):
    """The upstreams of a request with a caller's own key, by endpoint id. `header`: in which the caller has sent it."""

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
