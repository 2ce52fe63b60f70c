"""The admin port of several workers: asks each worker over a private Unix socket, and answers for all.

Rules:
- The aggregator is a process of its own: adding up metrics delays no caller, and survives the exit of a worker.
- It alone reads the configuration again. Workers apply what it has checked; those that start later begin with it.
- Counters are collected once a second. Counts after the last collection are lost when a worker exits; collected ones
  are kept and added to those of the successor.
- A worker without an answer in time is left out; of counters the last known stand. One that stands still is not waited
  for, and answers name it in STALLED_HEADER; a configuration is applied by it when it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from shutil import rmtree
from time import time
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backends.interface import Operation
from gateway.admin.admin_replies import json_response
from gateway.admin.admin_server import AdminServer
from gateway.admin.admin_views import merge_endpoints
from gateway.admin.request_query import RequestQuery
from gateway.api.api_error import ApiError
from gateway.config.models import Config, Key
from gateway.observe.metrics.merged_metrics import MergedMetrics, decode_counts
from gateway.observe.metrics.scrape_collectors import counts_of, route_stats
from gateway.observe.metrics.series import gauge
from gateway.observe.slow_requests import merge_incidents, merge_windows
from gateway.observe.windows.history_keeper import HistoryKeeper
from gateway.process import serve_app
from gateway.reload import ConfigSource, Reloader
from gateway.strict_json import encode
from gateway.workers.shared_state import SharedState
from gateway.workers.worker import APPLY, COUNTS, DRAIN, KNOWN_KEYS, Order, follow_orders
from policies.prefix_doctor.prefix_ledger import merge_advice

log = logging.getLogger("firsttoken")

COLLECT_INTERVAL = 1.0  # s between two collections of the workers' counters
WORKER_TIMEOUT = 2.0  # s for a worker to answer
APPLY_TIMEOUT = 10.0  # s for a worker to apply a configuration
CHANGES = {APPLY: "configuration", DRAIN: "state of an endpoint"}
STALLED_HEADER = "x-firsttoken-stalled-workers"  # numbers, from 1
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
    beating = asyncio.create_task(shared.beats.beat_forever(len(paths)))
    app = AdminServer(aggregator).app()
    app.on_response_prepare.append(aggregator.name_stalled)
    runner = await serve_app(app, admin, auto_decompress=False)
    await aggregator.finish_changes()
    aggregator.reloader.start()
    await aggregator.collect_counters()  # an aggregator that was started again begins with the counts so far
    aggregator.history.start()
    collecting = asyncio.create_task(aggregator.collect_forever())
    await ended.wait()
    collecting.cancel()
    beating.cancel()
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
        self._behind: dict[str, set[int]] = {APPLY: set(), DRAIN: set()}  # workers yet to follow the latest change
        self.merged = MergedMetrics(shared.retired.get() or [], shared.retired.put)
        self.registry = CollectorRegistry()
        self.registry.register(self.merged)
        self.registry.register(self.reloader.counts)
        self.registry.register(self)
        self.history = HistoryKeeper(self._route_stats)

    # -- AdminData --------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.reloader.config

    async def metrics(self) -> CollectorRegistry:
        await self.collect_counters()
        self.merged.on_exposed()
        return self.registry

    async def requests(self, query: RequestQuery) -> bytes:
        """Asks every worker for the full number, and merges as one gateway would answer."""
        return encode(query.merge(await self._get_all(query.url())))

    async def route_stats(self) -> bytes:
        await self.collect_counters()
        return encode(self._route_stats())

    def _route_stats(self) -> Mapping[str, Any]:
        return route_stats(counts_of(self.merged.collect()), self.config.all_routes, time())

    async def windows(self, window: str) -> bytes:
        return self.history.view(window)

    async def causes(self, route: str, minutes: int) -> Mapping[str, Any]:
        found = (await self._get_all("/causes?" + urlencode({"route": route, "minutes": minutes}))).values()
        return {name: merge_windows([each[name] for each in found]) for name in ("now", "before")}

    async def incidents(self, minutes: int) -> Mapping[str, Any]:
        return merge_incidents([*(await self._get_all(f"/incidents?minutes={minutes}")).values()])

    async def advice(self) -> Mapping[str, Any]:
        return merge_advice([*(await self._get_all("/advise")).values()])

    async def prefixes(self) -> Sequence[Mapping[str, Any]]:
        """Of the worker that keeps prompts for warm-ups."""
        return next((found for found in (await self._get_all("/prefixes")).values() if found), [])

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        return merge_endpoints(await self._get_all("/fleet"))

    @property
    def drained(self) -> Set[str]:
        return self._shared.drained.get() or frozenset()

    async def drain(self, endpoints: Set[str]) -> Sequence[str]:
        self._shared.drained.put(endpoints)
        return await self._have_applied(DRAIN)

    async def known_keys(self) -> Sequence[Key]:
        found = {each["sha256"]: each for keys in (await self._get_all(KNOWN_KEYS)).values() for each in keys}
        return [Key.model_validate(each) for each in found.values()]

    async def learned(self) -> Mapping[str, Any]:
        """Of one worker for each endpoint."""
        return {name: known for each in (await self._get_all("/learned")).values() for name, known in each.items()}

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Asks the first worker that answers: workers see the load of all."""
        forwarded = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        for worker in self._sessions:
            if worker in self.stalled:
                continue
            reply = await self._ask(worker, "POST", f"/explain?path={operation.value}", data=body, headers=forwarded)
            if reply is not None:
                return json_response(*reply)
        raise no_worker()

    async def report_ttft(self, beacon: bytes) -> web.Response:
        """Sends the beacon to all workers; only the worker with the request knows its id."""
        replies = await self._ask_all("POST", "/ttft", data=beacon)
        if not replies:
            raise no_worker()
        status, body = min(replies.values(), key=lambda reply: (reply[0] == UNKNOWN, reply[0]))
        return web.Response(status=status) if status == ACCEPTED else json_response(status, body)

    def reload(self) -> Awaitable[web.Response]:
        return self.reloader.on_post()

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_workers_stalled", [((), len(self.stalled))])

    @property
    def stalled(self) -> Sequence[int]:
        """Workers that stand still, by number from 1."""
        return [worker for worker in self._sessions if self._shared.beats.is_stalled(worker - 1)]

    async def name_stalled(self, request: web.Request, response: web.StreamResponse) -> None:
        if stalled := self.stalled:
            response.headers[STALLED_HEADER] = ", ".join(map(str, stalled))

    # -- state of the workers ---------------------------------------------------------------

    async def _apply_config(self, config: Config) -> Sequence[str]:
        """Returns when every worker has applied the configuration, or will start with it: names of the others."""
        self._shared.config.put(config)
        return await self._have_applied(APPLY)

    async def finish_changes(self) -> None:
        """Have the last changes applied, if there were any: the aggregator before may have died between its two
        steps."""
        for path, shared in ((APPLY, self._shared.config), (DRAIN, self._shared.drained)):
            if shared.get() is not None:
                await self._have_applied(path)

    async def _have_applied(self, path: str) -> Sequence[str]:
        """Names of the workers that have not."""
        self._behind[path] = {*self._sessions}
        await self.catch_up(path)
        behind = sorted(self._behind[path])
        for worker in behind:
            log.error("worker %d has not applied the %s", worker, CHANGES[path])
        return [f"worker {worker}" for worker in behind]

    async def catch_up(self, path: str) -> None:
        """Ask workers that have missed a change to apply it."""
        asked = [worker for worker in self._behind[path] if worker not in self.stalled]
        replies = await asyncio.gather(*(self._ask(each, "POST", path, seconds=APPLY_TIMEOUT) for each in asked))
        accepted = {each for each, reply in zip(asked, replies, strict=True) if reply and reply[0] == ACCEPTED}
        self._behind[path] -= accepted

    async def collect_forever(self) -> None:
        while True:
            await self.collect_counters()
            for path, behind in self._behind.items():
                if behind:
                    await self.catch_up(path)
            await asyncio.sleep(COLLECT_INTERVAL)

    async def collect_counters(self) -> None:
        self.merged.update(await self._get_all(COUNTS, decode_counts))

    # -- requests to workers ----------------------------------------------------------------

    async def _get_all(self, path: str, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Mapping[int, Any]:
        """The replies with status 200, by worker number from 1."""
        replies = await self._ask_all("GET", path)
        return {number: decode(body) for number, (status, body) in replies.items() if status == 200}

    async def _ask_all(self, method: str, path: str, **options: Any) -> Mapping[int, Reply]:
        stalled = self.stalled
        asked = [worker for worker in self._sessions if worker not in stalled]
        replies = await asyncio.gather(*(self._ask(each, method, path, **options) for each in asked))
        return {number: reply for number, reply in zip(asked, replies, strict=True) if reply is not None}

    async def _ask(
        self, worker: int, method: str, path: str, *, seconds: float = WORKER_TIMEOUT, **options: Any
    ) -> Reply | None:
        """None from a worker that is gone, or takes more than `seconds`. `options`: of aiohttp's `request`."""
        options["timeout"] = ClientTimeout(seconds)
        try:
            async with self._sessions[worker].request(method, f"http://worker{path}", **options) as reply:
                return reply.status, await reply.read()
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("worker %d does not answer: %s", worker, error)
            return None

    async def close(self) -> None:
        await self.history.close()
        await self.reloader.close()
        for session in self._sessions.values():
            await session.close()


def no_worker() -> ApiError:
    return ApiError(503, "No worker serves now.", type="server_error", code="unavailable")
