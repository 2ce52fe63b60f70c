"""The admin aggregator: collects metrics and state of all workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily, Metric

from gateway.admin.admin_server import AdminServer
from gateway.config.models import Config
from gateway.observe.metrics.merged_metrics import encode_counts
from gateway.reload import ConfigSource
from gateway.workers import admin_aggregator
from gateway.workers.admin_aggregator import AdminAggregator
from gateway.workers.shared_state import SharedState
from gateway.workers.worker import APPLY, COUNTS, DRAIN
from tests.support.gateways import document, pool

CONFIG = Config.model_validate(document({"only": pool("http://127.0.0.1:9")}))
SOURCE = ConfigSource(lambda: CONFIG)


class Worker:
    """The counters of a worker process: `starts` tells it from its predecessor, `requests` is the count."""

    def __init__(self, path: Path) -> None:
        self.path, self.starts, self.requests = path, 1, 0
        self.applied = self.drains = 0  # configurations, changes of drained endpoints
        self.silent = False
        self.explained: list[bytes] = []
        self.trace = ""  # trace id of an exemplar; the first letter is the exemplar's time

    async def explain(self, http: web.Request) -> web.Response:
        self.explained.append(await http.read())
        return web.json_response({"worker": self.path.stem})

    async def causes(self, http: web.Request) -> web.Response:
        assert dict(http.query) == {"route": "only", "minutes": "15"}
        window = {"requests": 4, "causes": {"queued": {"requests": 1, "over_ms": 10.5}}}
        return web.json_response({"now": window, "before": {"requests": 2, "causes": {}}})

    async def apply(self, http: web.Request) -> web.Response:
        self.applied += 1
        return web.Response(status=204)

    async def drain(self, http: web.Request) -> web.Response:
        self.drains += 1
        return web.Response(status=204)

    async def fleet(self, http: web.Request) -> web.Response:
        load = {"health": "up", "in_flight": 0}
        view = {"endpoint": {"id": "only/127.0.0.1:9"}, "load": load, "samples": 0, "believed": [], "held": []}
        return web.json_response([view])

    async def counts(self, http: web.Request) -> web.Response:
        if self.silent:
            raise web.HTTPServiceUnavailable
        family = CounterMetricFamily("firsttoken_requests", "Requests", value=self.requests)
        return web.Response(body=encode_counts(self.starts, [family, *self.timed()]))

    def timed(self) -> Iterator[Metric]:
        if self.trace:
            family = HistogramMetricFamily("firsttoken_ttft_seconds", "TTFT", labels=[])
            shown = Exemplar({"trace_id": self.trace}, 0.1, float(ord(self.trace[0])))
            family.add_metric([], [("+Inf", 1.0, shown)], 0.1)
            yield family


@asynccontextmanager
async def aggregating(
    tmp_path: Path, shared: SharedState | None = None, source: ConfigSource = SOURCE
) -> AsyncIterator[tuple[AdminAggregator, list[Worker]]]:
    workers, runners = [Worker(tmp_path / f"{number}.sock") for number in range(2)], []
    for worker in workers:
        app = web.Application()
        app.router.add_get(COUNTS, worker.counts)
        app.router.add_get("/causes", worker.causes)
        app.router.add_post("/explain", worker.explain)
        app.router.add_post(APPLY, worker.apply)
        app.router.add_post(DRAIN, worker.drain)
        app.router.add_get("/fleet", worker.fleet)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(worker.path)).start()
        runners.append(runner)
    aggregator = AdminAggregator(CONFIG, source, [worker.path for worker in workers], shared or SharedState(2))
    try:
        yield aggregator, workers
    finally:
        await aggregator.close()
        for runner in runners:
            await runner.cleanup()


async def total(aggregator: AdminAggregator) -> float:
    await aggregator.collect_counters()
    return sum(
        s.value
        for metric in aggregator.merged.collect()
        for s in metric.samples
        if s.name == "firsttoken_requests_total"
    )


async def test_slow_requests_of_all_workers_are_counted_by_cause(tmp_path: Path) -> None:
    async with aggregating(tmp_path) as (aggregator, _):
        found = await aggregator.causes("only", 15)
    assert found["now"] == {"requests": 8, "causes": {"queued": {"requests": 2, "over_ms": 21.0}}}
    assert found["before"] == {"requests": 4, "causes": {}}


async def test_a_counter_total_never_decreases(tmp_path: Path) -> None:
    """Neither while a worker does not answer, nor after new processes in the same slot count from zero."""
    async with aggregating(tmp_path) as (aggregator, (one, other)):
        one.requests, other.requests = 3, 4
        assert await total(aggregator) == 7
        one.silent = True
        other.requests = 5
        assert await total(aggregator) == 8
        for starts, before in ((2, 8), (3, 10)):
            one.silent, one.starts, one.requests = False, starts, 0
            assert await total(aggregator) == before
            one.requests = 2
            assert await total(aggregator) == before + 2


async def test_another_aggregator_keeps_the_counters_of_exited_workers(tmp_path: Path) -> None:
    """Counters of exited workers are shared, not in one process."""
    shared = SharedState(2)
    async with aggregating(tmp_path, shared) as (aggregator, (one, _)):
        one.requests = 3
        await aggregator.collect_counters()
        one.starts, one.requests = 2, 1
        assert await total(aggregator) == 4
        successor = AdminAggregator(CONFIG, SOURCE, [one.path], shared)
        assert await total(successor) == 4
        await successor.close()


async def test_a_reload_that_died_between_its_two_steps_is_finished_by_the_next_aggregator(tmp_path: Path) -> None:
    """The configuration was put down, and no worker told. Without a reload nothing is applied."""
    shared = SharedState(2)
    async with aggregating(tmp_path, shared) as (aggregator, workers):
        await aggregator.finish_changes()
        assert [worker.applied for worker in workers] == [0, 0]
        shared.config.put(CONFIG)
        await aggregator.finish_changes()
        assert [worker.applied for worker in workers] == [1, 1]


async def test_the_aggregator_serves_exemplars_in_openmetrics(tmp_path: Path) -> None:
    """The latest exemplar of all workers."""
    async with aggregating(tmp_path) as (aggregator, workers):
        for worker, trace in zip(workers, ("a" * 32, "b" * 32), strict=True):
            worker.trace = trace
        async with TestClient(TestServer(AdminServer(aggregator).app())) as client:
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
    """The next one is asked, else 503."""
    async with aggregating(tmp_path) as (aggregator, workers):
        for worker in workers[:gone]:
            worker.path.unlink()
        async with TestClient(TestServer(AdminServer(aggregator).app())) as client:
            reply = await client.post("/explain", data=b"{}")
            said = await reply.json()
    if answers is None:
        assert (reply.status, said["error"]["message"]) == (503, "No worker serves now.")
    else:
        assert (reply.status, said) == (200, {"worker": answers})
    assert {w.path.stem for w in workers if w.explained == [b"{}"]} == ({answers} if answers else set())


async def test_a_configuration_is_applied_by_every_worker_and_kept_for_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that is gone is named in the log: it will start with the configuration."""
    shared, other = SharedState(2), Config.model_validate(document({"other": pool("http://127.0.0.1:9")}))
    async with aggregating(tmp_path, shared, ConfigSource(lambda: other)) as (aggregator, (one, gone)):
        gone.path.unlink()
        async with TestClient(TestServer(AdminServer(aggregator).app())) as client:
            reply = await client.post("/reload")
            answer = await reply.json()
            shown = await (await client.get("/config")).json()
        assert (reply.status, answer["result"], answer["not_applied_by"]) == (200, "applied", ["worker 2"])
        assert (one.applied, gone.applied) == (1, 0)
    assert [*shown["pools"]] == [*shared.config.get().pools] == ["other"]
    assert "worker 2 has not applied the configuration" in caplog.text
    assert "worker 1 has not" not in caplog.text


async def test_a_worker_that_stands_still_is_not_waited_for_and_applies_the_configuration_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers name it."""
    shared, other = SharedState(2), Config.model_validate(document({"other": pool("http://127.0.0.1:9")}))
    monkeypatch.setattr(shared.beats, "is_stalled", lambda slot: slot == 1)
    async with aggregating(tmp_path, shared, ConfigSource(lambda: other)) as (aggregator, (one, still)):
        app = AdminServer(aggregator).app()
        app.on_response_prepare.append(aggregator.name_stalled)
        async with TestClient(TestServer(app)) as client:
            reply = await client.post("/reload")
            assert (await reply.json())["not_applied_by"] == ["worker 2"]
            assert (one.applied, still.applied) == (1, 0)
            reply = await client.get("/metrics")
            assert reply.headers["x-firsttoken-stalled-workers"] == "2"
            assert "firsttoken_workers_stalled 1.0" in await reply.text()
            monkeypatch.setattr(shared.beats, "is_stalled", lambda slot: False)
            await aggregator.catch_up(APPLY)
            assert (one.applied, still.applied) == (1, 1)
            assert "x-firsttoken-stalled-workers" not in (await client.get("/config")).headers


async def test_a_worker_that_stands_still_drains_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer names it; another aggregator finishes what the one before has begun."""
    shared = SharedState(2)
    monkeypatch.setattr(shared.beats, "is_stalled", lambda slot: slot == 1)
    async with aggregating(tmp_path, shared) as (aggregator, (one, still)):
        async with TestClient(TestServer(AdminServer(aggregator).app())) as client:
            reply = await client.post("/endpoints/drain", json={"endpoint": "only/127.0.0.1:9", "state": "drain"})
            assert (await reply.json())["not_applied_by"] == ["worker 2"]
        assert (one.drains, still.drains, shared.drained.get()) == (1, 0, {"only/127.0.0.1:9"})
        monkeypatch.setattr(shared.beats, "is_stalled", lambda slot: False)
        await aggregator.catch_up(DRAIN)
        assert (one.drains, still.drains) == (1, 1)
        successor = AdminAggregator(CONFIG, SOURCE, [one.path], shared)
        await successor.finish_changes()
        assert (one.drains, successor.drained) == (2, {"only/127.0.0.1:9"})
        await successor.close()
