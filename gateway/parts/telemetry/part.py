"""Exports Records over OTLP. OpenTelemetry is an optional dependency, imported where `telemetry.otlp` is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.core.part import Part
from gateway.observe.trace_context import Tracer
from gateway.upstream.routed_request import Upstream
from gateway.wiring import Core

if TYPE_CHECKING:
    from gateway.observe.otel.spans import ServedEndpoint
    from gateway.observe.otel.telemetry import Telemetry


class TelemetryPart(Part):
    """`telemetry` None: there is no collector."""

    def __init__(self, core: Core) -> None:
        self._core, section = core, core.config.telemetry
        self.telemetry: Telemetry | None = None
        if section.otlp is not None:
            from gateway.observe.otel.telemetry import Telemetry

            self.telemetry = Telemetry(section.otlp, served_endpoints(core.runtime.current.upstreams))
            self.collectors, self.readers = (self.telemetry,), (self.telemetry,)
            core.proxy.tracer = Tracer(section.traces)

    async def start(self) -> None:
        if self.telemetry is not None:
            self.telemetry.start()

    def reload(self) -> None:
        if self.telemetry is not None:
            self.telemetry.reload(served_endpoints(self._core.runtime.current.upstreams))

    async def close(self) -> None:
        if self.telemetry is not None:
            self._core.recorder.flush()
            await self.telemetry.close()


def served_endpoints(upstreams: Mapping[str, Upstream]) -> dict[str, ServedEndpoint]:
    """Span attributes of each endpoint."""
    from gateway.observe.otel.spans import PROVIDERS, ServedEndpoint

    found = {}
    for endpoint, upstream in upstreams.items():
        address, kind = upstream.connections.address, upstream.backend.kind
        found[endpoint] = ServedEndpoint(PROVIDERS.get(kind, kind), upstream.model, address.host, address.port)
    return found
