"""The admin port of several workers: asks each worker over a private Unix socket, and answers for all.

Rules:
- The aggregator is a process of its own: adding up metrics delays no caller, and survives the exit of a worker.
- It alone reads the configuration again. Workers apply what it has checked; those that start later begin with it.
- Counters are collected once a second. Counts after the last collection are lost when a worker exits; collected ones
  are kept and added to those of the successor.
- A worker without an answer in time is left out; of counters the last known stand.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from time import time
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.registry import Collector

from backends.interface import Operation
from gateway.admin.admin_replies import json_response
from gateway.admin.admin_server import AdminServer
from gateway.admin.admin_views import RequestQuery, merge_endpoints
from gateway.api.api_error import ApiError
from gateway.config.models import Config
from gateway.observe.metrics.merged_metrics import add_retired, keep_maxima, merge_metrics
from gateway.observe.metrics.scrape_collectors import counts_of, route_stats
from gateway.observe.metrics.series import counter, gauge
from gateway.process import BACKLOG, HANDLER_GRACE
from gateway.reload import ConfigSource, Reloader
from gateway.strict_json import encode
from gateway.workers.shared_state import SharedState
from gateway.workers.worker import APPLY, COUNTS, Order, follow_orders
from policies.diagnosis.slow_counts import merge_windows

log = logging.getLogger("firsttoken")

COLLECT_INTERVAL = 1.0  # s between two collections of the workers' counters
WORKER_TIMEOUT = 2.0  # s for a worker to answer
APPLY_TIMEOUT = 30.0  # s for a worker to apply a configuration
ACCEPTED, UNKNOWN = 204, 404  # status of POST /ttft from the worker with the request, and from the others
HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding")

Reply = tuple[int, bytes]  # status and body


async def serve_aggregator(
    config: Config,
    source: ConfigSource,
    paths: Sequence[Path],
    shared: SharedState,
    admin: socket.socket,
    channel: socket.socket,
) -> None:
    aggregator, ended = AdminAggregator(config, source, paths, shared), asyncio.Event()

    def supervisor_gone() -> None:
        rmtree(paths[0].parent, ignore_errors=True)  # left behind
        ended.set()

    handlers = {Order.SUPERVISOR_GONE: supervisor_gone, Order.DRAIN: ended.set}
    follow_orders(channel, {**handlers, Order.HANGUP: partial(aggregator.reloader.reload_soon, "SIGHUP")})
    app = AdminServer(aggregator).app()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=HANDLER_GRACE, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, admin, backlog=BACKLOG).start()
    aggregator.reloader.start()
    collecting = asyncio.create_task(aggregator.collect_forever())
    await ended.wait()
    collecting.cancel()
    await runner.cleanup()
    await aggregator.close()


class AdminAggregator(Collector):
    """Implements `gateway.admin.admin_server.AdminData`. `paths`: the workers' private sockets, in one directory."""

    def __init__(self, config: Config, source: ConfigSource, paths: Sequence[Path], shared: SharedState) -> None:
        self.reloader = Reloader(config, source, self._apply_config)
        self._sessions = {
            number: ClientSession(connector=UnixConnector(str(path)), auto_decompress=False)
            for number, path in enumerate(paths, 1)
        }
        self._shared = shared
        self._starts: dict[int, int] = {}  # of the process that answered last, by worker number
        self._last: dict[int | None, list[Metric]] = {}  # and the counters of that process
        self._answered = 0  # workers, in the last collection
        self._exposed = False  # since the last collection
        self._retired: list[Metric] = shared.retired.get() or []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(self.reloader.counts)

    # -- AdminData --------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.reloader.config

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

    async def causes(self, route: str, minutes: int) -> Mapping[str, Any]:
        found = (await self._get_all("/causes?" + urlencode({"route": route, "minutes": minutes}))).values()
        return {name: merge_windows([each[name] for each in found]) for name in ("now", "before")}

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        return merge_endpoints(await self._get_all("/fleet"))

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Asks the first worker that answers: workers see the load of all."""
        forwarded = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        for worker in self._sessions:
            reply = await self._ask(worker, "POST", f"/explain?path={operation.value}", body, headers=forwarded)
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

    def reload(self) -> Awaitable[web.Response]:
        return self.reloader.on_post()

    # -- state of the workers ---------------------------------------------------------------

    async def _apply_config(self, config: Config) -> None:
        """Returns when every worker has applied the configuration, or will start with it."""
        self._shared.config.put(config)
        replies = await self._ask_all("POST", APPLY, timeout=APPLY_TIMEOUT)
        for worker in self._sessions:
            if replies.get(worker, (0, b""))[0] != ACCEPTED:
                log.error("worker %d has not applied the configuration", worker)

    def collect(self) -> Iterable[Metric]:
        """As of the last collection."""
        yield gauge("firsttoken_workers", [((), self._answered)])
        starts = counter("firsttoken_worker_starts_total")
        for number, count in sorted(self._starts.items()):
            starts.of[(str(number),)].value = count
        yield from starts.collect()
        yield from merge_metrics({None: self._retired, **self._last})

    async def collect_forever(self) -> None:
        while True:
            await self.collect_counters()
            await asyncio.sleep(COLLECT_INTERVAL)

    async def collect_counters(self) -> None:
        found = await self._get_all(COUNTS, decode_counts)
        for number, (starts, metrics) in found.items():
            if self._starts.get(number, starts) != starts:
                self._retired = add_retired(self._retired, self._last[number])
                self._shared.retired.put(self._retired)
            before = [] if self._exposed else self._last.get(number, [])
            self._starts[number] = starts
            self._last[number] = keep_maxima(before, metrics)
        self._answered = len(found)
        self._exposed = False

    # -- requests to workers ----------------------------------------------------------------

    async def _get_all(self, path: str, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Mapping[int, Any]:
        """The replies with status 200, by worker number from 1."""
        replies = await self._ask_all("GET", path)
        return {number: decode(body) for number, (status, body) in replies.items() if status == 200}

    async def _ask_all(
        self, method: str, path: str, body: bytes | None = None, timeout: float = WORKER_TIMEOUT
    ) -> Mapping[int, Reply]:
        replies = await asyncio.gather(*(self._ask(each, method, path, body, timeout) for each in self._sessions))
        return {number: reply for number, reply in zip(self._sessions, replies, strict=True) if reply is not None}

    async def _ask(
        self,
        worker: int,
        method: str,
        path: str,
        body: bytes | None = None,
        timeout: float = WORKER_TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> Reply | None:
        """None from a worker that is gone, or late."""
        options: dict[str, Any] = {"data": body, "headers": headers, "timeout": ClientTimeout(timeout)}
        try:
            async with self._sessions[worker].request(method, f"http://worker{path}", **options) as reply:
                return reply.status, await reply.read()
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("worker %d does not answer: %s", worker, error)
            return None

    async def close(self) -> None:
        await self.reloader.close()
        for session in self._sessions.values():
            await session.close()


def no_worker() -> ApiError:
    return ApiError(503, "No worker serves now.", type="server_error", code="unavailable")


def decode_counts(encoded: bytes) -> tuple[int, list[Metric]]:
    starts, fields = msgspec.msgpack.decode(encoded)
    metrics = []
    for name, documentation, type, samples in fields:
        metrics.append(metric := Metric(name, documentation, type))
        for sample_name, labels, value, _, exemplar, *_ in samples:
            metric.add_sample(sample_name, labels, value, exemplar=exemplar and Exemplar(*exemplar))
    return starts, metrics
