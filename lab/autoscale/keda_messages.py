"""Messages of KEDA's external scaler (externalscaler.ExternalScaler), as values.

Decodes the two requests, and encodes each reply. Field numbers are those of KEDA's externalscaler.proto; the tests
check both directions against its definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import pack

from backends.ext_proc.protobuf import FIXED64, FieldReader, as_bytes, number, sized, varint


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """A ScaledObjectRef. `metadata`: of the trigger."""

    name: str = ""
    namespace: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


def decode_scaled_object(data: bytes) -> ScaledObject:
    """Raises ValueError."""
    fields, texts, metadata = FieldReader(), dict[int, str](), dict[str, str]()
    for key, value in fields(data):
        if key == 3:
            entry = {part: _text(inner) for part, inner in fields(as_bytes(value))}
            metadata[entry.get(1, "")] = entry.get(2, "")
        elif key in (1, 2):
            texts[key] = _text(value)
    return ScaledObject(texts.get(1, ""), texts.get(2, ""), metadata)


def decode_metrics_request(data: bytes) -> ScaledObject:
    """Of a GetMetricsRequest, whose metric has one name. Raises ValueError."""
    objects = [as_bytes(value) for key, value in FieldReader()(data) if key == 1]
    return decode_scaled_object(objects[-1] if objects else b"")


def _text(value: int | bytes) -> str:
    return as_bytes(value).decode("utf-8", "replace")


def is_active(active: bool) -> bytes:
    """An IsActiveResponse."""
    return number(1, active)


def metric_spec(name: str, target: float) -> bytes:
    """A GetMetricSpecResponse with one metric."""
    return sized(1, sized(1, name.encode()) + number(2, round(target)) + _double(3, target))


def metric_value(name: str, value: float) -> bytes:
    """A GetMetricsResponse with one metric."""
    return sized(1, sized(1, name.encode()) + number(2, round(value)) + _double(3, value))


def _double(key: int, value: float) -> bytes:
    return varint(key << 3 | FIXED64) + pack("<d", value)
