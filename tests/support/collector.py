"""An OpenTelemetry collector in the test's process: a real OTLP receiver over HTTP, with injected failures.

async with Collector() as collector:
    ...                                     # telemetry: {"otlp": collector.url}
    trace = await collector.trace(of_record)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.simulated import eventually

ENGINES = ("llm_request",)  # spans of vLLM

Attributes = dict[str, Any]


def read(attributes: Iterable[KeyValue]) -> Attributes:
    """As a dictionary; a duplicate name is an error."""
    found: Attributes = {}
    for attribute in attributes:
        assert attribute.key not in found, attribute.key
        found[attribute.key] = getattr(attribute.value, attribute.value.WhichOneof("value"))
    return found


class Trace:
    """Spans of one request, without the engine's spans."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = [span for span in spans if span.name not in ENGINES]
        (self.request,) = (span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER)
        self.stages = [span for span in self.spans if span.kind == Span.SPAN_KIND_INTERNAL]
        self.attempts = [span for span in self.spans if span.kind == Span.SPAN_KIND_CLIENT]


class Collector:
    """`spans`, `metrics`: accepted reports. Injected failures: `status` other than 200, `hanging` (no answer),
    `dripping` (endless answer), `reject` (number of rejected spans)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: list[list[Metric]] = []  # by report
        self.resources: list[Attributes] = []
        self.headers: list[dict[str, str]] = []
        self.request_count = 0  # requests, accepted or not
        self.status, self.more = 200, dict[str, str]()
        self.hanging = self.dripping = False
        self.reject = 0
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Collector:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """On the former port, if started before."""
        app = web.Application(client_max_size=64_000_000)
        app.router.add_post("/v1/traces", self._traces)
        app.router.add_post("/v1/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self._port))
        self._port = sock.getsockname()[1]
        await web.SockSite(self._runner, sock).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- reports -----------------------------------------------------------------------------

    async def spans_matching(self, count: int, matches: Callable[[Span], bool] = lambda span: True) -> list[Span]:
        """Wait for `count` spans that match."""
        await eventually(lambda: sum(map(matches, self.spans)) >= count)
        return [span for span in self.spans if matches(span)]

    async def requests(self, count: int) -> list[Span]:
        return await self.spans_matching(count, lambda span: span.kind == Span.SPAN_KIND_SERVER)

    async def trace(self, id: str, spans: int = 1) -> Trace:
        """A trace with so many spans at least: they may come in several reports, the request's first."""
        found = await self.spans_matching(spans, lambda span: span.trace_id.hex() == id and span.name not in ENGINES)
        return Trace(found)

    async def metric(self, name: str) -> Metric:
        """From the latest report with this name."""
        await eventually(lambda: any(metric.name == name for report in self.metrics for metric in report))
        found = [metric for report in self.metrics for metric in report if metric.name == name]
        return found[-1]

    # -- answers -----------------------------------------------------------------------------

    async def _traces(self, http: web.Request) -> web.StreamResponse:
        request = ExportTraceServiceRequest.FromString(await http.read())  # aiohttp has undone the compression
        if (refused := await self._injected_failure(http)) is not None:
            return refused
        for resource in request.resource_spans:
            self.resources.append(read(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        partial = ExportTracePartialSuccess(rejected_spans=self.reject, error_message="no room" if self.reject else "")
        return web.Response(body=ExportTraceServiceResponse(partial_success=partial).SerializeToString())

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        request = ExportMetricsServiceRequest.FromString(await http.read())
        if (refused := await self._injected_failure(http)) is not None:
            return refused
        for resource in request.resource_metrics:
            self.resources.append(read(resource.resource.attributes))
            self.metrics.append([metric for scope in resource.scope_metrics for metric in scope.metrics])
        return web.Response()

    async def _injected_failure(self, http: web.Request) -> web.StreamResponse | None:
        self.request_count += 1
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        if self.hanging:
            await asyncio.Event().wait()
        if self.dripping:
            reply = web.StreamResponse()
            await reply.prepare(http)
            while True:
                await reply.write(b"\0")
                await asyncio.sleep(0.01)
        return None if self.status == 200 else web.Response(status=self.status, headers=self.more)
