"""Composition root: the only file that names concrete classes and joins them into a gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from socket import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from backends import catalog
from backends.outbox import Outbox
from backends.transport import Origin
from gateway.cachegroups import CacheGroups, Member
from gateway.config.models import Config
from gateway.decider import Decider
from gateway.dispatcher import Dispatcher, Upstream
from gateway.estimate.estimator import Estimator, PoolTokenizer
from gateway.frontend import FrontServer
from gateway.keys import Keys, Tenant
from gateway.line import Line
from gateway.monitor import Monitor
from gateway.observe.accesslog import AccessLog
from gateway.observe.admin import Admin
from gateway.observe.beacon import Beacons
from gateway.observe.gauges import EndpointCollector, OwnCollector, QueueCollector, RouteCollector
from gateway.observe.metrics import Metrics, budgets
from gateway.observe.recorder import Recorder
from gateway.observe.registry import Registry
from gateway.observe.tracecontext import Tracer
from gateway.proxy import Limits, Proxy
from gateway.routes import Routes
from gateway.upkeep import Upkeep
from gateway.workers.lines import SharedAccessLog
from gateway.workers.seat import Seat
from gateway.workers.sockets import BACKLOG, bound, url
from policies.fleet import Fleet
from policies.retries import RetryBudget

if TYPE_CHECKING:
    from gateway.kvevents import KvEvents
    from gateway.observe.telemetry import Telemetry

log = logging.getLogger("firsttoken")

IDLE = 4.0  # s an upstream connection may idle: vLLM closes at 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
RECEIVE_BUFFER = 16 * 1024  # bytes the kernel may hold of one upstream that its reader has not taken
CUT = 0.1  # s that a handler gets to end once it has been cut


class Gateway:
    """One gateway: `start`, then `url` and `admin_url` are served until `stop`. `seat`: where it is one of several."""

    def __init__(self, config: Config, seat: Seat | None = None) -> None:
        self.config = config
        self.url = self.admin_url = ""
        self.hurried = False  # whoever stops it will not wait
        pools = config.fleet()
        routes = Routes(config.routes, config.passthrough_route, open=not config.keys)
        every_route = [*config.routes.values(), *([routes.passthrough] if routes.passthrough else [])]
        fleet = Fleet(pools)
        fleet.siblings = None if seat is None else seat.siblings
        self.estimator = Estimator(tokenizers(config), lambda pool: fleet.token_scale(pool))
        self.monitor = Monitor(fleet, on_block_size=self.estimator.set_block_size)
        if fleet.siblings is not None:
            fleet.on_untold = self.monitor.tell_soon
        self.decider = Decider(self.estimator, self.monitor, pools, every_route)
        self.upstreams = _upstreams(config)
        self.access_log = _access_log(config.telemetry.access_log, seat)
        registry = _registry()
        metrics = Metrics(registry, every_route)
        self.loop_lag = metrics.loop_lag
        self.recorder = Recorder([metrics, self.decider.learn], self.loop_lag)
        if self.access_log is not None:
            self.recorder.sinks.append(self.access_log)
        self.telemetry = _telemetry(config, self.upstreams)
        if self.telemetry is not None:
            self.recorder.sinks.append(self.telemetry)
            registry.register(self.telemetry)
        registry.register(EndpointCollector(self.monitor.loads, self.monitor.told))
        registry.register(RouteCollector(every_route))
        lost = None if (log_ := self.access_log) is None else lambda: log_.lost
        registry.register(OwnCollector(lambda: self.recorder.live, lost))
        first_token = config.defaults.first_token
        self.line = Line(self.monitor, first_token)
        registry.register(QueueCollector(every_route, self.line.depth))
        dispatcher = Dispatcher(
            self.upstreams, self.monitor, RetryBudget(), first_token_limit=first_token, on_departed=self.line.departed,
            saturated=lambda: self.line.saturated,
        )  # fmt: skip
        kept = pools if seat is None or seat.first else ()
        self.upkeep = Upkeep(self.monitor, self.estimator, self.upstreams, kept, config.keep_warm(), first_token)
        limits = Limits(config.defaults.max_body, config.defaults.stream_idle)
        keys = _keys(config)
        tracer = None if self.telemetry is None else Tracer(config.telemetry.traces)
        self.proxy = Proxy(
            keys, routes, self.decider, self.line, dispatcher, self.recorder, self.upkeep, limits, tracer
        )  # fmt: skip
        beacons = Beacons(self.recorder, budgets(every_route))
        registry.register(beacons)
        self.admin = Admin(registry, self.recorder, self.decider, self.line, keys, routes, shown(config), beacons)
        self.admin_app = self.admin.app()
        self.kv_events = _kv_events(config, fleet)
        self.front: FrontServer | None = None
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
        watched = {key: (up.origin, up.backend) for key, up in self.upstreams.items()}
        self.monitor.watch(watched, self.config.defaults.scrape)
        if self.kv_events is not None:
            self.kv_events.start()
        self.upkeep.start()
        if self.telemetry is not None:
            self.telemetry.start()

    async def open(self, data: socket) -> None:
        """Let callers in."""
        max_body, loop = self.config.defaults.max_body, asyncio.get_running_loop()
        self.loop_lag.start(loop)
        self.front = FrontServer(self.proxy.handle, max_body=max_body, screen=self.proxy.screen)
        self._server = await loop.create_server(self.front, sock=data, backlog=BACKLOG)

    async def stop(self, grace: float = 0.0) -> None:
        """Not ready at once, no new connection, `grace` seconds for what runs, then the rest is cut."""
        self.proxy.draining = True
        if self._server is not None:
            self._server.close()
        ends = monotonic() + grace
        while self.recorder.live and monotonic() < ends and not self.hurried:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self.line.close()
        self.loop_lag.close()
        if self.front is not None:
            await self.front.shutdown(CUT)
        if self._admin is not None:
            await self._admin.cleanup()
        await self.upkeep.close()
        await self.monitor.close()
        if self.kv_events is not None:
            await self.kv_events.close()
        for upstream in self.upstreams.values():
            await upstream.origin.close()
        self.estimator.close()
        if self.telemetry is not None:
            await self.telemetry.close()
        if self.access_log is not None:
            self.access_log.close()


def tune_gc() -> None:
    """What lives as long as the process is not to be walked again; requests leave no cycles to be found."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def tokenizers(config: Config) -> list[PoolTokenizer]:
    return [PoolTokenizer(name, pool.tokenizer, pool.block_size) for name, pool in config.pools.items()]


def _upstreams(config: Config) -> Mapping[str, Upstream]:
    tls = ssl.create_default_context()
    backends = {name: catalog.build(config.backend(name)) for name in config.pools}
    connect, urls, publishing = config.defaults.connect, config.urls(), config.kv_events()
    outbox = Outbox()
    return {
        endpoint.id: Upstream(
            Origin(
                urls[endpoint.id],
                connect_timeout=connect,
                idle_timeout=IDLE,
                tls=tls,
                receive_buffer=RECEIVE_BUFFER,
                outbox=outbox,
            ),
            backends[pool.name],
            pool.model,
            kv_events=endpoint.id in publishing,
            priority=config.pools[pool.name].priority_scheduling,
            traced=config.telemetry.trace_apis or not catalog.kind(config.pools[pool.name].backend).needs_key,
        )
        for pool in config.fleet()
        for endpoint in pool.endpoints
    }


def _access_log(target: str, seat: Seat | None) -> AccessLog | None:
    if target == "off":
        return None
    return AccessLog(target) if seat is None else SharedAccessLog(target, seat.lock)


def _telemetry(config: Config, upstreams: Mapping[str, Upstream]) -> Telemetry | None:
    """OpenTelemetry is loaded where it is needed."""
    if config.telemetry.otlp is None:
        return None
    from gateway.observe.semconv import PROVIDERS
    from gateway.observe.spans import Served
    from gateway.observe.telemetry import Telemetry

    served = {}
    for endpoint, up in upstreams.items():
        address, kind = up.origin.address, up.backend.kind
        served[endpoint] = Served(PROVIDERS.get(kind, kind), up.model, address.host, address.port)
    return Telemetry(config.telemetry.otlp, served)


def _kv_events(config: Config, fleet: Fleet) -> KvEvents | None:
    """ZMQ is loaded where it is needed."""
    if not (sources := config.kv_events()):
        return None
    from gateway.kvevents import KvEvents

    return KvEvents(fleet, sources)


def shown(config: Config) -> dict[str, Any]:
    """The config without secrets. A digest is one: weak keys could be guessed from it."""
    return config.model_dump(mode="json", exclude={"keys": {"__all__": {"sha256"}}})


def _keys(config: Config) -> Keys:
    members = {key.name: Member(key.name, bytes.fromhex(key.sha256), key.cache_group) for key in config.keys}
    secret = config.state.cache_secret
    groups = CacheGroups("" if secret is None else secret.get_secret_value(), members.values())
    return Keys(
        Tenant(
            key.name,
            members[key.name].digest,
            None if key.routes is None else frozenset(key.routes),
            groups.name(members[key.name]),
        )
        for key in config.keys
    )


def _registry() -> Registry:
    registry = Registry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
