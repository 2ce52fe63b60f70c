"""Exports Records through opentelemetry-sdk: spans by a BatchSpanProcessor, GenAI metrics by a MeterProvider.

Rules:
- Exporters are the standard exporters, selected by OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER and
  OTEL_EXPORTER_OTLP_PROTOCOL (entry points: any installed exporter works), and configured by the other OTEL_*
  variables. `telemetry.otlp` is the endpoint unless OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or _METRICS_ENDPOINT is set.
- Sampling is decided twice: at the start by the trace id or the caller, and passed to engines; at the end every
  notable request is added, without the engine's own span.
- HTTP_PROXY and the like are not read, as for backends: an exporter connects to the collector itself.
- Exporting happens in the SDK's threads. An absent, slow or hung collector costs spans (counted as lost), never a
  request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any
from uuid import uuid4

import requests
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.config.config_errors import ConfigError
from gateway.observe.metrics.scrape_collectors import running_version
from gateway.observe.metrics.series import totals
from gateway.observe.otel.genai_metrics import ExportWatch, GenAiMetrics
from gateway.observe.otel.spans import ServedEndpoint, SpanFactory
from gateway.observe.record import FAULTS, Record

log = logging.getLogger("firsttoken")
SDK_LOG = logging.getLogger("opentelemetry.exporter")

NAME = "firsttoken"
QUEUE = 16_384  # maximum of waiting spans, unless OTEL_BSP_MAX_QUEUE_SIZE is set: about 25 MB
_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")  # OTEL_EXPORTER_OTLP_* that name files
MAX_REASON = 300  # characters of a reason in the log
CLOSE_TIMEOUT = 2.0  # s for the last exports at shutdown


def notable(record: Record) -> bool:
    """True for requests that missed a budget, failed, were shed or were sent more than once: always exported."""
    return record.end in FAULTS or len(record.attempts) > 1 or False in record.verdicts


class LastReason(logging.Handler):
    """Keeps the last lines of the SDK's exporters, the reason of a try and that of the end: their results have none."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines = deque(("no reason is known",), maxlen=2)

    @property
    def text(self) -> str:
        return "; ".join(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(" ".join(record.getMessage().split())[:MAX_REASON])


class CountingExporter(SpanExporter):
    """Counts the spans of another exporter, and logs when exports start to fail and when they succeed again.

    Meanwhile the log lines of the SDK's exporters, one per failed batch, are left out.
    """

    def __init__(self, exporter: SpanExporter, reason: LastReason) -> None:
        self.exporter = exporter
        self.exported = self.lost = 0
        self.failing = False
        self._reason = reason
        SDK_LOG.addHandler(reason)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self.exporter.export(spans)
        except Exception:
            log.exception("the span exporter failed")
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self.lost += len(spans)
        else:
            self.exported += len(spans)
        if failed and not self.failing:
            text = "span export fails: spans are lost until the collector accepts them again (%s)"
            log.warning(text, self._reason.text)
            SDK_LOG.propagate = False
        elif self.failing and not failed:
            log.warning("span export works again")
            SDK_LOG.propagate = True
        self.failing = failed
        return result

    def shutdown(self) -> None:
        SDK_LOG.propagate = True
        SDK_LOG.removeHandler(self._reason)
        self.exporter.shutdown()


class Telemetry(Collector):
    """A sink of Records, from `start` to `close`; collects the counts of exported and lost spans for Prometheus.

    `url`: of the OTLP collector. `endpoints`: span attributes by endpoint id.
    """

    def __init__(
        self, url: str, endpoints: Mapping[str, ServedEndpoint], environ: Mapping[str, str] = os.environ
    ) -> None:
        self.url = url
        self.environ = environ
        self.endpoints = {**endpoints}
        self._served = {*endpoints}  # by the latest reload
        self.metrics: GenAiMetrics | None = None
        self._uncounted = deque[Record]()  # by `metrics`
        self.exporter: CountingExporter | None = None
        self._processor: BatchSpanProcessor | None = None
        self._meters: MeterProvider | None = None
        self._metric_exports: ExportWatch | None = None
        self._factory: SpanFactory | None = None
        self._reason = LastReason()
        self._capacity = 0  # spans
        self._offered = 0  # spans handed to the processor
        self._dropped = 0  # spans not handed over because the queue was full
        self._closed = False

    def reload(self, endpoints: Mapping[str, ServedEndpoint]) -> None:
        """Replace the endpoints. Attempts at those of the reload before may still end; older ones are forgotten."""
        gone = self.endpoints.keys() - self._served - endpoints.keys()
        self._served = {*endpoints}
        for endpoint in gone:
            del self.endpoints[endpoint]
        self.endpoints.update(endpoints)

    def start(self) -> None:
        """Starts the SDK's threads, so call after a fork. Raises ConfigError for an impossible exporter."""
        resource, scope = resource_of(self.environ), InstrumentationScope(NAME, running_version())
        self._factory = SpanFactory(resource, scope, self.endpoints)
        if (exporter := make_exporter("traces", self.url, self.environ)) is not None:
            self.exporter = CountingExporter(exporter, self._reason)
            capacity = self.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
            self._capacity = int(capacity) if capacity.isdecimal() else QUEUE
            try:
                self._processor = BatchSpanProcessor(self.exporter, max_queue_size=self._capacity)
            except ValueError as error:
                raise ConfigError([f"OTEL_BSP_*: {error}"]) from None
        if (metric_exporter := make_exporter("metrics", self.url, self.environ)) is not None:
            self._metric_exports = ExportWatch(metric_exporter, self._reason)
            try:
                reader = PeriodicExportingMetricReader(metric_exporter)
            except ValueError as error:
                raise ConfigError([f"OTEL_METRIC_EXPORT_INTERVAL: {error}"]) from None
            self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
            self.metrics = GenAiMetrics(self._meters.get_meter(NAME, running_version()), self.endpoints)
            SDK_LOG.addHandler(self._reason)

    async def close(self) -> None:
        """Exports the rest for CLOSE_TIMEOUT seconds at most: a hung collector does not delay the end."""
        while self._uncounted:
            self._count()
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            parts: tuple[Any, ...] = self._processor, self._meters  # the second is untyped
            for part in parts:
                if part is not None:
                    part.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="otel-shutdown", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), CLOSE_TIMEOUT)
        except TimeoutError:
            log.warning("telemetry was not exported within %g s of the shutdown", CLOSE_TIMEOUT)
        SDK_LOG.removeHandler(self._reason)
        self._closed = True  # spans that still wait are lost

    def __call__(self, record: Record) -> None:
        try:
            if record.trace is not None and (record.trace.sampled or notable(record)):
                self._export(record)
        except Exception:
            log.exception("a Record could not be exported")
        if self.metrics is not None:
            self._uncounted.append(record)
            if len(self._uncounted) == 1:
                asyncio.get_running_loop().call_soon(self._count_next)

    def _count_next(self) -> None:
        """Count one Record in a turn of the event loop: a Record takes the SDK 0.15 ms, and Records come in batches."""
        self._count()
        if self._uncounted:
            asyncio.get_running_loop().call_soon(self._count_next)

    def _count(self) -> None:
        if self._uncounted and self.metrics is not None:
            try:
                self.metrics.count(self._uncounted.popleft())
            except Exception:
                log.exception("a Record could not be counted")

    def _export(self, record: Record) -> None:
        if self._processor is None or self.exporter is None or self._factory is None or record.trace is None:
            return
        count = 1 + len(record.attempts) + sum(seconds is not None for seconds in record.spent)
        waiting = self._offered - self.exporter.exported - self.exporter.lost
        if waiting + count > self._capacity:  # the processor would drop older spans without counting them
            self._dropped += count
            return
        self._offered += count
        for span in self._factory.spans(record, record.trace):
            self._processor.on_end(span)

    def collect(self) -> Iterable[Metric]:
        exported, lost = (0, 0) if self.exporter is None else (self.exporter.exported, self.exporter.lost)
        if self._closed:
            lost = self._offered - exported
        yield from totals("firsttoken_spans_exported_total", [((), exported)])
        yield from totals("firsttoken_spans_lost_total", [((), self._dropped + lost)])
        failed = 0 if self._metric_exports is None else self._metric_exports.failed
        yield from totals("firsttoken_otlp_metric_exports_failed_total", [((), failed)])


def resource_of(environ: Mapping[str, str]) -> Resource:
    """The SDK's resource, detectors included; each process is an instance, unless the operator names the instance."""
    named = {part.partition("=")[0].strip() for part in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    own = {SERVICE_VERSION: running_version(), SERVICE_INSTANCE_ID: str(uuid4())}
    if not environ.get("OTEL_SERVICE_NAME"):
        own[SERVICE_NAME] = NAME
    return Resource.create({name: value for name, value in own.items() if name not in named})


def make_exporter(signal: str, url: str, environ: Mapping[str, str]) -> Any:
    """The exporter of `traces` or `metrics` that OTEL_*_EXPORTER names (default `otlp`); None for `none`."""
    kind = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").strip() or "otlp"
    if kind == "none":
        return None
    arguments: dict[str, Any] = {}
    if kind == "otlp":
        common = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", common).strip()
        kind = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        arguments.update(_without_proxy(signal, protocol, environ))
        if not environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
            arguments["endpoint"] = url if protocol == "grpc" else f"{url}/v1/{signal}"
    found = entry_points(group=f"opentelemetry_{signal}_exporter", name=kind)
    for variable in _FILES:
        path = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{variable}") or environ.get(
            f"OTEL_EXPORTER_OTLP_{variable}"
        )
        if path and not os.access(path, os.R_OK):
            raise ConfigError([f"OTEL_EXPORTER_OTLP_{variable}: the file {path} cannot be read"])
    if not found:
        raise ConfigError([f"OTEL_{signal.upper()}_EXPORTER: no installed package provides the exporter '{kind}'"])
    try:
        return next(iter(found)).load()(**arguments)
    except (OSError, ValueError) as error:
        raise ConfigError([f"telemetry.otlp: the {signal} exporter cannot be made: {error}"]) from None


def _without_proxy(signal: str, protocol: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of an OTLP exporter that reads no proxy from the environment. A session of the operator's own stays."""
    if protocol == "grpc":
        return {"channel_options": (("grpc.enable_http_proxy", 0),)}
    own = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"
    if environ.get(own.format("")) or environ.get(own.format(f"{signal.upper()}_")):
        return {}
    session = requests.Session()
    session.trust_env = False
    return {"session": session}
