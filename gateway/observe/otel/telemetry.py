"""OpenTelemetry, where the configuration asks for it: Records to spans and GenAI metrics, and these to a collector.

Which traces are told is decided twice. At the start by the trace id, or by the caller; that is what engines are told,
too. At the end all those are added that an operator will look for: see `notable`. What was not asked for in advance is
then there without the engine's own span.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from time import time

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics, ScopeMetrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import total
from gateway.observe.otel import otlp_settings as collector
from gateway.observe.otel import semconv
from gateway.observe.otel.genai_metrics import GenAi
from gateway.observe.otel.otlp import Post, Reports, SpanQueue
from gateway.observe.otel.spans import Served, Spans
from gateway.observe.record import STAGES, Record, RequestOutcome

log = logging.getLogger("firsttoken")

BATCH = 8  # Records that are made into spans at once: 0.4 ms
LINGER = 0.1  # s that a Record may wait for others
POINTS = 32  # of metrics that are made at once: 0.2 ms
FAULTS = (
    RequestOutcome.SHED,
    RequestOutcome.UNAVAILABLE,
    RequestOutcome.FAILED,
    RequestOutcome.UPSTREAM_BROKE,
    RequestOutcome.INTERNAL,
)


def notable(record: Record) -> bool:
    """Whether it is told in any case: a promise was missed, it failed, was shed, or was sent more than once."""
    return (
        record.end in FAULTS
        or len(record.attempts) > 1
        or record.ttft_met is False
        or record.tpot_met is False
        or record.total_met is False
    )


class Telemetry(Collector):
    """A sink of Records on one loop, from `start` to `close`. `url`: of the collector. What it exported and lost is
    collected for Prometheus."""

    def __init__(self, url: str, served: Mapping[str, Served], environ: Mapping[str, str] = os.environ) -> None:
        self.url, self.environ = url, environ
        self.resource, self.scope = collector.resource(environ), collector.scope()
        self.tls = collector.tls(environ) if url.startswith("https:") else True
        self._served = {**served}
        self.spans = Spans(self.resource, self.scope, self._served)
        self.metrics = GenAi(semconv.names(environ), self._served)
        self.since = _now()
        self._waiting: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._session: aiohttp.ClientSession | None = None
        self._posts: list[Post] = []
        self._queue: SpanQueue | None = None
        self._reports: Reports | None = None

    # -- its life -------------------------------------------------------------------------

    def reload(self, served: Mapping[str, Served]) -> None:
        """Other endpoints. Attempts at those that are gone may still end."""
        self._served.update(served)

    def start(self) -> None:
        """On the loop that requests live on."""
        connector = aiohttp.TCPConnector(limit=2, ssl=self.tls)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._queue = SpanQueue(self._post("traces"), rejected)
        self._queue.start()
        if collector.reports_metrics(self.environ):
            every = collector.interval(self.environ)
            self._reports = Reports(self._post("metrics"), "metrics", every, self.report)
            self._reports.start()

    def _post(self, signal: str) -> Post:
        assert self._session is not None
        headers = collector.headers(signal.upper(), self.environ)
        compress = collector.compresses(signal.upper(), self.environ)
        post = Post(f"{self.url}/v1/{signal}", headers, compress, self._session)
        self._posts.append(post)
        return post

    async def close(self) -> None:
        """What waits is sent, if the collector takes it soon."""
        self.flush()
        await asyncio.gather(*[each.close() for each in (self._queue, self._reports) if each is not None])
        for post in self._posts:
            post.close()
        if self._session is not None:
            await self._session.close()

    # -- a sink -----------------------------------------------------------------------------

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self._take()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER, self.flush)

    def flush(self) -> None:
        """All that waits, to the queue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._take()

    def _take(self) -> None:
        """A Record that cannot be told is our bug, and its own loss."""
        records, self._waiting = self._waiting, []
        for record in records:
            try:
                self.metrics.count(record)
                self._tell(record)
            except Exception:
                log.exception("a Record could not be told as spans")
        if self._queue is not None and (spans := len(self.spans)):
            self._queue.put(self.spans.take(), spans)

    def _tell(self, record: Record) -> None:
        trace = record.trace
        if self._queue is None or trace is None or not (trace.sampled or notable(record)):
            return
        if self._queue.full:  # they are not even made
            self._queue.lose(1 + len(record.attempts) + len(STAGES) - record.spent.count(None))
        else:
            self.spans.add(record, trace)

    # -- metrics --------------------------------------------------------------------------

    async def report(self) -> bytes:
        """All GenAI metrics since the start."""
        of_scope = ScopeMetrics(scope=self.scope)
        for count, _ in enumerate(self.metrics.fill(of_scope, self.since, _now()), 1):
            if count % POINTS == 0:
                await asyncio.sleep(0)
        of_resource = ResourceMetrics(resource=self.resource, scope_metrics=[of_scope])
        told: bytes = ExportMetricsServiceRequest(resource_metrics=[of_resource]).SerializeToString()
        return told

    def collect(self) -> Iterable[Metric]:
        exported, lost = (0, 0) if self._queue is None else (self._queue.exported, self._queue.lost)
        yield from total("firsttoken_spans_exported_total", exported)
        yield from total("firsttoken_spans_lost_total", lost)


def rejected(reply: bytes) -> tuple[int, str]:
    """Of a batch that was taken in part: how many spans were not, and why."""
    try:
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
    except DecodeError:  # JSON, or nothing of the protocol: it said 200
        return 0, ""
    return partial.rejected_spans, partial.error_message


def _now() -> int:
    return int(time() * 1e9)
