"""Exports through opentelemetry-sdk: no collector fault affects requests, and lost spans are counted."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.app import Gateway
from gateway.config.config_errors import ConfigError
from gateway.observe.metrics.scrape_collectors import running_version
from gateway.observe.otel import telemetry as module
from gateway.observe.otel.spans import ServedEndpoint
from gateway.observe.otel.telemetry import FAULTS, Telemetry, make_exporter, notable, resource_of
from gateway.observe.record import AttemptRecord, RequestOutcome
from gateway.observe.trace_context import Tracer
from gateway.parts.telemetry.part import TelemetryPart
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import CHAT, STREAMED, calling, get, post, record
from tests.support.collector import Collector
from tests.support.gateways import pool, running
from tests.support.scripted_fleet import dead_url
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, Pause, Upstream, reply

TRACER = Tracer(1.0)
SPANS = 13  # of a streamed request with one attempt: the request, the attempt, all stages but two


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits of the SDK, by its own variables; metrics have separate tests."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


@asynccontextmanager
async def exporting(url: str) -> AsyncIterator[Telemetry]:
    telemetry = Telemetry(url, {})
    telemetry.start()
    try:
        yield telemetry
    finally:
        await telemetry.close()


def export(telemetry: Telemetry, count: int = 1) -> None:
    """Records of one span each."""
    for _ in range(count):
        telemetry(record(trace=TRACER.trace({})))


def counts(telemetry: Telemetry) -> tuple[int, int]:
    """Numbers of exported and lost spans."""
    exported, lost, _ = (family.samples[0].value for family in telemetry.collect())
    return int(exported), int(lost)


@asynccontextmanager
async def serving(collector_url: str) -> AsyncIterator[Gateway]:
    settings = {"access_log": "off", "otlp": collector_url, "traces": "100%"}
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=settings) as gateway,
    ):
        yield gateway


async def answered(gateway: Gateway, count: int = 10) -> bool:
    """True if all requests are answered completely."""
    for _ in range(count):
        async with asyncio.timeout(60), calling(gateway.url) as caller:
            if (await caller.ask(post({**CHAT, "stream": True})))[0] != 200 or not await caller.chunks():
                return False
    return True


# --------------------------------------------------------------------------- sampling


def attempt(number: int, kind: AttemptKind = AttemptKind.PRIMARY) -> AttemptRecord:
    return AttemptRecord(number, kind, "small/a", "small", 0.0, 1.0, AttemptOutcome.COMPLETED)


NOTABLE: dict[str, dict[str, Any]] = {
    "its first token was late": {"ttft": 0.9},
    "its tokens were slow": {"tpot_budget": 0.05, "tpot": 0.06},
    "it took too long in all": {"total_budget": 0.5},
    "it left after its budget, without a token": {"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 1.0},
    "it was sent twice": {"attempts": [attempt(1), attempt(2, AttemptKind.FALLBACK)]},
    "it was hedged": {"attempts": [attempt(1), attempt(2, AttemptKind.HEDGE)]},
    **{f"it ended as {end.value}": {"end": end, "ttft_budget": None} for end in sorted(FAULTS)},
}
USUAL: dict[str, dict[str, Any]] = {
    "it met all its budgets": {"tpot_budget": 0.05, "tpot": 0.04, "total_budget": 2.0, "attempts": [attempt(1)]},
    "it was at fault itself": {"end": RequestOutcome.REFUSED, "ttft": None},
    "its caller left in time": {"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 0.1},
    "nothing was promised": {"ttft_budget": None, "ttft": 30.0},
}


@pytest.mark.parametrize("known", NOTABLE.values(), ids=NOTABLE)
def test_notable_requests_are_always_exported(known: dict[str, Any]) -> None:
    """At any sampled share."""
    assert notable(record(**known))


@pytest.mark.parametrize("known", USUAL.values(), ids=USUAL)
def test_other_requests_are_sampled(known: dict[str, Any]) -> None:
    """No fault of the gateway or an engine."""
    assert not notable(record(**known))


# --------------------------------------------------------------------------- the collector


async def test_all_spans_are_exported_and_counted() -> None:
    """In batches; the rest at the close."""
    async with Collector() as collector:
        async with exporting(collector.url) as telemetry:
            export(telemetry, 81)
        assert len(await collector.requests(81)) == 81
        assert collector.request_count < 20
        assert counts(telemetry) == (81, 0)


COLLECTOR_FAULTS = ["refuses", "hangs", "drips its head", "drips its body", "answers 500", "answers 503", "hangs up"]


@asynccontextmanager
async def faulty_collector(collector_fault: str) -> AsyncIterator[str]:
    """The URL of a collector with the fault."""
    if collector_fault == "refuses":
        yield dead_url()
    elif collector_fault in ("drips its head", "hangs up"):
        script = [CLOSE] if collector_fault == "hangs up" else [b"HTTP/1.1 2", *[Pause(0.05), b"0"] * 200]
        async with Upstream(script) as upstream:
            yield upstream.url
    else:
        async with Collector() as collector:
            collector.hanging, collector.dripping = collector_fault == "hangs", collector_fault == "drips its body"
            collector.status = {"answers 500": 500, "answers 503": 503}.get(collector_fault, 200)
            yield collector.url


@pytest.mark.parametrize("collector_fault", COLLECTOR_FAULTS)
async def test_no_request_fails_and_the_shutdown_is_not_delayed(collector_fault: str) -> None:
    """Spans are the only loss, and each is counted."""
    async with faulty_collector(collector_fault) as url:
        async with serving(url) as gateway:
            assert await answered(gateway)
            await asyncio.wait_for(gateway.stop(), 10 * module.CLOSE_TIMEOUT)  # a collector that hangs does so for ever
        assert counts(gateway.part(TelemetryPart).telemetry) == (0, 10 * SPANS)


async def test_the_span_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond OTEL_BSP_MAX_QUEUE_SIZE no spans are created; missing spans count as lost."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with Collector() as collector:
        collector.hanging = True
        telemetry = Telemetry(collector.url, {}, {"OTEL_BSP_MAX_QUEUE_SIZE": "600", "OTEL_METRICS_EXPORTER": "none"})
        telemetry.start()
        export(telemetry, 4000)
        assert counts(telemetry) == (0, 3400)
        await telemetry.close()
        assert counts(telemetry) == (0, 4000)


async def test_outages_and_recoveries_of_the_collector_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """Down, up, down and up: four lines."""
    with caplog.at_level(logging.INFO, "firsttoken"):
        async with Collector() as collector, exporting(collector.url) as telemetry:
            for outage in range(1, 3):
                await collector.stop()
                export(telemetry, 5)
                await eventually(lambda outage=outage: counts(telemetry)[1] == 5 * outage)
                await collector.start()
                export(telemetry, 5)
                await eventually(lambda outage=outage: counts(telemetry)[0] == 5 * outage)
    lines = [entry.message for entry in caplog.records if entry.name == "firsttoken"]
    assert [line.partition(":")[0] for line in lines] == ["span export fails", "span export works again"] * 2


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_no_proxy_of_the_environment_is_used(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for backends. The proxy answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.lower(), address)
        for name in ("NO_PROXY", "no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        if protocol == "grpc":
            environ["OTEL_METRICS_EXPORTER"] = "none"
            with grpc_collector() as (grpc_receiver, url):
                telemetry = Telemetry(url, {}, environ)
                telemetry.start()
                export(telemetry, 3)
                await telemetry.close()
                assert len(grpc_receiver.spans) == 3
        else:
            async with Collector() as collector:
                telemetry = Telemetry(collector.url, {}, environ)
                telemetry.start()
                export(telemetry, 3)
                await telemetry.close()
                assert len(collector.spans) == 3
                assert collector.metrics
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()


async def test_failed_exports_are_logged_with_the_reason_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans and metrics: a collector that answers 400."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    async with Collector() as collector:
        collector.status = 400
        telemetry = Telemetry(collector.url, {}, {})
        telemetry.start()
        export(telemetry, 1)
        await eventually(lambda: sum("export fails" in line for line in caplog.messages) == 2)
        families = {family.name: family.samples[0].value for family in telemetry.collect()}
        assert families["firsttoken_otlp_metric_exports_failed"] >= 1
        await eventually(lambda: counts(telemetry)[1] == 1)
        collector.status = 200
        export(telemetry, 1)
        await eventually(lambda: sum("export works again" in line for line in caplog.messages) == 2)
        await telemetry.close()
    assert all("400" in line for line in caplog.messages if "export fails" in line)


async def test_the_sdk_logs_one_failed_batch_per_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Further batches are counted, and not logged one by one."""
    async with Collector() as collector, exporting(collector.url) as telemetry:
        seen = []
        for outage in range(1, 3):
            await collector.stop()
            for batch in range(1, 4):
                export(telemetry)
                await eventually(lambda lost=3 * (outage - 1) + batch: counts(telemetry)[1] == lost)
                seen.append(sum(entry.name.startswith("opentelemetry.exporter") for entry in caplog.records))
            await collector.start()
            export(telemetry)
            await eventually(lambda outage=outage: counts(telemetry)[0] == outage)
        assert 0 < seen[0] == seen[1] == seen[2] < seen[3] == seen[4] == seen[5]


@pytest.mark.parametrize("size", ["100", "0"])
def test_a_queue_below_the_size_of_a_batch_is_an_error_at_the_start(size: str) -> None:
    """With the variable's prefix and the SDK's reason."""
    environ = {"OTEL_BSP_MAX_QUEUE_SIZE": size, "OTEL_METRICS_EXPORTER": "none"}
    with pytest.raises(ConfigError, match=r"OTEL_BSP_\*: max_"):
        Telemetry("http://127.0.0.1:9", {}, environ).start()


async def test_prometheus_metrics_count_exported_and_lost_spans() -> None:
    """On the admin port, only if traces are configured."""
    async with Collector() as collector, serving(collector.url) as gateway:
        assert await answered(gateway, 1)
        await collector.spans_matching(1, lambda span: span.kind == Span.SPAN_KIND_SERVER)
        await eventually(lambda: counts(gateway.part(TelemetryPart).telemetry)[0] == len(collector.spans))  # type: ignore[arg-type]
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        (exported,) = [line for line in page.splitlines() if line.startswith("firsttoken_spans_exported_total ")]
        assert float(exported.split()[1]) == len(collector.spans)
        assert "firsttoken_spans_lost_total 0.0" in page
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        assert b"firsttoken_spans" not in (await get(gateway.admin_url, "/metrics"))[2]


async def test_a_record_that_cannot_be_exported_is_the_only_loss(caplog: pytest.LogCaptureFixture) -> None:
    """An internal error; other Records are exported."""
    async with Collector() as collector, exporting(collector.url) as telemetry:
        telemetry(record(trace=replace(TRACER.trace({}), id="no digits")))
        export(telemetry, 3)
        assert len(await collector.requests(3)) == 3
    assert "could not be exported" in caplog.text


# --------------------------------------------------------------------------- OTEL_* variables


def resource(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, Any]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return dict(resource_of(environ).attributes)


def test_the_service_is_firsttoken_unless_the_operator_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """service.instance.id is unique per process; configured names are kept."""
    one, other = resource(monkeypatch), resource(monkeypatch)
    assert one["service.name"] == other["service.name"] == "firsttoken"
    assert one["service.version"] == running_version()
    assert one["service.instance.id"] != other["service.instance.id"]
    given = "service.name=edge,service.instance.id=pod-7,k8s.pod.name=pod%207"
    found = resource(monkeypatch, OTEL_RESOURCE_ATTRIBUTES=given)
    assert [found[name] for name in ("service.name", "service.instance.id", "k8s.pod.name")] == [
        "edge",
        "pod-7",
        "pod 7",
    ]
    assert resource(monkeypatch, OTEL_RESOURCE_ATTRIBUTES=given, OTEL_SERVICE_NAME="front")["service.name"] == "front"


@pytest.mark.parametrize("variable", ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"])
def test_a_certificate_that_cannot_be_read_is_an_error_at_the_start(variable: str) -> None:
    """The error names the variable."""
    with pytest.raises(ConfigError, match=f"OTEL_EXPORTER_OTLP_{variable}"):
        Telemetry("https://collector", {}, {f"OTEL_EXPORTER_OTLP_{variable}": "/nowhere"}).start()


def test_exporters_are_chosen_by_the_standard_variables() -> None:
    """`none` has none, an installed exporter is found by its entry point, an unknown exporter is an error."""
    assert make_exporter("traces", "http://c:4318", {"OTEL_TRACES_EXPORTER": "none"}) is None
    console = make_exporter("traces", "http://c:4318", {"OTEL_TRACES_EXPORTER": "console"})
    assert type(console).__name__ == "ConsoleSpanExporter"
    with pytest.raises(ConfigError, match="OTEL_METRICS_EXPORTER: no installed package provides the exporter 'odd'"):
        make_exporter("metrics", "http://c:4318", {"OTEL_METRICS_EXPORTER": "odd"})


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.spans += [span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[tuple[GrpcCollector, str]]:
    servicer, server = GrpcCollector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


async def test_grpc_is_spoken_where_the_operator_asks_for_it() -> None:
    """OTEL_EXPORTER_OTLP_PROTOCOL, against a real gRPC server."""
    with grpc_collector() as (collector, url):
        environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "none"}
        telemetry = Telemetry(url, {}, environ)
        telemetry.start()
        export(telemetry, 3)
        await telemetry.close()
    assert (len(collector.spans), counts(telemetry)) == (3, (3, 0))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost, with its key."""
    path = tmp_path / "localhost.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(["openssl", *options.split(), *names], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize("trusted", [True, False])
async def test_the_certificate_of_a_collector_is_verified(
    trusted: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system's certificates, or by the one that OTEL_EXPORTER_OTLP_CERTIFICATE names."""
    for overriding in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # of the exporter's HTTP library
        monkeypatch.delenv(overriding, raising=False)
    if trusted:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with Upstream([reply()], tls=context) as upstream, exporting(upstream.url) as telemetry:
        export(telemetry)
        await eventually(lambda: sum(counts(telemetry)) == 1)
    assert counts(telemetry) == ((1, 0) if trusted else (0, 1))
    assert len(upstream.requests) == (1 if trusted else 0)


def test_endpoints_are_forgotten_by_the_second_reload_without_them() -> None:
    """Attempts at those that the last reload has removed may still end."""
    telemetry = Telemetry("http://127.0.0.1:9", {}, {})
    served = ServedEndpoint("vllm", "served", "10.0.0.1", 8000)
    for number in range(100):
        telemetry.reload({f"small/{number}": served})
    assert telemetry.endpoints.keys() == {"small/98", "small/99"}
