"""What OpenTelemetry's own variables say: of us, of the way to the collector, and of what it is told."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from gateway.config.config_errors import ConfigError
from gateway.observe.otel import otlp
from gateway.observe.otel import otlp_settings as collector
from gateway.observe.otel.telemetry import Telemetry
from gateway.observe.otel.trace_context import Tracer
from tests.gateway.builders import record
from tests.support.collector import read
from tests.support.simulated import eventually
from tests.support.upstream import Upstream, reply


def named(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, object]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return read(collector.resource(environ).attributes)


def test_we_are_firsttoken_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process an instance of its own; a name that is given stands."""
    one, other = named(monkeypatch), named(monkeypatch)
    assert one["service.name"] == other["service.name"] == "firsttoken"
    assert one["service.version"] == collector.release()
    assert one["service.instance.id"] != other["service.instance.id"]
    given = "service.name=edge,service.instance.id=pod-7,k8s.pod.name=pod%207"
    told = named(monkeypatch, OTEL_RESOURCE_ATTRIBUTES=given)
    assert [told[name] for name in ("service.name", "service.instance.id", "k8s.pod.name")] == [
        "edge",
        "pod-7",
        "pod 7",
    ]
    assert named(monkeypatch, OTEL_RESOURCE_ATTRIBUTES=given, OTEL_SERVICE_NAME="front")["service.name"] == "front"


def test_a_signals_own_variable_comes_before_the_common_one() -> None:
    """As the OTLP exporter's specification has it."""
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "a=1,b=x%2Cy",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=2",
        "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "none",
    }
    assert collector.headers("TRACES", environ)["a"] == "2"
    assert (collector.headers("METRICS", environ)["a"], collector.headers("METRICS", environ)["b"]) == ("1", "x,y")
    assert (collector.compresses("TRACES", environ), collector.compresses("METRICS", environ)) == (True, False)
    assert collector.headers("TRACES", {}) == {"user-agent": f"firsttoken/{collector.release()}"}


def test_how_often_metrics_are_told() -> None:
    """Every minute, or as many milliseconds as are asked for; nonsense is not."""
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    assert [collector.interval({name: text}) for text in ("", "5000", "often", "0")] == [60.0, 5.0, 60.0, 0.1]
    assert [collector.reports_metrics(e) for e in ({}, {"OTEL_METRICS_EXPORTER": "none"})] == [True, False]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of localhost, with its key."""
    path = tmp_path / "localhost.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            path,
            "-out",
            f"{path}.crt",
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def test_a_certificate_that_is_not_there_is_said_at_the_start(certificate: Path) -> None:
    """By the variable that may be wrong, before anybody is served."""
    key = {"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificate)}
    assert collector.tls(key)
    for wrong in ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere"}, {**key, "OTEL_EXPORTER_OTLP_CLIENT_KEY": __file__}):
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
            Telemetry("https://collector", {}, wrong)


async def test_a_collector_behind_tls_is_verified(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's certificates, or by the one that is named."""
    monkeypatch.setattr(otlp, "LINGER", 0.01)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    for named, taken in ((True, 1), (False, 0)):
        if named:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
        else:
            monkeypatch.delenv("OTEL_EXPORTER_OTLP_CERTIFICATE")
        async with Upstream([reply()], tls=context) as upstream:
            telemetry = Telemetry(upstream.url, {})
            telemetry.start()
            telemetry(record(trace=Tracer(1.0).trace({})))
            telemetry.flush()
            queue = telemetry._queue
            assert queue is not None
            await eventually(lambda queue=queue: queue.exported or queue.state.failing)
            await telemetry.close()
        assert (queue.exported, len(upstream.requests)) == (taken, taken)
