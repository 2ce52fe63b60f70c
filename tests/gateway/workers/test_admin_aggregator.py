"""The admin aggregator: collects metrics and state of all workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily, Metric

from gateway.config.models import Config
from gateway.workers import admin_aggregator
from gateway.workers.admin_aggregator import AdminAggregator, readiness
from gateway.workers.shared_state import SharedState, WorkerState, WorkerStatus
from gateway.workers.worker import COUNTS, ControlChannel, encode_counts
from tests.support.gateways import document, pool

CONFIG = Config.model_validate(document({"only": pool("http://127.0.0.1:9")}))


class Worker:
    """The counters of a worker process: `life` names the process, `requests` is the count."""

    def __init__(self, path: Path) -> None:
        self.path, self.life, self.requests = path, b"first", 0
        self.silent = False
        self.explained: list[bytes] = []
        self.trace = ""  # trace id of an exemplar; the first letter is the exemplar's time

    async def explain(self, http: web.Request) -> web.Response:
        self.explained.append(await http.read())
        return web.json_response({"worker": self.path.stem})

    async def counts(self, http: web.Request) -> web.Response:
        if self.silent:
            raise web.HTTPServiceUnavailable
        family = CounterMetricFamily("firsttoken_requests", "Requests", value=self.requests)
        return web.Response(body=encode_counts(self.life, [family, *self.timed()]))

    def timed(self) -> Iterator[Metric]:
        if self.trace:
            family = HistogramMetricFamily("firsttoken_ttft_seconds", "TTFT", labels=[])
            shown = Exemplar({"trace_id": self.trace}, 0.1, float(ord(self.trace[0])))
            family.add_metric([], [("+Inf", 1.0, shown)], 0.1)
            yield family


@asynccontextmanager
async def aggregating(
    tmp_path: Path, shared: SharedState | None = None
) -> AsyncIterator[tuple[AdminAggregator, list[Worker]]]:
    workers, runners = [Worker(tmp_path / f"{number}.sock") for number in range(2)], []
    for worker in workers:
        app = web.Application()
        app.router.add_get(COUNTS, worker.counts)
        app.router.add_post("/explain", worker.explain)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(worker.path)).start()
        runners.append(runner)
    paths = [str(worker.path) for worker in workers]
    aggregator = AdminAggregator(CONFIG, paths, shared or SharedState(2), ControlChannel())
    try:
        yield aggregator, workers
    finally:
        await aggregator.close()
        for runner in runners:
            await runner.cleanup()


async def total(aggregator: AdminAggregator) -> float:
    await aggregator.collect_counters()
    return sum(
        s.value for metric in aggregator.collect() for s in metric.samples if s.name == "firsttoken_requests_total"
    )


async def test_a_counter_total_never_decreases(tmp_path: Path) -> None:
    """Neither while a worker does not answer, nor after new processes in the same slot count from zero."""
    async with aggregating(tmp_path) as (aggregator, (one, other)):
        one.requests, other.requests = 3, 4
        assert await total(aggregator) == 7
        one.silent = True
        other.requests = 5
        assert await total(aggregator) == 8
        for life in (b"second", b"third"):
            one.silent, one.life, one.requests = False, life, 0
            assert await total(aggregator) == {b"second": 8, b"third": 10}[life]
            one.requests = 2
            assert await total(aggregator) == {b"second": 10, b"third": 12}[life]


async def test_another_aggregator_keeps_the_counters_of_exited_workers(tmp_path: Path) -> None:
    """Counters of exited workers are shared, not in one process."""
    shared = SharedState(2)
    async with aggregating(tmp_path, shared) as (aggregator, (one, _)):
        one.requests = 3
        await aggregator.collect_counters()
        one.life, one.requests = b"second", 1
        assert await total(aggregator) == 4
        successor = AdminAggregator(CONFIG, [str(one.path)], shared, ControlChannel())
        assert await total(successor) == 4
        await successor.close()


async def test_the_aggregator_serves_exemplars_in_openmetrics(tmp_path: Path) -> None:
    """The latest exemplar of all workers."""
    async with aggregating(tmp_path) as (aggregator, workers):
        for worker, trace in zip(workers, ("a" * 32, "b" * 32), strict=True):
            worker.trace = trace
        async with TestClient(TestServer(aggregator.app())) as client:
            plain = await (await client.get("/metrics")).text()
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            page = await (await client.get("/metrics", headers=accept)).text()
    assert "# {" not in plain
    assert f'le="+Inf"}} 2.0 # {{trace_id="{"b" * 32}"}} 0.1 ' in page


async def test_an_unreachable_worker_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of the other workers are served."""
    monkeypatch.setattr(admin_aggregator, "WORKER_TIMEOUT", 0.1)
    async with aggregating(tmp_path) as (aggregator, (one, other)):
        one.requests, other.requests = 3, 4
        one.path.unlink()
        assert await total(aggregator) == 4


@pytest.mark.parametrize(("gone", "answers"), [(0, "0"), (1, "1"), (2, None)])
async def test_explain_is_answered_while_a_worker_is_left(gone: int, answers: str | None, tmp_path: Path) -> None:
    """A killed worker counts as serving until the supervisor notices: the next one is asked, else 503."""
    shared = SharedState(2)
    for number in range(2):
        shared.set_worker(number, WorkerStatus(WorkerState.SERVING, 1))
    async with aggregating(tmp_path, shared) as (aggregator, workers):
        for worker in workers[:gone]:
            worker.path.unlink()
        async with TestClient(TestServer(aggregator.app())) as client:
            reply = await client.post("/explain", data=b"{}")
            said = await reply.json()
    if answers is None:
        assert (reply.status, said["error"]["message"]) == (503, "No worker serves now.")
    else:
        assert (reply.status, said) == (200, {"worker": answers})
    assert {w.path.stem for w in workers if w.explained == [b"{}"]} == ({answers} if answers else set())


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((WorkerState.SERVING, WorkerState.SERVING), "ready"),
        ((WorkerState.STARTING, WorkerState.SERVING), "starting"),
        ((WorkerState.ENDED, WorkerState.SERVING), "starting"),
        ((WorkerState.DRAINING, WorkerState.SERVING), "draining"),
        ((WorkerState.DRAINING, WorkerState.ENDED), "draining"),
    ],
)
def test_the_gateway_is_ready_when_all_workers_serve(states: tuple[WorkerState, ...], expected: str) -> None:
    """A missing worker needs an operator."""
    shared = SharedState(2)
    for place, state in enumerate(states):
        shared.set_worker(place, WorkerStatus(state, place + 1))
    assert readiness([worker.state for worker in shared.workers()]) == expected
    assert [worker.starts for worker in shared.workers()] == [1, 2]
