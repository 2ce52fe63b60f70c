"""OpenTelemetry GenAI metrics: names, values and attributes."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.observe.otel.genai_metrics import GenAiMetrics, latest_names
from gateway.observe.otel.spans import ServedEndpoint
from gateway.observe.record import STAGES, AttemptRecord, Record, RequestOutcome
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import record
from tests.support.collector import read

SERVED = {
    "small/a": ServedEndpoint("vllm", "served", "10.0.0.1", 8000),
    "any/c": ServedEndpoint("compatible", "", "10.0.0.3", 80),
}


def attempt(
    endpoint: str = "small/a", ending: AttemptOutcome = AttemptOutcome.COMPLETED, ended: float = 1.0
) -> AttemptRecord:
    return AttemptRecord(1, AttemptKind.PRIMARY, endpoint, endpoint.partition("/")[0], 0.05, ended, ending)


def answered(**more: Any) -> Record:
    spent = [0.1 if stage.name in ("READ", "UPSTREAM") else None for stage in STAGES]
    given = {"spent": spent, "attempts": [attempt()], "operation": "chat", "tpot": 0.02, "prompt_tokens_reported": 100}
    return record(**{**given, **more})


def metrics_of(*records: Record, latest: bool = False) -> dict[str, Metric]:
    metrics = GenAiMetrics(SERVED, latest=latest)
    for each in records:
        metrics.count(each)
    of_scope = ScopeMetrics(InstrumentationScope("us"), metrics.metrics(), "")
    encoded = encode_metrics(MetricsData([ResourceMetrics(Resource({}), [of_scope], "")]))
    listed = encoded.resource_metrics[0].scope_metrics[0].metrics
    found = {metric.name: metric for metric in listed}
    assert len(found) == len(listed)
    return found


def of_server(**more: Any) -> dict[str, Any]:
    (point,) = metrics_of(answered(**more))["gen_ai.server.request.duration"].histogram.data_points
    return read(point.attributes)


def test_histograms_are_cumulative_with_the_buckets_of_the_conventions() -> None:
    """With explicit bounds."""
    metric = metrics_of(answered(), answered(total=3.0))["gen_ai.server.request.duration"]
    (point,) = metric.histogram.data_points
    assert metric.histogram.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert list(point.explicit_bounds) == [
        0.01,
        0.02,
        0.04,
        0.08,
        0.16,
        0.32,
        0.64,
        1.28,
        2.56,
        5.12,
        10.24,
        20.48,
        40.96,
        81.92,
    ]
    assert list(point.bucket_counts) == [0] * 7 + [1, 0, 1] + [0] * 5
    assert (point.count, point.sum, point.min, point.max) == (2, 4.0, 1.0, 3.0)
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano
    assert metric.unit == "s"


def test_an_attempt_is_counted_with_its_endpoints_attributes() -> None:
    """Lost attempts too, with error.type. The first chunk is the winning attempt's."""
    lost, won = attempt(ending=AttemptOutcome.FAILED, ended=0.1), attempt()
    found = metrics_of(answered(attempts=[lost, won]))
    points = found["gen_ai.client.operation.duration"].histogram.data_points
    same = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "served",
        "gen_ai.response.model": "served",
        "server.address": "10.0.0.1",
        "server.port": 8000,
    }
    assert [(read(p.attributes), p.sum) for p in points] == [
        ({**same, "error.type": "failed"}, pytest.approx(0.05)),
        (same, pytest.approx(0.95)),
    ]
    (first,) = found["gen_ai.client.operation.time_to_first_chunk"].histogram.data_points
    assert (read(first.attributes), first.sum) == (same, pytest.approx(0.15))


def test_time_per_output_chunk_uses_the_mean_for_every_gap() -> None:
    """Chunks are not timed one by one: sum and count are exact, the spread is not."""
    (point,) = metrics_of(answered(output_tokens=10))[
        "gen_ai.client.operation.time_per_output_chunk"
    ].histogram.data_points
    assert (point.count, point.sum) == (9, pytest.approx(0.18))
    (point,) = metrics_of(answered())["gen_ai.server.time_per_output_token"].histogram.data_points
    assert (point.count, point.sum) == (1, 0.02)


def test_a_whole_answer_has_no_first_token() -> None:
    """The answer arrives at once, at its end."""
    names = set(metrics_of(answered(stream=False, tpot=None)))
    assert "gen_ai.server.request.duration" in names
    assert {"gen_ai.server.time_to_first_token", "gen_ai.client.operation.time_to_first_chunk"}.isdisjoint(names)


def test_request_attributes_show_the_outcome() -> None:
    """error.type, if any; the provider, if the request was decided."""
    assert of_server() == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "chat",
        "gen_ai.response.model": "served",
    }
    assert of_server(end=RequestOutcome.REFUSED, status=404, endpoint="-", route="-", attempts=[], ttft=None) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "firsttoken",
        "error.type": "404",
    }
    assert of_server(end=RequestOutcome.SHED, status=429)["error.type"] == "shed"


def test_callers_cannot_create_series() -> None:
    """A caller's model name (passthrough) is in no attribute."""
    models = [answered(model=f"m{i}", endpoint="any/c", pool="any", attempts=[attempt("any/c")]) for i in range(3)]
    for metric in metrics_of(*models).values():
        for point in metric.histogram.data_points:
            assert not {str(value) for value in read(point.attributes).values()} & {"m0", "m1", "m2"}
    assert len(metrics_of(*models)["gen_ai.client.operation.duration"].histogram.data_points) == 1


def test_the_newer_conventions_count_tokens_by_type() -> None:
    """Separate counters and histograms in place of a histogram with types."""
    found = metrics_of(answered(cached_tokens_reported=64), answered(), latest=True)
    sums = {name: m.sum.data_points[0].as_int for name, m in found.items() if m.WhichOneof("data") == "sum"}
    assert sums == {
        "gen_ai.client.inference.usage.input_tokens": 200,
        "gen_ai.client.inference.usage.output_tokens": 20,
        "gen_ai.client.inference.usage.cache_read.input_tokens": 64,
    }
    assert found["gen_ai.client.inference.operation.input_tokens"].histogram.data_points[0].count == 2
    assert not [name for name in found if "client.operation" in name or "client.token" in name]


@pytest.mark.parametrize(
    ("asked", "newer"),
    [("", False), ("http", False), ("gen_ai_latest_experimental", True), ("http, gen_ai_latest_experimental", True)],
)
def test_otel_semconv_stability_opt_in_selects_the_names(asked: str, newer: bool) -> None:
    """A comma-separated list."""
    assert latest_names({"OTEL_SEMCONV_STABILITY_OPT_IN": asked}) is newer


def test_series_of_forgotten_endpoints_are_dropped_unless_another_has_their_attributes() -> None:
    """A pod is a new endpoint each time: all that ever were would be exported for ever."""
    served = dict(SERVED)
    metrics = GenAiMetrics(served)
    for number in range(50):
        name = f"small/{number}"
        served[name] = ServedEndpoint("vllm", "served", f"10.1.0.{number}", 8000)
        metrics.count(answered(endpoint=name, attempts=[attempt(name)]))
    served["small/again"] = served["small/49"]
    metrics.count(answered(endpoint="small/again", attempts=[attempt("small/again")]))
    metrics.forget([f"small/{number}" for number in range(50)])
    assert len(metrics._requests) == len(metrics._attempts) == 1
    for series in (metrics.duration, metrics.usage):
        assert {dict(attributes)["server.address"] for attributes in series.series} == {"10.1.0.49"}
