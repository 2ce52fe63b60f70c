"""The admin port of several workers: asks each worker over a private Unix socket, and answers for all.

Rules:
- The aggregator is a process of its own: adding up metrics delays no caller, and survives the exit of a worker.
- Counters are collected once a second. Counts after the last collection are lost when a worker exits; collected ones
  are kept and added to those of the successor.
- A worker without an answer in time is left out; of counters the last known stand.
- Counters and histograms are added up, over running and exited workers: a total never decreases. The latest exemplar
  of a bucket stays.
- A gauge is merged as the metric table says. Queue depths add up: every worker has a queue. Every worker reports the
  load of all endpoints, with different delays: the largest value stands. Of endpoint states the worst stands: workers
  detect failures at different times.
- Metrics of a process (`process_*`, `python_*`) stay apart, by worker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import add
from pathlib import Path
from shutil import rmtree
from time import time
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from backends.interface import Operation
from gateway.admin.admin_server import AdminServer, json_response
from gateway.admin.admin_views import RequestQuery
from gateway.api.api_error import ApiError
from gateway.config.models import Config
from gateway.observe.metrics.metric_table import BY_FAMILY, Merge
from gateway.observe.metrics.scrape_collectors import counts_of, route_stats
from gateway.observe.metrics.series import counter, gauge
from gateway.process import BACKLOG, HANDLER_GRACE
from gateway.reload import ReloadCounts, invalid_config
from gateway.strict_json import encode
from gateway.workers.shared_state import SharedState, WorkerState
from gateway.workers.worker import COUNTS, ControlChannel, Order, Report

log = logging.getLogger("firsttoken")

COLLECT_INTERVAL = 1.0  # s between two collections of the workers' counters
WORKER_TIMEOUT = 2.0  # s for a worker to answer
RELOAD_TIMEOUT = 30.0  # s for all workers to apply a configuration
ACCEPTED, UNKNOWN = 204, 404  # status of POST /ttft from the worker with the request, and from the others
ADDED = ("counter", "histogram")
OF_PROCESS = ("process_", "python_")
MERGE: Mapping[Merge, Callable[[float, float], float]] = {Merge.SUM: add, Merge.MAX: max, Merge.MIN: min}
HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding")


async def serve_aggregator(
    config: Config, paths: Sequence[str], shared: SharedState, admin: socket.socket, channel: socket.socket
) -> None:
    control = await ControlChannel.open(channel)
    aggregator = AdminAggregator(config, paths, shared, control)
    runner = web.AppRunner(aggregator.app(), access_log=None, shutdown_timeout=HANDLER_GRACE, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, admin, backlog=BACKLOG).start()
    tasks = [asyncio.create_task(aggregator.collect_forever()), asyncio.create_task(aggregator.follow_reloads())]
    await control.first_of(Order.DRAIN, Order.FORCE_STOP)
    for task in tasks:
        task.cancel()
    await runner.cleanup()
    await aggregator.close()
    if not control.orders[Order.FORCE_STOP].is_set():  # the supervisor died and left its directory behind
        rmtree(Path(paths[0]).parent, ignore_errors=True)


class AdminAggregator(Collector):
    """Implements `gateway.admin.admin_server.AdminData`. `paths`: the workers' private sockets, in one directory."""

    def __init__(self, config: Config, paths: Sequence[str], shared: SharedState, control: ControlChannel) -> None:
        self.config = config
        self.control = control
        self._sessions = [
            ClientSession(connector=UnixConnector(path), timeout=ClientTimeout(WORKER_TIMEOUT), auto_decompress=False)
            for path in paths
        ]
        self._shared = shared
        self._reloading = asyncio.Lock()
        self._processes: dict[int, bytes] = {}  # id of the process that answered last, by worker number
        self._last: dict[int | None, list[Metric]] = {}  # and the counters of that process
        self._exposed = False  # since the last collection
        self._retired: list[Metric] = shared.retired.get() or []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(ReloadCounts(shared.reloads))

    def app(self) -> web.Application:
        app = AdminServer(self).app()
        app.router.add_get("/ready", self.ready)
        return app

    # -- AdminData --------------------------------------------------------------------------

    async def metrics(self) -> CollectorRegistry:
        await self.collect_counters()
        self._exposed = True
        return self.registry

    async def requests(self, query: RequestQuery) -> bytes:
        """Asks every worker for the full number, and merges as one gateway would answer."""
        return encode(query.merge(await self._get_all(query.url())))

    async def route_stats(self) -> bytes:
        await self.collect_counters()
        return encode(route_stats(counts_of(self.collect()), self.config.all_routes, time()))

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        return merge_endpoints(await self._get_all("/fleet"))

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Asks the first serving worker that answers: workers see the load of all."""
        forwarded = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        path = f"/explain?path={operation.value}"
        for worker, status in enumerate(self._shared.workers()):
            if status.state is WorkerState.SERVING:
                reply = await self._ask(worker, "POST", path, body, forwarded)
                if reply is not None:
                    return json_response(*reply)
        raise no_worker()

    async def report_ttft(self, beacon: bytes) -> web.Response:
        """Sends the beacon to all workers; only the worker with the request knows its id."""
        replies = await self._ask_all("POST", "/ttft", beacon)
        if not replies:
            raise no_worker()
        status, body = min(replies.values(), key=lambda reply: (reply[0] == UNKNOWN, reply[0]))
        return web.Response(status=status) if status == ACCEPTED else json_response(status, body)

    async def reload(self) -> web.Response:
        """The supervisor reads the configuration; the reply comes after every worker has applied the result."""
        async with self._reloading:
            self.control.orders[Order.REPLY].clear()
            self.control.report(Report.ASK_RELOAD)
            try:
                async with asyncio.timeout(RELOAD_TIMEOUT):
                    await self.control.next(Order.REPLY)
            except TimeoutError:
                message = f"Not every worker has applied the configuration within {RELOAD_TIMEOUT:g} s."
                raise ApiError(504, message, type="server_error") from None
            answer = self._shared.answer.get()
        if isinstance(answer, str):
            raise invalid_config(answer)
        return json_response(200, encode(answer))

    # -- state of the workers ---------------------------------------------------------------

    async def ready(self, http: web.Request) -> web.StreamResponse:
        """200 when all workers serve."""
        states = [worker.state for worker in self._shared.workers()]
        status = readiness(states)
        body = {"status": status, "workers": [state.name.lower() for state in states]}
        return json_response(200 if status == "ready" else 503, encode(body))

    async def follow_reloads(self) -> None:
        while True:
            await self.control.next(Order.RELOAD)
            self.config = self._shared.config.get()

    def collect(self) -> Iterable[Metric]:
        """As of the last collection."""
        workers = self._shared.workers()
        yield gauge("firsttoken_workers", [((), sum(worker.state is WorkerState.SERVING for worker in workers))])
        starts = counter("firsttoken_worker_starts_total")
        for number, worker in enumerate(workers, 1):
            starts.of[(str(number),)].value = worker.starts
        yield from starts.collect()
        yield from merge_metrics({None: self._retired, **self._last})

    async def collect_forever(self) -> None:
        while True:
            await self.collect_counters()
            await asyncio.sleep(COLLECT_INTERVAL)

    async def collect_counters(self) -> None:
        for number, (process, metrics) in (await self._get_all(COUNTS, decode_counts)).items():
            if self._processes.get(number, process) != process:
                self._retired = add_retired(self._retired, self._last[number])
                self._shared.retired.put(self._retired)
            before = [] if self._exposed else self._last.get(number, [])
            self._processes[number] = process
            self._last[number] = keep_maxima(before, metrics)
        self._exposed = False

    # -- requests to workers ----------------------------------------------------------------

    async def _get_all(self, path: str, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Mapping[int, Any]:
        """The replies with status 200, by worker number from 1."""
        replies = await self._ask_all("GET", path)
        return {number: decode(body) for number, (status, body) in replies.items() if status == 200}

    async def _ask_all(self, method: str, path: str, body: bytes | None = None) -> Mapping[int, tuple[int, bytes]]:
        """Status and body of the replies, by worker number from 1."""
        replies = await asyncio.gather(*(self._ask(at, method, path, body) for at in range(len(self._sessions))))
        return {number: reply for number, reply in enumerate(replies, 1) if reply is not None}

    async def _ask(
        self, worker: int, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes] | None:
        """Status and body of the reply; None from a worker that is gone, or late."""
        url = f"http://worker{path}"
        try:
            async with self._sessions[worker].request(method, url, data=body, headers=headers) as reply:
                return reply.status, await reply.read()
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("worker %d does not answer: %s", worker + 1, error)
            return None

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


def no_worker() -> ApiError:
    return ApiError(503, "No worker serves now.", type="server_error", code="unavailable")


def readiness(states: Collection[WorkerState]) -> str:
    if WorkerState.DRAINING in states:
        return "draining"
    return "ready" if {*states} == {WorkerState.SERVING} else "starting"


# -- merging -------------------------------------------------------------------------------


def decode_counts(encoded: bytes) -> tuple[bytes, list[Metric]]:
    process, fields = msgspec.msgpack.decode(encoded)
    metrics = []
    for name, documentation, type, samples in fields:
        metrics.append(metric := Metric(name, documentation, type))
        for sample_name, labels, value, _, exemplar, *_ in samples:
            metric.add_sample(sample_name, labels, value, exemplar=exemplar and Exemplar(*exemplar))
    return process, metrics


def merge_metrics(by_worker: Mapping[int | None, Iterable[Metric]]) -> list[Metric]:
    """`by_worker`: by worker number; None: all exited workers. Names and labels keep their first order."""
    metrics: dict[str, Metric] = {}
    merged = defaultdict[str, dict[tuple[object, ...], Sample]](dict)
    for worker, found in by_worker.items():
        for metric in found:
            if metric.name not in metrics:
                metrics[metric.name] = Metric(metric.name, metric.documentation, metric.type)
            combine, samples = _merge_of(metric), merged[metric.name]
            for sample in _labelled(metric, worker):
                key = sample.name, *sample.labels.items()
                samples[key] = _merged(samples[key], sample, combine) if key in samples else sample
    for name, metric in metrics.items():
        metric.samples = [*merged[name].values()]
    return [*metrics.values()]


def _merge_of(metric: Metric) -> Callable[[float, float], float]:
    if metric.type in ADDED:
        return add
    row = BY_FAMILY.get(metric.name)
    return max if row is None else MERGE[row.merge]


def _labelled(metric: Metric, worker: int | None) -> Iterable[Sample]:
    if not metric.name.startswith(OF_PROCESS):
        return metric.samples
    return [sample._replace(labels={**sample.labels, "worker": str(worker)}) for sample in metric.samples]


def _merged(one: Sample, other: Sample, combine: Callable[[float, float], float]) -> Sample:
    latest = one.exemplar or other.exemplar
    if one.exemplar and other.exemplar:
        latest = max(one.exemplar, other.exemplar, key=lambda exemplar: float(exemplar.timestamp or 0.0))
    return Sample(one.name, one.labels, combine(one.value, other.value), exemplar=latest)


def add_retired(retired: Iterable[Metric], last: Iterable[Metric]) -> list[Metric]:
    """Totals of exited workers, with the last counters of one more."""
    counters = [
        metric for metric in (*retired, *last) if metric.type in ADDED and not metric.name.startswith(OF_PROCESS)
    ]
    return merge_metrics({None: counters})


def keep_maxima(before: Iterable[Metric], now: Iterable[Metric]) -> list[Metric]:
    """`now`, with each `*_max_*` gauge at least as in `before`: workers reset such gauges at each read."""
    maxima = {metric.name: metric for metric in before if metric.type == "gauge" and "_max_" in metric.name}
    return [merge_metrics({1: [maxima[metric.name], metric]})[0] if metric.name in maxima else metric for metric in now]


def merge_endpoints(by_worker: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each endpoint from the worker with the most samples, and health and beliefs from each: breakers differ."""
    best: dict[str, dict[str, Any]] = {}
    health: dict[str, dict[str, str]] = {}
    believed: dict[str, dict[tuple[str, str], Any]] = {}
    held: dict[str, dict[str, Any]] = {}
    for worker, entries in by_worker.items():
        for entry in entries:
            name = entry["endpoint"]["id"]
            health.setdefault(name, {})[str(worker)] = entry["load"]["health"]
            found = believed.setdefault(name, {})
            for belief in entry["believed"]:
                found.setdefault((belief["what"], belief["why"]), belief)
            _add_held(held.setdefault(name, {}), entry["held"])
            if name not in best or entry["samples"] > best[name]["samples"]:
                best[name] = {**entry, "worker": worker}
    return [
        {
            **entry,
            "health_by_worker": health[name],
            "believed": [*believed[name].values()],
            "held": [*held[name].values()],
        }
        for name, entry in best.items()
    ]


def _add_held(total: dict[str, Any], found: Iterable[Mapping[str, Any]]) -> None:
    """Add the requests that a worker holds, by rule."""
    for each in found:
        before = total.get(each["rule"], {**each, "requests": 0})
        requests, longest = before["requests"] + each["requests"], max(before["longest_s"], each["longest_s"])
        total[each["rule"]] = {**each, "requests": requests, "longest_s": longest}
