"""Traces at an OpenTelemetry collector: real sockets to callers, engines and an OTLP receiver."""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.app import Gateway
from gateway.observe.otel.telemetry import notable
from gateway.observe.record import STAGE_NAMES, STREAM, Record, RequestOutcome
from gateway.parts.telemetry.part import TelemetryPart
from tests.support.builders import ANSWER, CHAT, STREAMED, USAGE, calling, last, post
from tests.support.collector import Collector, Trace, read
from tests.support.gateways import pool, running
from tests.support.served import serving, write_config
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

STREAM_CHAT = {**CHAT, "stream": True}
ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"traceparent: 00-{ID}-{SPAN}-01"
BOTH = {"chat": {"tiers": ["both"], "ttft": {"budget": "1500ms"}, "hedge": {"max_extra": "100%"}}}


@pytest.fixture(autouse=True)
def fast_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports batches at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def telemetry_to(collector: Collector, **more: Any) -> dict[str, Any]:
    return {"access_log": "off", "otlp": collector.url, "traces": "100%", **more}


async def ask(gateway: Gateway, *headers: str, **more: Any) -> tuple[int, bytes]:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({**STREAM_CHAT, **more}, "connection: close", *headers))
        return status, await caller.rest()


async def record_and_trace(gateway: Gateway, collector: Collector) -> tuple[Record, Trace]:
    """Record of the last request, and the trace at the collector."""
    await eventually(lambda: gateway.recorder.recent and not gateway.recorder.live)
    record = last(gateway)
    return record, await collector.trace(record.trace_id, 1 + len(record.attempts) + len(record.stages))


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def traceparent_of(span: Span, flags: str = "01") -> str:
    """The `traceparent` that names `span` as parent."""
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}-{flags}"


async def test_a_request_is_one_trace_whose_stages_sum_to_its_ttft() -> None:
    """Every span lies within its parent, in wall-clock time; the engine receives the attempt's span id."""
    async with (
        Collector() as collector,
        engines(1) as (engine,),
        running({"small": engine_pool(engine)}, telemetry=telemetry_to(collector)) as gateway,
    ):
        assert (await ask(gateway, max_tokens=20))[0] == 200
        record, trace = await record_and_trace(gateway, collector)
        (attempt,) = trace.attempts
        assert engine.requests[-1].headers["traceparent"] == traceparent_of(attempt)
        assert "tracestate" not in engine.requests[-1].headers
    before_first_token = [span for span in trace.stages if span.name != STAGE_NAMES[STREAM]]
    assert sum(map(seconds, before_first_token)) == pytest.approx(record.ttft, abs=1e-3)
    assert {span.name: seconds(span) for span in trace.stages} == pytest.approx(
        {STAGE_NAMES[stage]: spent for stage, spent in record.stages.items()}, abs=1e-5
    )
    for span in (*trace.stages, *trace.attempts):
        assert span.parent_span_id == trace.request.span_id
        assert trace.request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= trace.request.end_time_unix_nano + 1000
    assert trace.request.start_time_unix_nano / 1e9 == pytest.approx(record.wall, abs=1e-6)
    usage = read(attempt.attributes)
    assert usage["gen_ai.usage.output_tokens"] == record.answer.output_tokens == 20
    assert (usage["server.address"], usage["server.port"]) == ("127.0.0.1", int(engine.url.rpartition(":")[2]))
    assert {r["service.name"] for r in collector.resources} == {"firsttoken"}


BAGGAGE = "userId=alice,serverNode=DF%2028,isProduction=false;ttl=5"


@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("backend", ["compatible", "openai"])
async def test_baggage_goes_to_engines_beside_a_traceparent_and_to_no_external_api(backend: str, tracing: bool) -> None:
    """Whether traces are on or not. It may hold ids of users."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        more = {"telemetry": telemetry_to(collector)} if tracing else {}
        endpoint = pool(upstream.url) | {"backend": backend}
        if backend == "openai":
            endpoint |= {"api_key": "sk-0123456789abcdef0123456789"}
        async with running({"only": endpoint}, **more) as gateway:
            await ask(gateway, GIVEN, f"baggage: {BAGGAGE}")
        assert upstream.requests[0].headers.get("baggage") == (BAGGAGE if backend == "compatible" else None)


@pytest.mark.parametrize(
    "headers",
    [
        (f"baggage: {BAGGAGE}",),
        (GIVEN, "baggage: a=" + "x" * 8_192),
        (GIVEN, "baggage: a=\xe9"),
        (GIVEN, "baggage: a=\tb"),
    ],
)
async def test_baggage_without_a_trace_or_that_no_server_must_take_goes_nowhere(headers: tuple[str, ...]) -> None:
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        assert (await ask(gateway, *headers))[0] == 200
        assert "baggage" not in upstream.requests[0].headers


async def test_a_callers_trace_is_continued_to_the_engine() -> None:
    """The caller's span is the request's parent, the attempt is the engine's. tracestate is forwarded."""
    async with (
        Collector() as collector,
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector)) as gateway,
    ):
        await ask(gateway, GIVEN, "tracestate: vendor=1")
        record, trace = await record_and_trace(gateway, collector)
        sent = upstream.requests[0].headers
    assert (record.trace_id, trace.request.parent_span_id.hex()) == (ID, SPAN)
    assert (sent["traceparent"], sent["tracestate"]) == (traceparent_of(trace.attempts[0]), "vendor=1")


async def test_an_invalid_traceparent_starts_a_new_trace() -> None:
    """An engine never receives an invalid header."""
    async with (
        Collector() as collector,
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector)) as gateway,
    ):
        await ask(gateway, f"traceparent: 00-{'0' * 32}-{SPAN}-01", "tracestate: vendor=1")
        record, trace = await record_and_trace(gateway, collector)
        sent = upstream.requests[0].headers
    assert trace.request.parent_span_id == b""
    assert int(record.trace_id, 16) != 0
    assert sent["traceparent"] == traceparent_of(trace.attempts[0])
    assert "tracestate" not in sent


async def test_without_a_collector_traceparent_is_forwarded_unchanged() -> None:
    """No trace is created."""
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        await ask(gateway, GIVEN, "tracestate: vendor=1")
        await ask(gateway)
        given, none = (request.headers for request in upstream.requests)
    assert given["traceparent"] == GIVEN.partition(": ")[2]
    assert {"tracestate", "traceparent"}.isdisjoint(none)
    assert last(gateway).trace_id == ""


@pytest.mark.parametrize(("trace_apis", "expected"), [(False, False), (True, True)])
async def test_an_external_api_receives_traceparent_only_if_configured(trace_apis: bool, expected: bool) -> None:
    """External APIs export no spans to this collector."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        api = {"backend": "openai", "model": "m", "api_key": "sk", "base_url": upstream.url}
        async with running({"api": api}, telemetry=telemetry_to(collector, trace_apis=trace_apis)) as gateway:
            await ask(gateway, GIVEN)
            await record_and_trace(gateway, collector)
        assert ("traceparent" in upstream.requests[0].headers) is expected


async def test_a_failed_primary_has_its_own_span() -> None:
    """With the error; each attempt sends its own span id to the engine."""
    async with (
        Collector() as collector,
        Upstream([reply(b"{}", "500 x")]) as bad,
        Upstream([STREAMED]) as good,
        running({"bad": pool(bad.url), "good": pool(good.url)}, telemetry=telemetry_to(collector)) as gateway,
    ):
        assert (await ask(gateway))[0] == 200
        _, trace = await record_and_trace(gateway, collector)
        failed, fallback = trace.attempts
        assert [traceparent_of(failed), traceparent_of(fallback)] == [
            upstream.requests[0].headers["traceparent"] for upstream in (bad, good)
        ]
    assert failed.span_id != fallback.span_id
    assert (failed.status.code, read(failed.attributes)["error.type"]) == (Status.STATUS_CODE_ERROR, "failed")
    assert [read(span.attributes)["firsttoken.attempt.kind"] for span in trace.attempts] == ["primary", "fallback"]
    assert trace.request.status.code == Status.STATUS_CODE_UNSET
    failover = next(span for span in trace.stages if span.name == "failover")
    assert failed.end_time_unix_nano <= failover.end_time_unix_nano + 1000


async def hedged(gateway: Gateway, engine_one: Any, engine_two: Any) -> None:
    """A request with a primary that is silent after the head, and a hedge that answers."""
    for i in range(6):  # both have learned predictions
        await ask(gateway, messages=[{"role": "user", "content": f"{i} hello"}], max_tokens=2)
    for engine in (engine_one, engine_two):
        engine.faults.stall_share, engine.faults.stall_seconds = 1.0, 30.0
    before, both = len(engine_one.requests), len(engine_one.requests) + len(engine_two.requests)
    asking = asyncio.create_task(ask(gateway, max_tokens=2))
    await eventually(lambda: len(engine_one.requests) + len(engine_two.requests) > both)
    other = engine_two if len(engine_one.requests) > before else engine_one
    other.faults.stall_share = 0.0
    await asking


async def test_a_hedge_and_its_primary_both_have_spans() -> None:
    """Even unsampled, because hedges are notable. Engines receive "not sampled"."""
    async with (
        Collector() as collector,
        engines(2) as (one, two),
        running({"both": engine_pool(one, two)}, BOTH, telemetry=telemetry_to(collector, traces=0)) as gateway,
    ):
        await hedged(gateway, one, two)
        record, trace = await record_and_trace(gateway, collector)
        flags = {engine.requests[-1].headers["traceparent"][-2:] for engine in (one, two)}
        exported = {each.trace_id for each in gateway.recorder.recent if notable(each)}  # on a busy machine others too
        await eventually(lambda: {span.trace_id.hex() for span in collector.spans} == exported)
        assert record.trace_id in exported
    primary, hedge = (read(span.attributes) for span in trace.attempts)
    assert (primary["firsttoken.attempt.kind"], primary["firsttoken.attempt.ending"]) == ("primary", "cancelled")
    assert (hedge["firsttoken.attempt.kind"], hedge["firsttoken.attempt.ending"]) == ("hedge", "completed")
    assert "error.type" not in primary
    assert flags == {"00"}


async def test_unsampled_requests_are_exported_only_if_notable() -> None:
    """Late and failed requests are; requests in time and refused requests are not."""
    async with (
        Collector() as collector,
        Upstream([STREAMED], [STREAMED], [reply(b"{}", "500 x")]) as upstream,
        running(
            {"only": pool(upstream.url)},
            {
                "chat": {"tiers": ["only"], "ttft": {"budget": "30s"}},
                "hasty": {"tiers": ["only"], "ttft": {"budget": "1us", "target": 0.1}},
            },
            telemetry=telemetry_to(collector, traces="0%"),
        ) as gateway,
    ):
        await ask(gateway)
        await ask(gateway, model="nope")
        await ask(gateway, model="hasty")
        await ask(gateway)  # its backend fails
        found = await collector.requests(2)
        records = list(gateway.recorder.recent)
    assert [r.end for r in records] == [
        RequestOutcome.COMPLETED,
        RequestOutcome.REFUSED,
        RequestOutcome.COMPLETED,
        RequestOutcome.FAILED,
    ]
    assert {span.trace_id.hex() for span in found} == {record.trace_id for record in records[2:]}
    assert read(found[0].attributes)["firsttoken.ttft.met"] is False


async def test_a_callers_sampled_flag_decides() -> None:
    """Sampled: exported at a share of 0; not sampled: not exported at a share of 1."""
    for traces, flags, count in ((0, "01", 1), (1, "00", 0)):
        async with (
            Collector() as collector,
            Upstream([STREAMED]) as upstream,
            running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector, traces=traces)) as gateway,
        ):
            await ask(gateway, GIVEN[:-2] + flags)
            assert upstream.requests[0].headers["traceparent"][-2:] == flags
        assert sum(span.kind == Span.SPAN_KIND_SERVER for span in collector.spans) == count


async def test_spans_contain_no_prompt_answer_or_key() -> None:
    """For all outcomes."""
    canary = {"messages": [{"role": "user", "content": "CANARY prompt"}], "user": "CANARY user"}
    secret = "authorization: Bearer CANARY"
    answer = STREAM_HEAD + chunk(ANSWER.replace(b"hi", b"CANARY answer")) + LAST_CHUNK
    async with (
        Collector() as collector,
        Upstream([answer], [reply(b'{"error":{"message":"CANARY"}}', "400 CANARY")], [b"CANARY\r\n\r\n"]) as upstream,
        running({"only": pool(upstream.url, api_key="sk-CANARY")}, telemetry=telemetry_to(collector)) as gateway,
    ):
        for more in (canary, canary, canary, {**canary, "model": "CANARY"}, {**canary, "n": "CANARY"}):
            await ask(gateway, secret, "cookie: CANARY", **more)
        found = await collector.requests(5)
    assert len(found) == 5
    assert b"CANARY" not in b"".join(span.SerializeToString() for span in collector.spans)


# --------------------------------------------------------------------------- metrics


async def test_genai_metrics_are_exported_with_spans() -> None:
    """By the SDK; the last report is at shutdown. Cumulative sums."""
    answer = STREAM_HEAD + chunk(ANSWER.replace(b"data: [DONE]\n\n", b"") + USAGE + b"data: [DONE]\n\n") + LAST_CHUNK
    async with Collector() as collector, Upstream([answer]) as upstream:
        async with running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector)) as gateway:
            for _ in range(3):
                await ask(gateway)
        (report,) = collector.metrics
    metrics = {metric.name: metric for metric in report}
    assert set(metrics) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.inference.duration",
        "gen_ai.client.inference.time_to_first_chunk",
        "gen_ai.client.inference.usage.input_tokens",
        "gen_ai.client.inference.usage.output_tokens",
        "gen_ai.client.inference.usage.cache_read.input_tokens",
        "gen_ai.client.inference.operation.input_tokens",
        "gen_ai.client.inference.operation.output_tokens",
    }
    (point,) = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert point.count == sum(point.bucket_counts) == 3
    assert point.sum == pytest.approx(sum(record.ttft or 0.0 for record in gateway.recorder.recent))
    assert read(point.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "compatible",
        "gen_ai.request.model": "chat",
        "gen_ai.response.model": "served",
    }
    usage = {name.partition(".usage.")[2]: metrics[name].sum for name in metrics if ".usage." in name}
    assert {name: [point.as_int for point in found.data_points] for name, found in usage.items()} == {
        "input_tokens": [21],
        "output_tokens": [6],
        "cache_read.input_tokens": [12],
    }
    assert all(found.is_monotonic for found in usage.values())


async def test_metric_exports_that_fail_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The next export has the same sums and more."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        collector.status = 400
        async with running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector)) as gateway:
            await ask(gateway)
        families = {family.name: family for family in gateway.part(TelemetryPart).telemetry.collect()}
    assert families["firsttoken_otlp_metric_exports_failed"].samples[0].value == 1
    assert "metric export fails: the collector gets no GenAI metrics (" in caplog.text


REASONED = b"".join(
    b"data: %b\n\n" % json.dumps(event).encode()
    for event in (
        {"id": "chatcmpl-7", "service_tier": "flex", "choices": [{"index": 0, "delta": {"content": "hi"}}]},
        {"id": "chatcmpl-7", "service_tier": "flex", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 40,
                "completion_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 30},
                "completion_tokens_details": {"reasoning_tokens": 8},
            },
        },
    )
)


async def test_spans_tell_what_was_asked_and_how_the_answer_ended() -> None:
    """Conversation, effort and tier of the request; id, tier, end and tokens of the reply."""
    asked = {"prompt_cache_key": "conv-1", "reasoning_effort": "high", "service_tier": "auto"}
    answer = STREAM_HEAD + chunk(REASONED + b"data: [DONE]\n\n") + LAST_CHUNK
    async with Collector() as collector, Upstream([answer]) as upstream:
        pools = {"only": pool(upstream.url, backend="openai", api_key="sk-x")}
        async with running(pools, telemetry=telemetry_to(collector)) as gateway:
            await ask(gateway, **asked)
            (request,) = await collector.requests(1)
            await eventually(lambda: collector.spans)
    (attempt,) = (read(span.attributes) for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT)
    named = blake2b(b"conv-1", digest_size=8).hexdigest()  # a name may hold an account of the caller's
    assert read(request.attributes)["gen_ai.conversation.id"] == attempt["gen_ai.conversation.id"] == named
    assert attempt["gen_ai.request.reasoning.level"] == "high"
    assert attempt["gen_ai.response.id"] == "chatcmpl-7"
    assert [value.string_value for value in attempt["gen_ai.response.finish_reasons"].values] == ["length"]
    assert (attempt["openai.request.service_tier"], attempt["openai.response.service_tier"]) == ("auto", "flex")
    assert attempt["gen_ai.usage.cache_write.input_tokens"] == 30
    assert attempt["gen_ai.usage.reasoning.output_tokens"] == 8


async def test_opentelemetry_environment_variables_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers with a collector key, resource names, and disabled metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret%20key,x-other=2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.instance.id=one")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        async with running({"only": pool(upstream.url)}, telemetry=telemetry_to(collector)) as gateway:
            await ask(gateway)
        (headers,), (resource,) = collector.headers, collector.resources
    assert (headers["x-key"], headers["x-other"]) == ("secret key", "2")
    assert headers["content-encoding"] == "gzip"
    assert (resource["service.name"], resource["service.instance.id"]) == ("front", "one")
    assert resource["deployment.environment"] == "test"
    assert collector.metrics == []


# --------------------------------------------------------------------------- workers


async def test_every_worker_exports_its_own_spans(tmp_path: Path) -> None:
    """With a service.instance.id per worker."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        config.write_text(
            config.read_text().replace(
                "access_log: stdout", f'access_log: "off", traces: 100%, otlp: "{collector.url}"'
            )
        )
        async with serving(config, "--workers", "2") as served:
            for _ in range(16):
                async with calling(served.url) as caller:
                    await caller.ask(post(STREAM_CHAT))
                    await caller.chunks()
            await collector.requests(16)
            instances = {resource["service.instance.id"] for resource in collector.resources}
            served.process.terminate()
            assert (await served.ends())[0] == 0
    assert len(instances) == 2
    assert len({span.trace_id for span in collector.spans}) == 16
    assert len({json.dumps(resource, sort_keys=True) for resource in collector.resources}) == 2
