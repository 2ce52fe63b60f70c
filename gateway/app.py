"""Composition root: a gateway is a core and a list of parts that start, follow reloads and close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from socket import socket
from time import monotonic
from typing import TypeVar

from aiohttp import web

from gateway.admin.admin_server import AdminServer
from gateway.config.models import Config
from gateway.core.part import Part
from gateway.handover import bind_or_inherit
from gateway.part_list import PARTS
from gateway.process import ADMIN_KEY, LISTEN_KEY, naming, serve_app, url_of
from gateway.wiring import Core
from gateway.worker_context import WorkerContext

P = TypeVar("P", bound=Part)


class Gateway:
    """A gateway: `start`, then `url` and `admin_url` are served until `stop`.

    `worker`: set in each of several processes behind the same port. `parts`: a core without any routes, fails over,
    streams and records. `force_stop` ends the waits of `stop`.
    """

    def __init__(
        self,
        config: Config,
        worker: WorkerContext | None = None,
        parts: Sequence[Callable[[Core], Part]] = PARTS,
    ) -> None:
        self.url = self.admin_url = ""
        self.force_stop = False
        self.core = core = Core(config, worker)
        self.parts = [build(core) for build in parts]
        core.attach(self.parts)
        self.admin_app = AdminServer(core.admin).app()
        self._admin_runner: web.AppRunner | None = None
        self.sockets: dict[str, socket] = {}  # that listen, by configuration key
        self.runtime, self.fleet = core.runtime, core.fleet
        self.monitor, self.queue = core.monitor, core.queue
        self.recorder, self.registry = core.recorder, core.registry
        self.proxy, self.data_port = core.proxy, core.data_port
        self.admin, self.decider = core.admin, core.decider

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.core.config

    def part(self, kind: type[P]) -> P:
        """Raises StopIteration where the gateway has no such part."""
        return next(part for part in self.parts if isinstance(part, kind))

    # -- start ------------------------------------------------------------------------------

    async def start(self, before_open: Callable[[], None] = lambda: None) -> None:
        """Listens on new sockets; calls `before_open` when everything is loaded, before the first caller. Raises
        OSError if a port is taken."""
        server = self.config.server
        with ExitStack() as stack:
            data = None
            if self.config.opens_data_port:
                with naming(server.listen, LISTEN_KEY):
                    data = self.sockets[LISTEN_KEY] = stack.enter_context(bind_or_inherit(server.listen, LISTEN_KEY))
                self.url = url_of(data, server.listen.host, tls=self.data_port.certificate is not None)
            with naming(server.admin, ADMIN_KEY):
                admin = self.sockets[ADMIN_KEY] = stack.enter_context(bind_or_inherit(server.admin, ADMIN_KEY))
            self.admin_url = url_of(admin, server.admin.host)
            await self.prepare(admin)
            before_open()
            await self.open(data)
            stack.pop_all()  # closed by the servers from now on

    async def prepare(self, admin: socket) -> None:
        """Starts everything but the ports of callers."""
        self.core.estimator.warm()
        self._admin_runner = await serve_app(self.admin_app, admin)
        self.core.start()
        for part in self.parts:
            await part.start()

    async def open(self, data: socket | None) -> None:
        """Opens the ports of callers: the data port, unless `data` is None, and those of parts."""
        self.core.metrics.loop_lag.start(asyncio.get_running_loop())
        if data is not None:
            await self.data_port.open(data, self.config.defaults.max_body)
        for part in self.parts:
            await part.open()

    async def apply_config(self, config: Config) -> None:
        """Brings another configuration into force."""
        await self.core.apply(config)

    def reopen_logs(self) -> None:
        """Called on SIGHUP: `logrotate` has renamed the files."""
        for part in self.parts:
            part.reopen()

    # -- stop -------------------------------------------------------------------------------

    async def stop(self, grace: float = 0.0, wait: float = 0.0, *, handed_over: bool = False) -> None:
        """Not ready at once; after `wait` s no new connections; after `grace` s more, running requests are aborted.
        `handed_over`: another process accepts the connections of the same sockets, so this process accepts none."""
        self.proxy.draining = True
        if handed_over:
            self.data_port.close()
            for site in self._admin_runner.sites if self._admin_runner is not None else ():
                await site.stop()
            for part in self.parts:
                part.succeeded()
        await self._until(lambda: False, wait)
        self.data_port.close()
        for part in self.parts:
            part.drain()
        await self._until(lambda: not self.recorder.live, grace)
        self.queue.close()
        self.core.metrics.loop_lag.close()
        await self.data_port.abort()
        if self._admin_runner is not None:
            await self._admin_runner.cleanup()
        for part in reversed(self.parts):
            await part.close()
        await self.core.close()

    async def _until(self, over: Callable[[], bool], seconds: float) -> None:
        ends = monotonic() + seconds
        while not over() and monotonic() < ends and not self.force_stop:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
