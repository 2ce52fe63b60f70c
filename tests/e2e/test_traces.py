"""A request seen by an OpenTelemetry collector: real sockets to callers, engines and a real OTLP receiver."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.app import Gateway
from gateway.observe.otel import otlp
from gateway.observe.record import STAGE_NAMES, STREAM, Record, RequestOutcome
from tests.gateway.builders import ANSWER, CHAT, STREAMED, USAGE, calling, last, post
from tests.support.collector import Collector, Trace, read
from tests.support.gateways import pool, running
from tests.support.served import serving, written
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

STREAM_CHAT = {**CHAT, "stream": True}
ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"traceparent: 00-{ID}-{SPAN}-01"
BOTH = {"chat": {"tiers": ["both"], "ttft": {"budget": "1500ms"}, "hedge": {"max_extra": "100%"}}}


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a batch to fill."""
    monkeypatch.setattr(otlp, "LINGER", 0.01)
    monkeypatch.setattr(otlp, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(otlp, "LONGEST_WAIT", 0.05)


def told(collector: Collector, **more: Any) -> dict[str, Any]:
    return {"access_log": "off", "otlp": collector.url, **more}


async def ask(gateway: Gateway, *headers: str, **more: Any) -> tuple[int, bytes]:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({**STREAM_CHAT, **more}, "connection: close", *headers))
        return status, await caller.rest()


async def seen(gateway: Gateway, collector: Collector) -> tuple[Record, Trace]:
    """The last request's Record, and what the collector knows of it."""
    await eventually(lambda: gateway.recorder.recent and not gateway.recorder.live)
    record = last(gateway)
    return record, await collector.trace(record.trace_id)


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def sent_by(span: Span, flags: str = "01") -> str:
    """The `traceparent` of whoever is called by it."""
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}-{flags}"


async def test_a_request_is_one_trace_whose_stages_sum_to_its_ttft() -> None:
    """Every span lies within its parent, on the clock of the wall; the engine is told the attempt's span."""
    async with (
        Collector() as collector,
        engines(1) as (engine,),
        running({"small": engine_pool(engine)}, telemetry=told(collector)) as gateway,
    ):
        assert (await ask(gateway, max_tokens=20))[0] == 200
        record, trace = await seen(gateway, collector)
        (attempt,) = trace.attempts
        assert engine.requests[-1].headers["traceparent"] == sent_by(attempt)
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
    assert usage["gen_ai.usage.output_tokens"] == record.output_tokens == 20
    assert (usage["server.address"], usage["server.port"]) == ("127.0.0.1", int(engine.url.rpartition(":")[2]))
    assert collector.headers[0]["content-encoding"] == "gzip"
    assert {r["service.name"] for r in collector.resources} == {"firsttoken"}


async def test_a_callers_trace_is_continued_and_passed_on() -> None:
    """Its span is the request's parent; the engine's is the attempt. The state goes along."""
    async with (
        Collector() as collector,
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=told(collector)) as gateway,
    ):
        await ask(gateway, GIVEN, "tracestate: vendor=1")
        record, trace = await seen(gateway, collector)
        sent = upstream.requests[0].headers
    assert (record.trace_id, trace.request.parent_span_id.hex()) == (ID, SPAN)
    assert (sent["traceparent"], sent["tracestate"]) == (sent_by(trace.attempts[0]), "vendor=1")


async def test_what_is_no_traceparent_begins_a_trace() -> None:
    """An engine never sees what a caller made up."""
    async with (
        Collector() as collector,
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=told(collector)) as gateway,
    ):
        await ask(gateway, f"traceparent: 00-{'0' * 32}-{SPAN}-01", "tracestate: vendor=1")
        record, trace = await seen(gateway, collector)
        sent = upstream.requests[0].headers
    assert trace.request.parent_span_id == b""
    assert int(record.trace_id, 16) != 0
    assert sent["traceparent"] == sent_by(trace.attempts[0])
    assert "tracestate" not in sent


async def test_without_a_collector_the_header_passes_through_as_it_is() -> None:
    """And nothing is made up."""
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        await ask(gateway, GIVEN, "tracestate: vendor=1")
        await ask(gateway)
        given, none = (request.headers for request in upstream.requests)
    assert given["traceparent"] == GIVEN.partition(": ")[2]
    assert {"tracestate", "traceparent"}.isdisjoint(none)
    assert last(gateway).trace_id == ""


@pytest.mark.parametrize(("trace_apis", "told_of_it"), [(False, False), (True, True)])
async def test_an_external_api_is_told_of_traces_only_if_configured(trace_apis: bool, told_of_it: bool) -> None:
    """They are not ours, and have no spans for us."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        api = {"backend": "openai", "model": "m", "api_key": "sk", "base_url": upstream.url}
        async with running({"api": api}, telemetry=told(collector, trace_apis=trace_apis)) as gateway:
            await ask(gateway, GIVEN)
            await seen(gateway, collector)
        assert ("traceparent" in upstream.requests[0].headers) is told_of_it


async def test_a_failed_primary_is_a_span_of_its_own() -> None:
    """With its error; each attempt told the engine its own id."""
    async with (
        Collector() as collector,
        Upstream([reply(b"{}", "500 x")]) as bad,
        Upstream([STREAMED]) as good,
        running({"bad": pool(bad.url), "good": pool(good.url)}, telemetry=told(collector)) as gateway,
    ):
        assert (await ask(gateway))[0] == 200
        _, trace = await seen(gateway, collector)
        failed, fallback = trace.attempts
        assert [sent_by(failed), sent_by(fallback)] == [
            upstream.requests[0].headers["traceparent"] for upstream in (bad, good)
        ]
    assert failed.span_id != fallback.span_id
    assert (failed.status.code, read(failed.attributes)["error.type"]) == (Status.STATUS_CODE_ERROR, "failed")
    assert [read(span.attributes)["firsttoken.attempt.kind"] for span in trace.attempts] == ["primary", "fallback"]
    assert trace.request.status.code == Status.STATUS_CODE_UNSET
    failover = next(span for span in trace.stages if span.name == "failover")
    assert failed.end_time_unix_nano <= failover.end_time_unix_nano + 1000


async def hedged(gateway: Gateway, engine_one: Any, engine_two: Any) -> None:
    """One request whose primary fell silent after its head, and whose hedge answered."""
    for i in range(6):  # both are known to be fast
        await ask(gateway, messages=[{"role": "user", "content": f"{i} hello"}], max_tokens=2)
    for engine in (engine_one, engine_two):
        engine.faults.stall_share, engine.faults.stall_seconds = 1.0, 30.0
    before = len(engine_one.requests)
    asking = asyncio.create_task(ask(gateway, max_tokens=2))
    await eventually(lambda: len(engine_one.requests) + len(engine_two.requests) == 7)
    other = engine_two if len(engine_one.requests) > before else engine_one
    other.faults.stall_share = 0.0
    await asking


async def test_a_hedge_and_what_it_overtook_are_both_there() -> None:
    """Unsampled, too: whoever looks for hedges finds them. Engines were told that it was not sampled."""
    async with (
        Collector() as collector,
        engines(2) as (one, two),
        running({"both": engine_pool(one, two)}, BOTH, telemetry=told(collector, traces=0)) as gateway,
    ):
        await hedged(gateway, one, two)
        record, trace = await seen(gateway, collector)
        flags = {engine.requests[-1].headers["traceparent"][-2:] for engine in (one, two)}
        assert {span.trace_id.hex() for span in collector.spans} == {record.trace_id}
    primary, hedge = (read(span.attributes) for span in trace.attempts)
    assert (primary["firsttoken.attempt.kind"], primary["firsttoken.attempt.ending"]) == ("primary", "cancelled")
    assert (hedge["firsttoken.attempt.kind"], hedge["firsttoken.attempt.ending"]) == ("hedge", "completed")
    assert "error.type" not in primary
    assert flags == {"00"}


async def test_only_what_is_notable_is_told_of_what_is_not_sampled() -> None:
    """Of these all but the first and the second: answered in time, and refused for its own fault."""
    async with (
        Collector() as collector,
        Upstream([STREAMED], [STREAMED], [reply(b"{}", "500 x")]) as upstream,
        running(
            {"only": pool(upstream.url)},
            {
                "chat": {"tiers": ["only"], "ttft": {"budget": "30s"}},
                "hasty": {"tiers": ["only"], "ttft": {"budget": "1us", "target": 0.1}},
            },
            telemetry=told(collector, traces="0%"),
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


async def test_a_callers_flag_decides() -> None:
    """Sampled by the caller, it is told though nothing else is; not sampled, it is not, though all else is."""
    for traces, flags, count in ((0, "01", 1), (1, "00", 0)):
        async with (
            Collector() as collector,
            Upstream([STREAMED]) as upstream,
            running({"only": pool(upstream.url)}, telemetry=told(collector, traces=traces)) as gateway,
        ):
            await ask(gateway, GIVEN[:-2] + flags)
            assert upstream.requests[0].headers["traceparent"][-2:] == flags
        assert sum(span.kind == Span.SPAN_KIND_SERVER for span in collector.spans) == count


async def test_nothing_of_a_prompt_an_answer_or_a_key_is_told() -> None:
    """Whatever becomes of the request; its id and the names of routes are."""
    canary = {"messages": [{"role": "user", "content": "CANARY prompt"}], "user": "CANARY user"}
    secret = "authorization: Bearer CANARY"
    answer = STREAM_HEAD + chunk(ANSWER.replace(b"hi", b"CANARY answer")) + LAST_CHUNK
    async with (
        Collector() as collector,
        Upstream([answer], [reply(b'{"error":{"message":"CANARY"}}', "400 CANARY")], [b"CANARY\r\n\r\n"]) as upstream,
        running({"only": pool(upstream.url, api_key="sk-CANARY")}, telemetry=told(collector)) as gateway,
    ):
        for more in (canary, canary, canary, {**canary, "model": "CANARY"}, {**canary, "n": "CANARY"}):
            await ask(gateway, secret, "cookie: CANARY", **more)
        found = await collector.requests(5)
    assert len(found) == 5
    assert b"CANARY" not in b"".join(span.SerializeToString() for span in collector.spans)


# --------------------------------------------------------------------------- metrics


async def test_genai_metrics_come_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older names unless asked otherwise; the last report is at the end. Sums since the start."""
    async with (
        Collector() as collector,
        Upstream(
            [STREAM_HEAD + chunk(ANSWER.replace(b"data: [DONE]\n\n", b"") + USAGE + b"data: [DONE]\n\n") + LAST_CHUNK]
        ) as upstream,
    ):
        async with running({"only": pool(upstream.url)}, telemetry=told(collector)) as gateway:
            for _ in range(3):
                await ask(gateway)
        (report,) = collector.metrics
        metrics = {metric.name: metric for metric in report}
        assert set(metrics) == {
            "gen_ai.server.request.duration",
            "gen_ai.server.time_to_first_token",
            "gen_ai.server.time_per_output_token",
            "gen_ai.client.operation.duration",
            "gen_ai.client.operation.time_to_first_chunk",
            "gen_ai.client.operation.time_per_output_chunk",
            "gen_ai.client.token.usage",
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
        usage = metrics["gen_ai.client.token.usage"].histogram.data_points
        assert {read(p.attributes)["gen_ai.token.type"]: p.sum for p in usage} == {"input": 21.0, "output": 6.0}
        monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,gen_ai_latest_experimental")
        async with running({"only": pool(upstream.url)}, telemetry=told(collector)) as gateway:
            await ask(gateway)
        metrics = {metric.name: metric for metric in collector.metrics[-1]}
    assert {name for name in metrics if "client" in name} == {
        "gen_ai.client.inference.duration",
        "gen_ai.client.inference.time_to_first_chunk",
        "gen_ai.client.inference.time_per_output_chunk",
        "gen_ai.client.inference.usage.input_tokens",
        "gen_ai.client.inference.usage.output_tokens",
        "gen_ai.client.inference.usage.cache_read.input_tokens",
        "gen_ai.client.inference.operation.input_tokens",
        "gen_ai.client.inference.operation.output_tokens",
    }
    counted = metrics["gen_ai.client.inference.usage.cache_read.input_tokens"].sum
    assert (counted.is_monotonic, [point.as_int for point in counted.data_points]) == (True, [4])


async def test_the_operators_own_words_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers with a key for the collector, names for us, and no metrics: OpenTelemetry's own variables."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret%20key,x-other=2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.instance.id=one")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        async with running({"only": pool(upstream.url)}, telemetry=told(collector)) as gateway:
            await ask(gateway)
        (headers,), (resource,) = collector.headers, collector.resources
    assert (headers["x-key"], headers["x-other"]) == ("secret key", "2")
    assert "content-encoding" not in headers
    assert (resource["service.name"], resource["service.instance.id"]) == ("front", "one")
    assert resource["deployment.environment"] == "test"
    assert collector.metrics == []


# --------------------------------------------------------------------------- workers


async def test_every_worker_tells_its_own(tmp_path: Path) -> None:
    """As an instance of its own; what they exported and lost is added up."""
    async with Collector() as collector, Upstream([STREAMED]) as upstream:
        config = written(tmp_path / "f.yaml", upstream.url)
        config.write_text(
            config.read_text().replace("access_log: stdout", f'access_log: "off", otlp: "{collector.url}"')
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
