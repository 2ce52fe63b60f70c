"""Span attributes of the endpoints in force. OpenTelemetry is an optional dependency, imported here on use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.upstream.upstream import Upstream

if TYPE_CHECKING:
    from gateway.observe.otel.spans import ServedEndpoint


def served_endpoints(upstreams: Mapping[str, Upstream]) -> dict[str, ServedEndpoint]:
    """Span attributes of each endpoint."""
    from gateway.observe.otel.spans import PROVIDERS, ServedEndpoint

    found = {}
    for endpoint, upstream in upstreams.items():
        address, kind = upstream.connections.address, upstream.backend.kind
        found[endpoint] = ServedEndpoint(PROVIDERS.get(kind, kind), upstream.model, address.host, address.port)
    return found
