"""OpenTelemetry GenAI metrics: names, values and attributes."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from backends.interface import ReplyFacts
from gateway.observe.otel.genai_metrics import GenAiMetrics
from gateway.observe.otel.spans import ServedEndpoint
from gateway.observe.record import STAGES, AttemptRecord, Record, RequestOutcome
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import record
from tests.support.collector import read

SERVED = {
    "small/a": ServedEndpoint("vllm", "served", "10.0.0.1", 8000),
    "any/c": ServedEndpoint("compatible", "", "10.0.0.3", 80),
    "api/o": ServedEndpoint("openai", "gpt", "api.openai.com", 443),
}
INFERENCE = "gen_ai.client.inference"


def attempt(
    endpoint: str = "small/a", ending: AttemptOutcome = AttemptOutcome.COMPLETED, ended: float = 1.0
) -> AttemptRecord:
    return AttemptRecord(1, AttemptKind.PRIMARY, endpoint, endpoint.partition("/")[0], 0.05, ended, ending)


def answered(**more: Any) -> Record:
    spent = [0.1 if stage.name in ("READ", "UPSTREAM") else None for stage in STAGES]
    given = {"spent": spent, "attempts": [attempt()], "operation": "chat", "tpot": 0.02, "prompt_tokens_reported": 100}
    return record(**{**given, **more})


def metrics_of(*records: Record, served: dict[str, ServedEndpoint] = SERVED) -> dict[str, Metric]:
    """As the SDK's exporters write them."""
    reader = InMemoryMetricReader()
    metrics = GenAiMetrics(MeterProvider([reader]).get_meter("us"), served)
    for each in records:
        metrics.count(each)
    data = reader.get_metrics_data()
    assert data is not None
    listed = encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
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
    points = found[f"{INFERENCE}.duration"].histogram.data_points
    same = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "served",
        "gen_ai.response.model": "served",
    }
    assert [(read(p.attributes), p.sum) for p in points] == [
        ({**same, "error.type": "failed"}, pytest.approx(0.05)),
        (same, pytest.approx(0.95)),
    ]
    (first,) = found[f"{INFERENCE}.time_to_first_chunk"].histogram.data_points
    assert (read(first.attributes), first.sum) == (same, pytest.approx(0.15))


def test_the_pace_of_an_answer_is_its_mean() -> None:
    """Chunks are not timed one by one, so none is said to be."""
    found = metrics_of(answered(output_tokens=10))
    (point,) = found["gen_ai.server.time_per_output_token"].histogram.data_points
    assert (point.count, point.sum) == (1, 0.02)
    assert not [name for name in found if "output_chunk" in name]


def test_a_whole_answer_has_no_first_token() -> None:
    """The answer arrives at once, at its end."""
    names = set(metrics_of(answered(stream=False, tpot=None)))
    assert "gen_ai.server.request.duration" in names
    assert {"gen_ai.server.time_to_first_token", f"{INFERENCE}.time_to_first_chunk"}.isdisjoint(names)


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
        for point in (*metric.histogram.data_points, *metric.sum.data_points):
            assert not {str(value) for value in read(point.attributes).values()} & {"m0", "m1", "m2"}
    assert len(metrics_of(*models)[f"{INFERENCE}.duration"].histogram.data_points) == 1


def test_tokens_are_counted_by_category_and_by_size() -> None:
    """Counters for sums; histograms for quantiles. A reply that tells of no category has no series of it."""
    told = {"cached_tokens_reported": 64, "cache_write_tokens_reported": 30, "reasoning_tokens_reported": 7}
    found = metrics_of(answered(**told), answered())
    sums = {name: m.sum.data_points[0].as_int for name, m in found.items() if m.WhichOneof("data") == "sum"}
    assert sums == {
        f"{INFERENCE}.usage.input_tokens": 200,
        f"{INFERENCE}.usage.output_tokens": 20,
        f"{INFERENCE}.usage.cache_read.input_tokens": 64,
        f"{INFERENCE}.usage.cache_write.input_tokens": 30,
        f"{INFERENCE}.usage.reasoning.output_tokens": 7,
    }
    usage = found[f"{INFERENCE}.usage.input_tokens"]
    assert (usage.sum.is_monotonic, usage.unit) == (True, "{token}")
    assert read(usage.sum.data_points[0].attributes)["gen_ai.token.modality"] == "unknown"
    (size,) = found[f"{INFERENCE}.operation.input_tokens"].histogram.data_points
    assert (size.count, size.sum) == (2, 200)
    assert "gen_ai.token.modality" not in read(size.attributes)
    assert f"{INFERENCE}.usage.reasoning.output_tokens" not in metrics_of(answered())


def test_embeddings_have_metrics_of_their_own() -> None:
    found = metrics_of(answered(operation="embeddings", stream=False, tpot=None, output_tokens=0))
    assert {name for name in found if "client" in name} == {
        "gen_ai.client.embeddings.duration",
        "gen_ai.client.embeddings.operation.input_tokens",
    }


def test_the_tier_that_openai_served_is_an_attribute() -> None:
    """Of the attempt that answered, and of OpenAI alone: no other server's text makes series."""
    facts, lost = ReplyFacts(service_tier="flex"), attempt("api/o", AttemptOutcome.FAILED, 0.1)
    found = metrics_of(answered(endpoint="api/o", attempts=[lost, attempt("api/o")], facts=facts))
    tiers = [
        read(p.attributes).get("openai.response.service_tier")
        for p in found[f"{INFERENCE}.duration"].histogram.data_points
    ]
    assert tiers == [None, "flex"]
    assert "flex" not in str(metrics_of(answered(facts=facts)))


def test_pods_that_come_and_go_make_no_series() -> None:
    """A pod is a new endpoint each time: all that ever were would be exported for ever. Spans name the address."""
    pods = {f"small/{number}": ServedEndpoint("vllm", "served", f"10.1.0.{number}", 8000) for number in range(50)}
    found = metrics_of(*(answered(endpoint=name, attempts=[attempt(name)]) for name in pods), served=pods)
    points = [(*metric.histogram.data_points, *metric.sum.data_points) for metric in found.values()]
    assert {len(each) for each in points} == {1}
