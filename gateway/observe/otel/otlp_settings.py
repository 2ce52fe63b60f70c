"""How a collector is reached and who tells it: `telemetry.otlp`, and what OpenTelemetry's own variables add to it.

Honoured: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS and _COMPRESSION with their variants
for traces and metrics, OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE and _CLIENT_KEY, OTEL_METRICS_EXPORTER=none,
OTEL_METRIC_EXPORT_INTERVAL. Where to send is said by the configuration alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from uuid import uuid4

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.sdk.resources import Resource as Detected
from opentelemetry.util.re import parse_env_headers

from gateway.config.config_errors import ConfigError

NAME = "firsttoken"
EXPORTER = "OTEL_EXPORTER_OTLP"
INTERVAL = 60.0  # s between two reports of metrics


def release() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "unknown"


def scope() -> InstrumentationScope:
    return InstrumentationScope(name=NAME, version=release())


def resource(environ: Mapping[str, str]) -> Resource:
    """Who tells: each process of its own, unless the operator names it. Reads the environment itself, too."""
    own = {"service.version": release(), "service.instance.id": str(uuid4())}
    if not environ.get("OTEL_SERVICE_NAME"):
        own["service.name"] = NAME
    named = {part.partition("=")[0].strip() for part in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    found = Detected.create({name: value for name, value in own.items() if name not in named})
    return Resource(attributes=[KeyValue(key=name, value=_value(value)) for name, value in found.attributes.items()])


def _value(value: object) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return AnyValue(array_value=ArrayValue(values=map(_value, value)))
    return AnyValue(string_value=str(value))


def headers(signal: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`signal`: TRACES or METRICS. A collector's key is in them: they are not to be shown."""
    told = environ.get(f"{EXPORTER}_{signal}_HEADERS") or environ.get(f"{EXPORTER}_HEADERS", "")
    return {"user-agent": f"{NAME}/{release()}", **parse_env_headers(told, liberal=True)}


def compresses(signal: str, environ: Mapping[str, str]) -> bool:
    """Unless told otherwise: it is cheap, and spans are repetitive."""
    told = environ.get(f"{EXPORTER}_{signal}_COMPRESSION") or environ.get(f"{EXPORTER}_COMPRESSION", "gzip")
    return told.strip().lower() != "none"


def tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Raises ConfigError where a file that is named cannot be used."""
    trusted, own = environ.get(f"{EXPORTER}_CERTIFICATE"), environ.get(f"{EXPORTER}_CLIENT_CERTIFICATE")
    try:
        context = ssl.create_default_context(cafile=trusted or None)
        if own:
            context.load_cert_chain(own, environ.get(f"{EXPORTER}_CLIENT_KEY") or None)
    except OSError as error:
        named = f"{EXPORTER}_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY"
        raise ConfigError([f"telemetry.otlp: {named} is not a file of certificates or keys: {error}"]) from None
    return context


def reports_metrics(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_METRICS_EXPORTER", "otlp").strip().lower() != "none"


def interval(environ: Mapping[str, str]) -> float:
    """Seconds; the variable is in milliseconds."""
    told = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return max(int(told) / 1e3, 0.1) if told.isdecimal() else INTERVAL
