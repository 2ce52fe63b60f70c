"""What traces at 100% cost: `python -m benchmarks.tracing_cost [REQUESTS]`, in us of CPU per request, all threads.

Records of usual requests (streams, eleven stages, one attempt) are given to the gateway's own sink at a pace. It
makes and counts them, compresses, and sends to a collector in another process. Ids are made and the attempt's header is
written as on the way of a request. What the pace itself costs is measured without, and taken off.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from time import monotonic, process_time, time

from aiohttp import web

from benchmarks.processes import child, free_port
from gateway.observe.otel.spans import ServedEndpoint
from gateway.observe.otel.telemetry import Telemetry
from gateway.observe.record import (
    STAGES,
    AnswerFacts,
    AskedFacts,
    AttemptRecord,
    Budgets,
    Placed,
    Record,
    RequestOutcome,
)
from gateway.observe.trace_context import Tracer
from gateway.process import loop_factory, tune_gc
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome, Endpoint

CHAT = Route.model_validate({"name": "chat", "tiers": ["small"]})
PACE = 1000  # requests per second
BURST = 4  # requests between two turns of the loop
ROUNDS = 3
ENDPOINT = "small/10.0.0.11:8000"
SERVED = {ENDPOINT: ServedEndpoint("vllm", "qwen3-8b", "10.0.0.11", 8000)}


def usual(i: int) -> Record:
    """A streamed answer that met its budgets."""
    spent: list[float | None] = [None if stage.name in ("FAILOVER", "RATE_LIMIT") else 1e-4 for stage in STAGES]
    return Record(
        request_id=f"req_{i:024x}",
        arrival=1.0,
        wall=time(),
        route=CHAT,
        tenant="web",
        operation="chat",
        asked=AskedFacts(stream=True, max_tokens=1024),
        budgets=Budgets(ttft=0.8, tpot=0.05, total=30.0),
        end=RequestOutcome.COMPLETED,
        status=200,
        spent=spent,
        ttft=0.2 + i * 1e-6,
        total=1.4,
        endpoint=Endpoint(ENDPOINT, "small"),
        placed=Placed(0, 0.97, "predicted", False, None, 100 + i % 900, 64, (), 0.19, 0.3),
        answer=AnswerFacts(
            model="qwen3-8b",
            tpot=0.012 + i * 1e-8,
            prompt_tokens=110 + i % 900,
            cached_tokens=64,
            output_tokens=100 + i % 50,
        ),
        attempts=[AttemptRecord(1, AttemptKind.PRIMARY, ENDPOINT, "small", 0.0005, 1.4, AttemptOutcome.COMPLETED)],
    )


async def paced(count: int, sink: Callable[[Record], None]) -> float:
    """Seconds of CPU for so many Records, those that they take to be made included."""
    records = [usual(i) for i in range(count)]
    began, start = monotonic(), process_time()
    for i, record in enumerate(records):
        sink(record)
        if i % BURST == BURST - 1:
            await asyncio.sleep(max(began + i / PACE - monotonic(), 0))
    return process_time() - start


async def traced(url: str, count: int) -> float:
    """The same, with traces, until the collector has them all."""
    telemetry, tracer = Telemetry(url, SERVED), Tracer(1.0)
    telemetry.start()

    def sink(record: Record) -> None:
        record.trace = trace = tracer.trace({})
        record.trace_id = trace.id
        trace.sent_by(1)
        telemetry(record)

    spent = await paced(count, sink)
    start = process_time()
    await telemetry.close()
    exported, lost = (family.samples[0].value for family in telemetry.collect())
    assert (exported, lost) == (13 * count, 0), f"{exported} spans were exported, {lost} lost"
    return spent + process_time() - start


def traces(count: int = 4000) -> float:
    """Microseconds per request: the median of some rounds."""
    port = free_port()
    found = []
    tune_gc()
    with child([sys.executable, "-m", "benchmarks.tracing_cost", "--collector", str(port)], port):
        for _ in range(ROUNDS):
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                without = runner.run(paced(count, lambda record: None))
                found.append((runner.run(traced(f"http://127.0.0.1:{port}", count)) - without) / count * 1e6)
    return statistics.median(found)


def collect(port: int) -> None:
    """A collector that takes everything and keeps nothing."""

    async def take(http: web.Request) -> web.Response:
        await http.read()
        return web.Response()

    app = web.Application(client_max_size=64_000_000)
    app.router.add_post("/v1/{signal}", take)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--collector"]:
        collect(int(sys.argv[2]))
    else:
        print(f"traces at 100%: {traces(*map(int, sys.argv[1:2])):.0f} us of CPU per request, all threads")
