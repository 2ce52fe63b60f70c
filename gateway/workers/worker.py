"""One worker: a gateway in a process of its own, controlled by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from aiohttp import web
from prometheus_client.core import Metric

from gateway.admin.admin_server import json_response
from gateway.admin.gateway_admin import GatewayAdmin
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.log_format import to_stderr, unhandled
from gateway.process import loop_factory, tune_gc
from gateway.strict_json import encode
from gateway.wiring import WorkerContext
from gateway.workers.child_process import PREPARED, RELOADED, SERVING, ControlChannel, first_of
from gateway.workers.merged_stats import COUNTS, families
from gateway.workers.shared_state import SharedValue

log = logging.getLogger("firsttoken")


def serve_worker(config: Config, context: WorkerContext, configs: SharedValue, channel: socket.socket) -> int:
    """Returns the exit code. `configs`: where the supervisor puts a reloaded configuration."""
    to_stderr(f"worker {context.number + 1}: ")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, context, configs, channel))


async def _serve(config: Config, context: WorkerContext, configs: SharedValue, channel: socket.socket) -> int:
    asyncio.get_running_loop().set_exception_handler(unhandled)
    control = await ControlChannel.open(channel)
    gateway = Gateway(config, context)
    gateway.admin_app.router.add_get(COUNTS, _Counts(gateway.admin).answer)
    await gateway.prepare(context.admin)
    tune_gc()
    control.report(PREPARED)
    reloading = asyncio.create_task(_reload_forever(gateway, control, configs))
    await first_of(control.go, control.drain, control.force_stop)
    if control.go.is_set():
        await gateway.open(context.data)
        control.report(SERVING)
        await first_of(control.drain, control.force_stop)
    reloading.cancel()
    await _stop(gateway, control)
    return 0


async def _reload_forever(gateway: Gateway, control: ControlChannel, configs: SharedValue) -> None:
    """Applies configurations checked by the supervisor. After a failure the worker drains and is replaced by a
    process with
    the new configuration: after a reload no two workers run different configurations."""
    while True:
        await control.reload.wait()
        control.reload.clear()
        try:
            await gateway.apply_config(configs.get())
        except Exception:
            log.exception("could not apply the reloaded configuration; restarting this worker")
            control.drain.set()
        control.report(RELOADED)


async def _stop(gateway: Gateway, control: ControlChannel) -> None:
    async def watch_force_stop() -> None:
        await control.force_stop.wait()
        gateway.force_stop = True

    watching = asyncio.create_task(watch_force_stop())
    drain = gateway.config.server.drain
    await gateway.stop(drain.grace, drain.wait)
    watching.cancel()


class _Counts:
    """GET /counts of the worker's private port. `life` tells a process from its successor, which counts from 0."""

    def __init__(self, admin: GatewayAdmin) -> None:
        self.admin = admin
        self.life = os.urandom(8).hex()

    async def answer(self, http: web.Request) -> web.StreamResponse:
        metrics = list(self.admin.registry.collect())  # on the counting loop; encoded in a thread
        return json_response(200, await asyncio.get_running_loop().run_in_executor(None, self._encode, metrics))

    def _encode(self, metrics: list[Metric]) -> bytes:
        return encode({"life": self.life, "families": families(metrics)})
