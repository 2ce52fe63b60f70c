"""A Record as spans: parents, times, names and attributes, decoded from the exported bytes."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.observe.otel.spans import ServedEndpoint, SpanFactory
from gateway.observe.record import STAGES, AttemptRecord, Record, RequestOutcome, Stage
from gateway.observe.trace_context import Trace
from policies.types import AttemptKind, AttemptOutcome
from tests.support import collector
from tests.support.builders import record
from tests.support.collector import read

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", 2**62, True)
SERVED = {
    "small/a": ServedEndpoint("vllm", "served", "10.0.0.1", 8000),
    "large/b": ServedEndpoint("vllm", "big", "10.0.0.2", 8000),
    "any/c": ServedEndpoint("compatible", "", "10.0.0.3", 80),
}


def attempt(number: int = 1, endpoint: str = "small/a", **more: Any) -> AttemptRecord:
    given: dict[str, Any] = {
        "kind": AttemptKind.PRIMARY,
        "opened": 0.01,
        "ended": 1.0,
        "ending": AttemptOutcome.COMPLETED,
        "upstream_id": f"req_{number}",
        **more,
    }
    return AttemptRecord(number, endpoint=endpoint, pool=endpoint.partition("/")[0], **given)


def spent(**stages: float) -> list[float | None]:
    return [stages.get(stage.name.lower()) for stage in STAGES]


def answered(**more: Any) -> Record:
    stages = spent(read=0.001, parse=0.002, queue=0.0, decide=0.007, send=0.01, upstream=0.17, relay=0.01, stream=0.8)
    return record(**{"spent": stages, "attempts": [attempt()], "operation": "chat", **more})


def sent(*records: Record, trace: Trace = TRACE) -> list[Span]:
    factory = SpanFactory(Resource({"service.name": "x"}), InstrumentationScope("us"), SERVED)
    request = encode_spans([span for each in records for span in factory.spans(each, trace)])
    (of_resource,) = request.resource_spans
    assert read(of_resource.resource.attributes) == {"service.name": "x"}
    (of_scope,) = of_resource.scope_spans
    assert of_scope.scope.name == "us"
    return list(of_scope.spans)


def tree(one: Record, trace: Trace = TRACE) -> collector.Trace:
    return collector.Trace(sent(one, trace=trace))


def test_stages_lie_end_to_end_and_sum_to_the_ttft() -> None:
    """From arrival on, in the order of the Record. A stage of zero length has a span, a stage that was never closed
    has none."""
    one = answered()
    found = tree(one)
    assert [span.name for span in found.stages] == [
        "read",
        "parse",
        "queue",
        "decide",
        "send",
        "upstream",
        "relay",
        "stream",
    ]
    assert found.stages[0].start_time_unix_nano == found.request.start_time_unix_nano == int(one.wall * 1e9)
    for before, after in zip(found.stages, found.stages[1:], strict=False):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    relay = next(span for span in found.stages if span.name == "relay")
    assert one.ttft is not None
    assert relay.end_time_unix_nano - found.request.start_time_unix_nano == pytest.approx(one.ttft * 1e9, abs=1e3)
    assert found.stages[-1].end_time_unix_nano == found.request.end_time_unix_nano


def test_stages_and_attempts_are_children_of_the_request() -> None:
    """With unique span ids; an attempt's id is the id sent to the engine."""
    one = answered(
        attempts=[attempt(1, ending=AttemptOutcome.FAILED), attempt(2, "large/b", kind=AttemptKind.FALLBACK)]
    )
    found = tree(one)
    assert {span.trace_id.hex() for span in found.spans} == {TRACE.id}
    assert found.request.span_id == TRACE.span.to_bytes(8, "big")
    assert found.request.parent_span_id == b""
    assert {span.parent_span_id for span in (*found.stages, *found.attempts)} == {found.request.span_id}
    assert len({span.span_id for span in found.spans}) == len(found.spans) == 11
    assert [f"00-{TRACE.id}-{span.span_id.hex()}-01" for span in found.attempts] == [TRACE.sent_by(1), TRACE.sent_by(2)]


def test_a_caller_s_span_is_the_parent() -> None:
    """In another process, as the flags show; tracestate is kept."""
    found = tree(answered(), Trace(TRACE.id, 5, False, 2, "00f067aa0ba902b7", "a=1"))
    assert found.request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert (found.request.flags & 0x300, found.attempts[0].flags & 0x300) == (0x300, 0x100)
    assert (found.request.trace_state, found.attempts[0].trace_state) == ("a=1", "a=1")


def test_attributes_of_a_request_span() -> None:
    """GenAI conventions, predictions and measurements."""
    found = tree(
        answered(
            tenant="web",
            tier=1,
            chance=0.9,
            ttft_predicted_p50=0.1,
            ttft_predicted_p90=0.3,
            max_tokens=50,
            prompt_tokens_estimated=120,
            cached_tokens_predicted=64,
            tpot_budget=0.05,
            tpot=0.01,
            total_budget=3.0,
            attempts=[attempt(cost_usd=0.5)],
            scorer="predicted",
            region="eu",
            loop_lag=0.25,
        )
    ).request
    assert (found.name, found.status.code) == ("chat chat", Status.STATUS_CODE_UNSET)
    assert read(found.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.response.model": "served",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "firsttoken.request.id": "req-1",
        "firsttoken.route": "chat",
        "firsttoken.workload": "chat",
        "firsttoken.tenant": "web",
        "firsttoken.outcome": "completed",
        "firsttoken.attempts": 1,
        "firsttoken.tier": 2,
        "firsttoken.pool": "small",
        "firsttoken.endpoint": "small/a",
        "firsttoken.region": "eu",
        "firsttoken.scorer": "predicted",
        "firsttoken.ttft": 0.2,
        "firsttoken.ttft.budget": 0.8,
        "firsttoken.ttft.predicted.p50": 0.1,
        "firsttoken.ttft.predicted.p90": 0.3,
        "firsttoken.ttft.met": True,
        "firsttoken.tpot": 0.01,
        "firsttoken.tpot.budget": 0.05,
        "firsttoken.tpot.met": True,
        "firsttoken.total.budget": 3.0,
        "firsttoken.total.met": True,
        "firsttoken.chance": 0.9,
        "firsttoken.prompt_tokens.estimated": 120,
        "firsttoken.cached_tokens.predicted": 64,
        "firsttoken.loop_lag": 0.25,
        "firsttoken.cost_usd": 0.5,
    }


def test_only_the_winning_attempt_has_usage_attributes() -> None:
    """Usage on several spans would be summed twice."""
    lost = attempt(1, kind=AttemptKind.PRIMARY, ending=AttemptOutcome.CANCELLED, ended=0.5)
    won = attempt(2, "large/b", kind=AttemptKind.HEDGE, opened=0.1)
    found = tree(
        answered(
            attempts=[lost, won],
            endpoint="large/b",
            pool="large",
            model="big",
            prompt_tokens_reported=130,
            cached_tokens_reported=64,
            engine_queue=0.25,
            engine_ttft=0.5,
        )
    )
    one, two = found.attempts
    assert [span.name for span in (one, two)] == ["chat served", "chat big"]
    assert read(one.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "served",
        "server.address": "10.0.0.1",
        "server.port": 8000,
        "firsttoken.pool": "small",
        "firsttoken.endpoint": "small/a",
        "firsttoken.attempt.number": 1,
        "firsttoken.attempt.kind": "primary",
        "firsttoken.attempt.ending": "cancelled",
        "firsttoken.attempt.upstream_id": "req_1",
    }
    assert read(two.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "big",
        "gen_ai.response.model": "big",
        "server.address": "10.0.0.2",
        "server.port": 8000,
        "firsttoken.pool": "large",
        "firsttoken.endpoint": "large/b",
        "firsttoken.attempt.number": 2,
        "firsttoken.attempt.kind": "hedge",
        "firsttoken.attempt.ending": "completed",
        "firsttoken.attempt.upstream_id": "req_2",
        "gen_ai.usage.input_tokens": 130,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.09),
        "firsttoken.engine.queue": 0.25,
        "firsttoken.engine.ttft": 0.5,
    }
    begin = found.request.start_time_unix_nano
    assert [two.start_time_unix_nano - begin, one.end_time_unix_nano - begin] == [100_000_000, 500_000_000]


ENDS = {  # status of the span, error.type
    RequestOutcome.COMPLETED: (200, Status.STATUS_CODE_UNSET, None),
    RequestOutcome.REFUSED: (404, Status.STATUS_CODE_UNSET, "404"),
    RequestOutcome.CLIENT_GONE: (200, Status.STATUS_CODE_UNSET, "client_gone"),
    RequestOutcome.SHED: (429, Status.STATUS_CODE_ERROR, "shed"),
    RequestOutcome.UNAVAILABLE: (503, Status.STATUS_CODE_ERROR, "unavailable"),
    RequestOutcome.FAILED: (502, Status.STATUS_CODE_ERROR, "failed"),
    RequestOutcome.UPSTREAM_BROKE: (200, Status.STATUS_CODE_ERROR, "upstream_broke"),
    RequestOutcome.INTERNAL: (500, Status.STATUS_CODE_ERROR, "internal"),
    RequestOutcome.CUT: (200, Status.STATUS_CODE_ERROR, "cut"),
}


@pytest.mark.parametrize("end", RequestOutcome)
def test_request_spans_are_errors_for_faults_of_the_server_side(end: RequestOutcome) -> None:
    """A caller's own fault or disconnection is no error of the span."""
    status, code, error = ENDS[end]
    found = tree(answered(end=end, status=status)).request
    assert (found.status.code, read(found.attributes).get("error.type")) == (code, error)


@pytest.mark.parametrize("ending", AttemptOutcome)
def test_a_cancelled_attempt_span_is_no_error(ending: AttemptOutcome) -> None:
    """All other outcomes but success are."""
    found = tree(answered(attempts=[attempt(ending=ending)], ttft=None)).attempts[0]
    fine = ending in (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED)
    assert found.status.code == (Status.STATUS_CODE_UNSET if fine else Status.STATUS_CODE_ERROR)
    assert read(found.attributes).get("error.type") == (None if fine else ending.value)


def test_an_unparsed_request_has_a_span() -> None:
    """Without attributes for unknown values."""
    found = tree(Record(request_id="r", operation="completion", end=RequestOutcome.REFUSED, status=400, total=0.1))
    assert (found.request.name, found.stages, found.attempts) == ("text_completion", [], [])
    assert {"gen_ai.request.model", "firsttoken.route", "firsttoken.tier"}.isdisjoint(read(found.request.attributes))


def test_span_ids_of_stages_and_attempts_never_collide() -> None:
    """At any number of attempts."""
    one = answered(spent=[0.1] * len(Stage), attempts=[attempt(i, ending=AttemptOutcome.FAILED) for i in range(1, 11)])
    found = sent(one)
    assert len({span.span_id for span in found}) == len(found) == 1 + len(Stage) + 10
