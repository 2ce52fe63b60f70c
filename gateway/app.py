"""Composition root: joins concrete classes into a gateway. What a configuration alone comes to is made in
`gateway.runtime`, what not every gateway has in `gateway.wiring`."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from socket import socket
from time import monotonic

from aiohttp import web
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from gateway import wiring as optional
from gateway.admin.admin_server import Admin
from gateway.admin.client_ttft import Beacons
from gateway.admission.local_quotas import LocalQuotas
from gateway.admission.quotas import Admission
from gateway.admission.reservations import Quotas
from gateway.config.models import Config
from gateway.decider import Decider
from gateway.downstream.http_server import HttpServer
from gateway.fleet.cache_warming import CacheWarming
from gateway.fleet.dns_discovery import DnsDiscovery
from gateway.fleet.monitor import Monitor
from gateway.observe.metrics.registry import Registry
from gateway.observe.metrics.request_metrics import RequestMetrics, budgets
from gateway.observe.metrics.scrape_collectors import (
    EndpointCollector,
    OwnCollector,
    QueueCollector,
    ReplicasCollector,
    RouteCollector,
)
from gateway.observe.otel.trace_context import Tracer
from gateway.observe.recorder import Recorder
from gateway.proxy import Proxy
from gateway.runtime import Runtime, limits_of, parts, prices, shown, tenants, tokenizers, warmed, watched
from gateway.scheduler import RequestQueue
from gateway.tokenize.estimator import Estimator
from gateway.upstream.dispatcher import Dispatcher
from gateway.workers.listen_sockets import BACKLOG, bound, url
from gateway.workers.worker_context import WorkerContext
from policies.attempts.retry_budgets import RetryBudget
from policies.fleet.fleet import Fleet
from policies.fleet.peers import CombinedPeers

log = logging.getLogger("firsttoken")

CUT = 0.1  # s that a handler gets to end once it has been cut


class Gateway:
    """One gateway: `start`, then `url` and `admin_url` are served until `stop`. `seat`: where it is one of several."""

    def __init__(self, config: Config, seat: WorkerContext | None = None) -> None:
        self.config = config = config.at({})
        self.parts = parts(config)
        self.url = self.admin_url = ""
        self.force_stop = False  # whoever stops it will not wait
        self.seat, self.first = seat, seat is None or seat.first  # the first does what is to be done once
        pools, routes, every_route = self.parts.pools, self.parts.routes, self.parts.every_route
        fleet = Fleet(pools)
        fleet.siblings = None if seat is None else seat.siblings
        self.estimator = Estimator(tokenizers(config), lambda pool: fleet.token_scale(pool))
        self.monitor = Monitor(fleet, on_block_size=self.estimator.set_block_size)
        if fleet.siblings is not None:
            fleet.on_untold = self.monitor.tell_soon
        self.decider = Decider(self.estimator, self.monitor, pools, every_route)
        self.upstreams = self.parts.upstreams
        self.access_log = optional.access_log(config.telemetry.access_log, seat)
        registry = _registry()
        self.metrics = RequestMetrics(registry, every_route)
        self.loop_lag = self.metrics.loop_lag
        self.recorder = Recorder([self.metrics, self.decider.learn], self.loop_lag)
        if self.access_log is not None:
            self.recorder.sinks.append(self.access_log)
        self.telemetry = optional.telemetry(config, self.upstreams)
        if self.telemetry is not None:
            self.recorder.sinks.append(self.telemetry)
            registry.register(self.telemetry)
        registry.register(EndpointCollector(self.monitor.loads, self.monitor.told))
        self.promised = RouteCollector(every_route)
        registry.register(self.promised)
        lost = None if (log_ := self.access_log) is None else lambda: log_.lost
        registry.register(OwnCollector(lambda: self.recorder.live, lost))
        first_token = config.defaults.first_token
        self.line = RequestQueue(self.monitor, first_token)
        self.queue = QueueCollector(every_route, self.line.depth)
        registry.register(self.queue)
        dispatcher = Dispatcher(
            self.upstreams,
            self.monitor,
            RetryBudget(),
            first_token_limit=first_token,
            on_departed=self.line.on_dispatched,
            saturated=lambda: self.line.saturated,
        )
        kept = pools if self.first else ()
        self.upkeep = CacheWarming(self.monitor, self.estimator, self.upstreams, kept, config.keep_warm(), first_token)
        limits, keys = limits_of(config), self.parts.keys
        self.link = optional.link(config, registry)
        self.shared_quotas = optional.shared_quotas(config, self.link)
        self.keyring = optional.keyring(config, self.link, self._found)
        quotas: Quotas = self.shared_quotas or (seat.quotas if seat is not None else LocalQuotas())
        admission = Admission(quotas, prices(pools), self.recorder, registry)
        tracer = None if self.telemetry is None else Tracer(config.telemetry.traces)
        self.proxy = Proxy(
            keys, routes, self.decider, self.line, dispatcher, self.recorder, self.upkeep, limits, admission, tracer
        )
        beacons = Beacons(self.recorder, budgets(every_route))
        registry.register(beacons)
        self.admin = Admin(registry, self.recorder, self.decider, self.line, keys, routes, shown(config), beacons)
        self.admin_app = self.admin.app()
        self.kv_events = optional.kv_events(config, fleet)
        self._taking, self.names = asyncio.Lock(), DnsDiscovery()
        self._following: asyncio.Task[None] | None = None
        self.replicas = optional.replicas(config, self.link, fleet, seat)
        if self.replicas is not None:
            fleet.siblings = self.replicas if seat is None else CombinedPeers(seat.siblings, self.replicas)
            fleet.on_untold = self.monitor.tell_soon
        registry.register(ReplicasCollector(self.replicas.count if self.replicas is not None else lambda: 1))
        self.front: HttpServer | None = None
        self._server: asyncio.Server | None = None
        self._admin: web.AppRunner | None = None

    async def start(self, settle: Callable[[], None] = lambda: None) -> None:
        """On sockets of its own; `settle` is called when everything is in memory and nobody is let in yet. Raises
        OSError where a port is taken."""
        server = self.config.server
        with ExitStack() as stack:
            data, admin = (stack.enter_context(bound(address)) for address in (server.listen, server.admin))
            self.url, self.admin_url = url(data, server.listen.host), url(admin, server.admin.host)
            await self.prepare(admin)
            settle()
            await self.open(data)
            stack.pop_all()  # they are the servers' now

    async def prepare(self, admin: socket) -> None:
        """Everything but callers."""
        self.estimator.warm()
        self._admin = web.AppRunner(self.admin_app, access_log=None, shutdown_timeout=CUT)
        await self._admin.setup()
        await web.SockSite(self._admin, admin, backlog=BACKLOG).start()
        self.monitor.watch(watched(self.upstreams), self.config.defaults.scrape)
        if self.kv_events is not None:
            self.kv_events.start()
        self.upkeep.start()
        if self.telemetry is not None:
            self.telemetry.start()
        for shared in (self.link, self.shared_quotas, self.keyring, self.replicas):
            if shared is not None:
                shared.start()
        if self.config.names():
            await self.apply_config(self.config)
        self._following = asyncio.create_task(self._follow())

    async def open(self, data: socket) -> None:
        """Let callers in."""
        max_body, loop = self.config.defaults.max_body, asyncio.get_running_loop()
        self.loop_lag.start(loop)
        self.front = HttpServer(self.proxy.handle, max_body=max_body, screen=self.proxy.precheck)
        self._server = await loop.create_server(self.front, sock=data, backlog=BACKLOG)

    async def apply_config(self, config: Config) -> None:
        """Another configuration. What is built for it is built aside, and put in place in one turn of the loop."""
        async with self._taking:
            await self.names.follow(config.names())
            await self._take(config)

    async def _follow(self) -> None:
        """The same configuration, when a name in it has other addresses."""
        while True:
            await self.names.changed()
            try:
                async with self._taking:
                    await self._take(self.config)
            except Exception:
                log.exception("the new addresses of a name could not be taken")

    async def _take(self, wanted: Config) -> None:
        config = wanted.at(self.names.addresses)
        new = await asyncio.to_thread(warmed, config, self.parts)
        while self.line.dispatch_pending:  # noqa: ASYNC110 - somebody is on the way to where the fleet of now has sent them
            await asyncio.sleep(0)
        gone = {up.origin for up in self.upstreams.values()} - {up.origin for up in new.upstreams.values()}
        self._swap(config, new)
        for origin in gone:
            await origin.close()

    def _swap(self, config: Config, new: Runtime) -> None:
        """A request that has begun keeps its route, its tenant and the ways upstream that it was decided on."""
        defaults, proxy, admin = config.defaults, self.proxy, self.admin
        self.config, self.parts, self.upstreams = config, new, new.upstreams
        self.monitor.fleet.reload(new.pools)
        if self.seat is not None:
            self.seat.siblings.share(new.upstreams)
        self.estimator.reload(tokenizers(config))
        self.decider.reload(new.pools, new.every_route)
        proxy.dispatcher.reload(new.upstreams, new.every_route, defaults.first_token)
        self.upkeep.reload(new.upstreams, new.pools if self.first else (), config.keep_warm(), defaults.first_token)
        self.monitor.watch(watched(new.upstreams), defaults.scrape)
        self.metrics.promise(new.every_route)
        self.queue.routes = self.promised.routes = tuple(new.every_route)
        admin.beacons.seconds.refine(budgets(new.every_route))
        if self.telemetry is not None:
            self.telemetry.reload(optional.served(new.upstreams))
        proxy.keys = admin.keys = new.keys
        proxy.routes = admin.routes = new.routes
        proxy.limits, admin.shown_config = limits_of(config), shown(config)
        if self.front is not None:
            self.front.max_body = defaults.max_body
        self._listen(config)
        proxy.admission.prices = prices(new.pools)
        self._found()
        self.line.patience = defaults.first_token  # who waits for what is gone is placed anew at the room's next look

    def _found(self) -> None:
        """Keys in Redis, beside those of the file."""
        if self.keyring is not None:
            self.parts.keys.tenants = tenants(self.config, self.keyring.known)

    def _listen(self, config: Config) -> None:
        if self.kv_events is not None:
            self.kv_events.listen(config.kv_events())
        elif (found := optional.kv_events(config, self.monitor.fleet)) is not None:
            self.kv_events = found
            found.start()

    async def stop(self, grace: float = 0.0, wait: float = 0.0) -> None:
        """Not ready at once; after `wait` seconds no new connection; `grace` seconds for what runs then, and the rest
        is cut."""
        self.proxy.draining = True
        await self._until(lambda: False, wait)
        if self._server is not None:
            self._server.close()
        await self._until(lambda: not self.recorder.live, grace)
        self.line.close()
        self.loop_lag.close()
        if self.front is not None:
            await self._cut(self.front)
        if self._admin is not None:
            await self._admin.cleanup()
        if self._following is not None:
            self._following.cancel()
        await self.names.close()
        await self.upkeep.close()
        await self.monitor.close()
        if self.kv_events is not None:
            await self.kv_events.close()
        for shared in (self.replicas, self.keyring, self.shared_quotas, self.link):
            if shared is not None:
                await shared.close()
        for upstream in self.upstreams.values():
            await upstream.origin.close()
        self.estimator.close()
        if self.telemetry is not None:
            await self.telemetry.close()
        if self.access_log is not None:
            self.access_log.close()

    async def _until(self, over: Callable[[], bool], seconds: float) -> None:
        ends = monotonic() + seconds
        while not over() and monotonic() < ends and not self.force_stop:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _cut(self, front: HttpServer) -> None:
        """Who was not answered is told why."""
        await asyncio.sleep(0)  # those that were held are on their way out
        if self.recorder.live:
            log.warning("%d requests had not ended in time, and are cut", self.recorder.live)
        self.proxy.stopping = True
        await front.shutdown(CUT)


def tune_gc() -> None:
    """What lives as long as the process is not to be walked again; requests leave no cycles to be found."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _registry() -> Registry:
    registry = Registry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
