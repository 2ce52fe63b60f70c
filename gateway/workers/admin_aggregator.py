"""The admin port of several workers: it asks each of them, on a private Unix socket, and answers for all.

Rules:
- It is a process of its own: what it costs to add up metrics no caller waits for, and no worker's end takes it along.
- It looks at the workers' counts once a second. What one counted after the last look is lost with it; what was shown
  once is not: the last counts of a process that is gone are kept, and added to those of its successor.
- One that does not answer in time is left out, of counts with the last that is known.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from time import time
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backends.interface import Operation
from gateway.admin.admin_server import AdminServer, json_response
from gateway.admin.request_query import RequestQuery
from gateway.api.api_error import ApiError
from gateway.api.strict_json import encode
from gateway.app import CUT
from gateway.config.models import Config
from gateway.observe.log_format import unhandled
from gateway.observe.metrics.route_stats import collected, route_stats
from gateway.observe.metrics.series import counter, gauge
from gateway.reload import Reloads, refused
from gateway.runtime import redacted_config
from gateway.serve import loop_factory
from gateway.workers.child_process import ASKED
from gateway.workers.listen_sockets import BACKLOG
from gateway.workers.merged_stats import Families, add_retired, endpoints, kept, merged
from gateway.workers.retired_counters import RetiredCounters
from gateway.workers.shared_value import SharedValue
from gateway.workers.worker import COUNTS, ControlChannel, first
from gateway.workers.worker_register import Entry, WorkerRegister, WorkerState
from policies.routes.route import Route

log = logging.getLogger("firsttoken")

LOOK = 1.0  # s between two looks at the workers' counts
PATIENCE = 2.0  # s that a worker has to answer
TAKEN, UNKNOWN = 204, 404  # what is said of a beacon by the worker whose request it was, and by the others
TAKING = 30.0  # s that all of them have to take a configuration
HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding")


def serve_aggregator(desk: AdminAggregator, admin: socket.socket, line: socket.socket) -> int:
    """Returns the exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_live(desk, admin, line))
    return 0


async def _live(desk: AdminAggregator, admin: socket.socket, line: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(unhandled)
    orders = desk.orders
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: orders, sock=line)
    desk.ask = lambda: transport.write(ASKED)
    runner = web.AppRunner(desk.app(), access_log=None, shutdown_timeout=CUT, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, admin, backlog=BACKLOG).start()
    tasks = [asyncio.create_task(work) for work in (desk.look_forever(), desk.take_forever())]
    await first(orders.drain, orders.hurry)
    for task in tasks:
        task.cancel()
    await runner.cleanup()
    await desk.close()
    if not orders.hurry.is_set():  # the supervisor is gone, and has left what it would have taken along
        rmtree(desk.home, ignore_errors=True)


class AdminAggregator(Collector):
    """`paths`: of the workers' private sockets."""

    def __init__(
        self,
        config: Config,
        paths: Sequence[str],
        register: WorkerRegister,
        retired: RetiredCounters,
        configs: SharedValue,
        answers: SharedValue,
    ) -> None:
        self._config, self.paths, self.register, self.retired = config, paths, register, retired
        self.configs, self.answers, self.orders = configs, answers, ControlChannel()
        self.ask: Callable[[], None] = lambda: None  # the supervisor for a reload
        self._reloading = asyncio.Lock()
        self.home = Path(paths[0]).parent
        self.lives: dict[int, str] = {}  # by worker: the process that was looked at last
        self.last: dict[int, Families] = {}  # and its counts
        self.shown = False  # since the last look
        self.dead = retired.read()
        self.sessions: dict[int, ClientSession] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(Reloads(register.reloads, keep=True))

    def app(self) -> web.Application:
        app = AdminServer(self).app()
        app.router.add_get("/ready", self.ready)
        return app

    # -- AdminData ------------------------------------------------------------------------

    async def refresh(self) -> None:
        await self.look()
        self.shown = True

    def routes(self) -> Sequence[Route]:
        passthrough = self._config.passthrough_route
        return [*self._config.routes.values(), *([passthrough] if passthrough else [])]

    def pools(self) -> Collection[str]:
        return self._config.pools

    def config(self) -> Mapping[str, Any]:
        return redacted_config(self._config)

    async def requests(self, query: RequestQuery) -> bytes:
        """As one gateway would answer; every worker is asked for as many."""
        return encode(query.merge(await self._ask_all(query.url())))

    async def route_stats(self) -> bytes:
        await self.look()
        return encode(route_stats(collected(self.collect()), self.routes(), time()))

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        return endpoints(await self._ask_all("/fleet"))

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Asks the first worker that serves: workers see each other's load as their own."""
        forwarded = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        path = f"/explain?path={operation.value}"
        for number, entry in enumerate(self.register.all()):
            if entry.state is WorkerState.SERVING:
                async with self._session(number).post(f"http://worker{path}", data=body, headers=forwarded) as reply:
                    return json_response(reply.status, await reply.read())
        raise no_worker()

    async def report_ttft(self, beacon: bytes) -> web.Response:
        """Sends the beacon to all workers; the one that served the request knows its id."""
        asked = [self._post(number, "/ttft", beacon) for number in range(len(self.paths))]
        replies = [reply for reply in await asyncio.gather(*asked) if reply is not None]
        if not replies:
            raise no_worker()
        status, body = min(replies, key=lambda reply: (reply[0] == UNKNOWN, reply[0]))
        return web.Response(status=status) if status == TAKEN else json_response(status, body)

    async def reload(self) -> web.Response:
        """The supervisor reads the configuration; the reply comes when every worker has applied it."""
        async with self._reloading:
            self.orders.told.clear()
            self.ask()
            try:
                async with asyncio.timeout(TAKING):
                    await self.orders.told.wait()
            except TimeoutError:
                message = f"Not every worker has taken it within {TAKING:g} s."
                raise ApiError(504, message, type="server_error") from None
            said = self.answers.get()
        if isinstance(said, str):
            raise refused(said)
        return json_response(200, encode(said))

    # -- state of the workers -------------------------------------------------------------

    async def take_forever(self) -> None:
        """What is in force, to be shown."""
        while True:
            await self.orders.reload.wait()
            self.orders.reload.clear()
            self._config = self.configs.get()

    async def ready(self, http: web.Request) -> web.StreamResponse:
        """200 when all workers serve."""
        entries = self.register.all()
        status = readiness(entries)
        said = {"status": status, "workers": [entry.state.name.lower() for entry in entries]}
        return json_response(200 if status == "ready" else 503, encode(said))

    def collect(self) -> Iterable[Metric]:
        """As of the last look."""
        entries = self.register.all()
        serving = sum(entry.state is WorkerState.SERVING for entry in entries)
        yield gauge("firsttoken_workers", [((), serving)])
        starts = counter("firsttoken_worker_starts_total")
        for number, entry in enumerate(entries, 1):
            starts.of[(str(number),)].value = entry.starts
        yield from starts.collect()
        yield from merged({None: self.dead, **{number + 1: told for number, told in self.last.items()}})

    # -- asking workers -------------------------------------------------------------------

    async def look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """At the counts of all."""
        for number, told in (await self._ask_all(COUNTS)).items():
            worker = number - 1
            if self.lives.get(worker, told["life"]) != told["life"]:
                self.dead = add_retired(self.dead, self.last[worker])
                self.retired.write(self.dead)
            before = [] if self.shown else self.last.get(worker, [])
            self.lives[worker], self.last[worker] = told["life"], kept(before, told["families"])
        self.shown = False

    async def _ask_all(self, path: str) -> Mapping[int, Any]:
        """What each of them says that answers, by its number from 1."""
        answers = await asyncio.gather(*(self._ask(number, path) for number in range(len(self.paths))))
        return {number: answer for number, answer in enumerate(answers, 1) if answer is not None}

    async def _ask(self, number: int, path: str) -> Any:
        try:
            async with self._session(number).get(f"http://worker{path}") as said:
                return msgspec.json.decode(await said.read()) if said.status == 200 else None
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("worker %d does not answer: %s", number + 1, error)
            return None

    async def _post(self, number: int, path: str, body: bytes) -> tuple[int, bytes] | None:
        try:
            async with self._session(number).post(f"http://worker{path}", data=body) as reply:
                return reply.status, await reply.read()
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("worker %d does not answer: %s", number + 1, error)
            return None

    def _session(self, number: int) -> ClientSession:
        session = self.sessions.get(number)
        if session is None:
            connector = UnixConnector(self.paths[number])
            timeout = ClientTimeout(PATIENCE)
            session = self.sessions[number] = ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return session

    async def close(self) -> None:
        for session in self.sessions.values():
            await session.close()


def no_worker() -> ApiError:
    return ApiError(503, "No worker serves now.", type="server_error", code="unavailable")


def readiness(entries: Sequence[Entry]) -> str:
    states = {entry.state for entry in entries}
    if WorkerState.DRAINING in states:
        return "draining"
    return "ready" if states == {WorkerState.SERVING} else "starting"
