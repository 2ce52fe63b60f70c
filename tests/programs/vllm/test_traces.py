"""vLLM's own span joins the trace, below the attempt's span. Starts a vLLM server that exports spans."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from scripts import vllm_servers
from scripts.vllm_servers import Server
from tests.programs.vllm.figures import Figures
from tests.support.collector import Collector, read
from tests.support.gateways import running
from tests.support.simulated import eventually

NEEDED = "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter"
ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUESTS = 4


def exports_spans() -> bool:
    """True if this vLLM has the OpenTelemetry packages."""
    python = vllm_servers.VENV / "bin" / "python"
    return python.exists() and subprocess.run([python, "-c", NEEDED], capture_output=True, check=False).returncode == 0


@asynccontextmanager
async def exporting_server(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A vLLM server of the small model that exports spans to `collector`, soon after their end."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    vllm_servers.LOGS.mkdir(parents=True, exist_ok=True)
    flag = f"--otlp-traces-endpoint={collector.url}/v1/traces"
    process, server = vllm_servers.start("small", "telling", 0, flag)
    try:
        until = time.monotonic() + vllm_servers.READY_WITHIN
        await asyncio.to_thread(vllm_servers.wait_until_healthy, process, server, until)
        yield server
    finally:
        await asyncio.to_thread(vllm_servers.stop, [process])


async def test_an_engine_span_is_a_child_of_its_attempts_span(
    monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    """In the caller's trace, if given: caller, request, attempt, engine. The engine's span lies within the
    attempt's."""
    if not (exports_spans() and (vllm_servers.MODELS / "small" / "config.json").exists()):
        pytest.skip("needs a vLLM with the OpenTelemetry exporter, and its small model: make vllm")
    async with Collector() as collector, exporting_server(collector, monkeypatch) as server:
        pool = {"backend": "vllm", "model": "small", "endpoints": [server.url], "tokenizer": server.tokenizer}
        telemetry = {"access_log": "off", "otlp": collector.url, "traces": 1.0}
        async with running({"small": pool}, telemetry=telemetry) as gateway:
            sdk = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
            for i in range(REQUESTS):
                trace_headers = {"traceparent": f"00-{ID}-{SPAN}-01"} if i == 0 else {}
                chunks = await sdk.chat.completions.create(
                    model="chat",
                    max_tokens=5,
                    stream=True,
                    extra_headers=trace_headers,
                    messages=[{"role": "user", "content": f"{i} hello there"}],
                )
                assert [chunk async for chunk in chunks]
            await eventually(lambda: len(engine_spans(collector)) >= REQUESTS, within=30.0)
            await collector.requests(REQUESTS)
            traces = [await collector.trace(record.trace_id) for record in gateway.recorder.recent]
    for trace in traces:
        (attempt,) = trace.attempts
        (engine,) = [span for span in engine_spans(collector) if span.trace_id == attempt.trace_id]
        assert engine.parent_span_id == attempt.span_id
        assert engine.kind == Span.SPAN_KIND_SERVER
        assert attempt.start_time_unix_nano <= engine.start_time_unix_nano
        assert engine.end_time_unix_nano <= attempt.end_time_unix_nano + 50_000_000
    assert (traces[0].request.trace_id.hex(), traces[0].request.parent_span_id.hex()) == (ID, SPAN)
    attributes = read(engine_spans(collector)[-1].attributes)
    figures.note("vLLM's own TTFT, in the last span", 1e3 * attributes["gen_ai.latency.time_to_first_token"], "ms")
    figures.note("ours, in the request's span", 1e3 * read(traces[-1].request.attributes)["firsttoken.ttft"], "ms")


def engine_spans(collector: Collector) -> list[Span]:
    return [span for span in collector.spans if span.name == "llm_request"]
