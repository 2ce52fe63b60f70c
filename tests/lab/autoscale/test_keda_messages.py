"""Messages of the external scaler, against KEDA's own definitions."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.autoscale.keda_messages import (
    decode_metrics_request,
    decode_scaled_object,
    is_active,
    metric_spec,
    metric_value,
)
from tests.support.external_scaler import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    ScaledObjectRef,
)

TEXT = st.text(max_size=20)


@given(TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=4))
def test_a_scaled_object_is_read_as_keda_writes_it(name: str, namespace: str, metadata: dict[str, str]) -> None:
    sent = ScaledObjectRef(name=name, namespace=namespace, scalerMetadata=metadata)
    for found in (
        decode_scaled_object(sent.SerializeToString()),
        decode_metrics_request(GetMetricsRequest(scaledObjectRef=sent, metricName="m").SerializeToString()),
    ):
        assert (found.name, found.namespace, dict(found.metadata)) == (name, namespace, metadata)


@given(st.floats(min_value=0, max_value=1e6))
def test_replies_are_read_by_keda_with_the_exact_value(value: float) -> None:
    [metric] = GetMetricsResponse.FromString(metric_value("replicas", value)).metricValues
    assert (metric.metricName, metric.metricValueFloat, metric.metricValue) == ("replicas", value, round(value))
    [spec] = GetMetricSpecResponse.FromString(metric_spec("replicas", 1.0)).metricSpecs
    assert (spec.metricName, spec.targetSizeFloat, spec.targetSize) == ("replicas", 1.0, 1)
    assert [IsActiveResponse.FromString(is_active(active)).result for active in (True, False)] == [True, False]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    for decode in (decode_scaled_object, decode_metrics_request):
        with suppress(ValueError):
            assert all(isinstance(text, str) for text in decode(data).metadata.values())


def test_a_number_in_place_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a number in place of bytes"):
        decode_scaled_object(b"\x08\x01")
