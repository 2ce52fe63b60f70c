"""One gateway of several: the life of a worker's process, as its supervisor orders it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from aiohttp import web
from prometheus_client.core import Metric

from gateway.admin.admin_server import json_response
from gateway.admin.gateway_admin import GatewayAdmin
from gateway.api.strict_json import encode
from gateway.app import Gateway, tune_gc
from gateway.config.models import Config
from gateway.observe.log_format import to_stderr, unhandled
from gateway.serve import loop_factory
from gateway.workers.child_process import DRAIN, FORCE_STOP, GO, PREPARED, RELOAD, RELOADED, SERVING, TOLD
from gateway.workers.merged_stats import families
from gateway.workers.shared_value import SharedValue
from gateway.workers.worker_context import WorkerContext

log = logging.getLogger("firsttoken")

COUNTS = "/counts"  # of the private port: metrics, to be added up


def serve_worker(config: Config, seat: WorkerContext, shelf: SharedValue, line: socket.socket) -> int:
    """Returns the exit code."""
    to_stderr(f"worker {seat.number + 1}: ")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_live(config, seat, shelf, line))


class ControlChannel(asyncio.Protocol):
    """The supervisor's. When it is gone, it is over for us too."""

    def __init__(self) -> None:
        self.go, self.drain, self.hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reload, self.told = asyncio.Event(), asyncio.Event()
        self._events = {GO: self.go, DRAIN: self.drain, FORCE_STOP: self.hurry, RELOAD: self.reload, TOLD: self.told}

    def data_received(self, data: bytes) -> None:
        for order, event in self._events.items():
            if order in data:
                event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drain.set()


async def _live(config: Config, seat: WorkerContext, shelf: SharedValue, line: socket.socket) -> int:
    asyncio.get_running_loop().set_exception_handler(unhandled)
    orders = ControlChannel()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: orders, sock=line)
    gateway = Gateway(config, seat)
    gateway.admin_app.router.add_get(COUNTS, _Counts(gateway.admin).answer)
    await gateway.prepare(seat.admin)
    tune_gc()
    transport.write(PREPARED)
    reloading = asyncio.create_task(_reload(gateway, orders, shelf, transport))
    await first(orders.go, orders.drain, orders.hurry)
    if orders.go.is_set():
        await gateway.open(seat.data)
        transport.write(SERVING)
        await first(orders.drain, orders.hurry)
    reloading.cancel()
    await _stop(gateway, orders)
    return 0


async def _reload(gateway: Gateway, orders: ControlChannel, shelf: SharedValue, line: asyncio.WriteTransport) -> None:
    """What the supervisor has found good. Who cannot take it all the same drains, and is replaced by one that begins
    with it: after a reload no two workers are of two minds."""
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        try:
            await gateway.apply_config(shelf.get())
        except Exception:
            log.exception("the configuration could not be taken; another worker takes its place")
            orders.drain.set()
        line.write(RELOADED)


async def _stop(gateway: Gateway, orders: ControlChannel) -> None:
    async def hasten() -> None:
        await orders.hurry.wait()
        gateway.force_stop = True

    hastening = asyncio.create_task(hasten())
    drain = gateway.config.server.drain
    await gateway.stop(drain.grace, drain.wait)
    hastening.cancel()


async def first(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


class _Counts:
    """What the desk adds up. `life` tells one process from its successor, which counts from zero."""

    def __init__(self, admin: GatewayAdmin) -> None:
        self.admin, self.life = admin, os.urandom(8).hex()

    async def answer(self, http: web.Request) -> web.StreamResponse:
        found = list(self.admin.registry.collect())  # here, where it is counted; written in a thread
        return json_response(200, await asyncio.get_running_loop().run_in_executor(None, self._told, found))

    def _told(self, found: list[Metric]) -> bytes:
        return encode({"life": self.life, "families": families(found)})
