"""Connections, dialect and configured values of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

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
