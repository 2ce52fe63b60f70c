"""Bounds of the data port's memory over all callers together, and counts of what was refused before its body.

A bound for one caller (`gateway.downstream.http_limits`) times the number of callers is no bound. A connection carries
one request at a time, so the bound of connections is that of requests in progress too.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.api.api_error import ApiError, retry_later
from gateway.observe.metrics.series import counter, gauge

MAX_CONNECTIONS = 10_000
MAX_BODY_BYTES = 256_000_000
SMALL_BODY = 64 * 1024  # bytes; counted, but never refused: a bound filled by large bodies stops no short prompt
LINGERING = 1000  # refused connections that are given the time to read the refusal
RETRY_AFTER = 1.0  # s


class Intake(Collector):
    """Connections open, and bytes of bodies of requests in progress."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_connections, self.max_body_bytes = max_connections, max_body_bytes
        self.connections = self.body_bytes = 0
        self.refused = counter("firsttoken_intake_refused_total")
        for reason in ("connections", "bodies", "head"):
            self.refused.of[(reason,)].value = 0.0

    def too_many_connections(self) -> ApiError:
        """The reason to refuse a connection above `max_connections`."""
        return self.busy("connections", f"All {self.max_connections} connections of the gateway are in use")

    def too_many_bytes(self, size: int, more: int = 0) -> ApiError | None:
        """The reason to refuse a body of `size` bytes, of which `more` are not counted yet."""
        if size <= SMALL_BODY or self.body_bytes + more <= self.max_body_bytes:
            return None
        return self.busy("bodies", "The gateway's memory for request bodies is in use")

    def busy(self, reason: str, message: str) -> ApiError:
        self.count_refused(reason)
        headers = retry_later(RETRY_AFTER)
        return ApiError(
            503, f"{message}; try again.", type="server_error", code="overloaded", headers=headers, close=True
        )

    def count_refused(self, reason: str) -> None:
        self.refused.of[(reason,)].value += 1

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_connections", [((), self.connections)])
        yield gauge("firsttoken_body_bytes", [((), self.body_bytes)])
        yield from self.refused.collect()
