"""Composition root: builds, starts, reloads and stops a gateway; the only module with concrete classes.

Values of the configuration are built in `gateway.runtime`. OpenTelemetry and ZMQ are optional dependencies, imported
here on use; so is redis-py, by the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from socket import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from gateway.admin.admin_server import AdminServer
from gateway.admin.gateway_admin import GatewayAdmin
from gateway.admission.key_store import FileKeys, RedisKeys
from gateway.admission.keyring import Keyring
from gateway.admission.local_quotas import LocalQuotas
from gateway.admission.quotas import Admission, Quotas
from gateway.admission.redis_quotas import RedisQuotas
from gateway.answers.answer_cache import AnswerCache
from gateway.answers.answer_stores import answer_store
from gateway.cache_warming import CacheWarming
from gateway.cluster.gossip import new_group
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.replicas import Replicas
from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config, Key
from gateway.decider import Decider
from gateway.downstream.http_server import HttpServer
from gateway.downstream.intake import Intake
from gateway.fleet.discovery import Discovery
from gateway.fleet.learned_keeper import LearnedKeeper, StateFile, StateKey, StateStore
from gateway.fleet.monitor import Monitor, PollTarget
from gateway.observe.logs import AccessLog
from gateway.observe.metrics.scrape_collectors import (
    EndpointCollector,
    GatewayCollector,
    LostPromiseCollector,
    Registry,
)
from gateway.observe.metrics.series import RequestMetrics, budgets, histogram
from gateway.observe.timeline import Recorder
from gateway.observe.trace_context import Tracer
from gateway.process import BACKLOG, HANDLER_GRACE, bind, url_of
from gateway.proxy import Proxy
from gateway.runtime import Runtime, RuntimeHolder, build_runtime, build_warm_runtime, tokenizers
from gateway.scheduler import RequestQueue
from gateway.server_certificate import ServerCertificate
from gateway.tokenize.estimator import Estimator
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.upstream import Upstream
from gateway.witness_probes import WitnessProbes
from gateway.worker_context import WorkerContext
from policies.attempts.budgets import RetryBudget
from policies.fleet.fleet import Fleet
from policies.fleet.peers import CombinedPeers
from policies.routes.route import Route

if TYPE_CHECKING:
    from gateway.fleet.kv_event_listener import KvEvents
    from gateway.observe.otel.spans import ServedEndpoint
    from gateway.observe.otel.telemetry import Telemetry
    from gateway.picker.picker_server import PickerServer

log = logging.getLogger("firsttoken")


class Gateway:
    """A gateway: `start`, then `url` and `admin_url` are served until `stop`.

    `worker`: set in each of several processes behind the same port; the leader runs singleton jobs. `force_stop` ends
    the waits of `stop`.
    """

    def __init__(self, config: Config, worker: WorkerContext | None = None) -> None:
        self.worker = worker
        self.url = self.admin_url = ""
        self.force_stop = False
        self.runtime = RuntimeHolder(build_runtime(config.with_discovered(Discovered())))
        self._build_decisions()
        self._build_observers(config)
        self._build_shared_state(config)
        self._build_servers(config)
        self.kv_events = self._build_kv_events()
        self.discovery = Discovery()
        self._reloading = asyncio.Lock()
        self._following_addresses: asyncio.Task[None] | None = None

    # -- build ------------------------------------------------------------------------------

    def _build_decisions(self) -> None:
        self.fleet = Fleet(self.runtime.current.pools.values())
        self.estimator = Estimator(tokenizers(self.config), self.fleet.token_scale)
        shared = None if self.worker is None else self.worker.peers
        self.monitor = Monitor(self.fleet, shared=shared, routes=self._routes)
        self.decider = Decider(self.estimator, self.fleet)
        self.queue = RequestQueue(self.fleet, lambda: self.config.defaults.first_token)

    def _build_observers(self, config: Config) -> None:
        """Every Record goes to all sinks of the recorder; Prometheus reads the registry."""
        self.registry = Registry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = RequestMetrics(self.registry, self._routes())
        self.recorder = Recorder([self.metrics, self.decider.learn], self.metrics.loop_lag)
        self.fleet.on_cache_lost = self.recorder.slow.on_cache_lost
        self.access_log: AccessLog | None = None
        self.telemetry: Telemetry | None = None
        self.on_screen = histogram("firsttoken_ttft_on_screen_seconds", budgets(self._routes()))
        if config.telemetry.access_log != "off":
            lock = None if self.worker is None else self.worker.log_lock
            self.access_log = AccessLog(config.telemetry.access_log, lock)
            self.recorder.sinks.append(self.access_log)
        if config.telemetry.otlp is not None:
            from gateway.observe.otel.telemetry import Telemetry

            self.telemetry = Telemetry(config.telemetry.otlp, served_endpoints(self.runtime.current.upstreams))
            self.recorder.sinks.append(self.telemetry)
            self.registry.register(self.telemetry)
        lost = None if (access_log := self.access_log) is None else lambda: access_log.lost
        self.registry.register(EndpointCollector(self.fleet.pool_of, self.monitor.loads, self.monitor.engine_loads))
        self.registry.register(LostPromiseCollector(self._routes, self.monitor.lost_promises))
        self.registry.register(
            GatewayCollector(
                self._routes,
                depth=self.queue.depth,
                live=lambda: self.recorder.live,
                replicas=lambda: 1 if self.replicas is None else self.replicas.count(),
                lost=lost,
            )
        )
        self.registry.register(self.on_screen)
        self.registry.register(self.monitor.ejections)

    def _build_shared_state(self, config: Config) -> None:
        """State shared with other workers, and with other replicas through Redis."""
        worker = self.worker
        self.redis: RedisClient | None = None
        self.shared_quotas: RedisQuotas | None = None
        self.keyring: Keyring | None = None
        self.replicas: Replicas | None = None
        if config.state.redis is not None:
            self.redis = RedisClient(config.state.redis.get_secret_value())
            self.registry.register(self.redis)
            self.shared_quotas = RedisQuotas(self.redis, config.server.workers)
            if config.state.keys == "redis":
                self.keyring = Keyring(RedisKeys(self.redis.call, self.redis.url, self.redis.timeout), self._swap_keys)
                self.redis.on_up(self.keyring.check_soon)
            group = new_group() if worker is None else worker.group
            self.replicas = Replicas(self.redis, config.state.namespace, group, self.fleet.knows)
        if config.state.keys == "dir" and config.state.dir is not None:
            self.keyring = Keyring(FileKeys(config.state.dir), self._swap_keys)
        self.answers = answer_store(config.state)
        self.learned_keeper = self._build_learned_keeper(config)
        self.fleet.peers = None if worker is None else worker.peers
        if self.replicas is not None:
            self.fleet.peers = self.replicas if worker is None else CombinedPeers(worker.peers, self.replicas)
        if self.fleet.peers is not None:
            self.fleet.request_publish = self.monitor.publish_soon

    def _build_learned_keeper(self, config: Config) -> LearnedKeeper | None:
        store: StateStore
        if config.state.dir is not None:
            store = StateFile(config.state.dir)
        elif self.redis is not None:
            store = StateKey(self.redis, config.state.namespace)
        else:
            return None
        keeper = LearnedKeeper(store, self.fleet, self.runtime, self.worker is None or self.worker.is_leader)
        self.registry.register(keeper)
        return keeper

    def _build_servers(self, config: Config) -> None:
        quotas: Quotas = self.shared_quotas or (LocalQuotas() if self.worker is None else self.worker.quotas)
        self.cache_warming = CacheWarming(self.fleet, self.estimator, self.runtime)
        self.witness_probes = WitnessProbes(self.fleet, self.estimator, self.runtime)
        self.proxy = Proxy(
            runtime=self.runtime,
            decider=self.decider,
            queue=self.queue,
            dispatcher=Dispatcher(
                self.fleet,
                RetryBudget(),
                on_dispatched=self.queue.on_dispatched,
                saturated=lambda: self.queue.saturated,
            ),
            recorder=self.recorder,
            cache_warming=self.cache_warming,
            admission=Admission(quotas, self.recorder, self.registry),
            answers=AnswerCache(self.answers, config.state.answer_bytes),
            tracer=None if self.telemetry is None else Tracer(config.telemetry.traces),
        )
        self.admin = GatewayAdmin(
            registry=self.registry,
            recorder=self.recorder,
            decider=self.decider,
            queue=self.queue,
            runtime=self.runtime,
            on_screen=self.on_screen,
        )
        self.admin_app = AdminServer(self.admin).app()
        self.intake = Intake(config.server.max_connections, config.server.max_body_bytes)
        self.registry.register(self.intake)
        self.certificate = self._certificate(config)
        self.http_server: HttpServer | None = None
        self._server: asyncio.Server | None = None
        self.picker = self._build_picker(config)
        self._admin_runner: web.AppRunner | None = None

    def _build_picker(self, config: Config) -> PickerServer | None:
        if config.pick is None:
            return None
        from gateway.picker.picker import Picker
        from gateway.picker.picker_server import PickerServer

        picker = Picker(self.runtime, self.decider, self.queue, config.pick.fallbacks)
        return PickerServer(
            picker,
            self.recorder,
            max_body=lambda: self.config.defaults.max_body,
            is_ready=lambda: not self.proxy.draining and self.decider.any_usable(monotonic()),
            intake=self.intake,
        )

    def _certificate(self, config: Config) -> ServerCertificate | None:
        if self.worker is not None:
            return self.worker.certificate
        return None if config.server.tls is None else ServerCertificate(config.server.tls)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.runtime.current.config

    def _routes(self) -> tuple[Route, ...]:
        return self.runtime.current.routes.all

    # -- start ------------------------------------------------------------------------------

    async def start(self, before_open: Callable[[], None] = lambda: None) -> None:
        """Listens on new sockets; calls `before_open` when everything is loaded, before the first caller. Raises
        OSError if a port is taken."""
        server = self.config.server
        with ExitStack() as stack:
            data, admin = (stack.enter_context(bind(address)) for address in (server.listen, server.admin))
            self.url = url_of(data, server.listen.host, tls=self.certificate is not None)
            self.admin_url = url_of(admin, server.admin.host)
            await self.prepare(admin)
            before_open()
            await self.open(data)
            stack.pop_all()  # closed by the servers from now on

    async def prepare(self, admin: socket) -> None:
        """Starts everything but the data port."""
        self.estimator.warm()
        self._admin_runner = web.AppRunner(self.admin_app, access_log=None, shutdown_timeout=HANDLER_GRACE)
        await self._admin_runner.setup()
        await web.SockSite(self._admin_runner, admin, backlog=BACKLOG).start()
        if self.worker is not None:
            await self.worker.peers.start(self.fleet.knows)
        self._watch_endpoints()
        if self.worker is None or self.worker.is_leader:
            self.cache_warming.start()
        for component in (
            self.kv_events,
            self.telemetry,
            self.redis,
            self.shared_quotas,
            self.keyring,
            self.replicas,
            self.answers,
        ):
            if component is not None:
                component.start()
        if self.config.is_dynamic:
            await self.apply_config(self.config)
        if self.learned_keeper is not None:
            await self.learned_keeper.start()
        self._following_addresses = asyncio.create_task(self._follow_addresses())

    async def open(self, data: socket) -> None:
        """Opens the data port."""
        loop = asyncio.get_running_loop()
        self.metrics.loop_lag.start(loop)
        self.http_server = HttpServer(
            self.proxy.handle,
            max_body=self.config.defaults.max_body,
            precheck=self.proxy.precheck,
            intake=self.intake,
        )
        tls: dict[str, Any] = {}
        if self.certificate is not None:
            self.certificate.start()
            timeouts = self.http_server.timeouts
            tls = {"ssl": self.certificate.context, "ssl_handshake_timeout": timeouts.head}
            tls["ssl_shutdown_timeout"] = timeouts.unread  # which includes the time to read the last answer
        self._server = await loop.create_server(self.http_server, sock=data, backlog=BACKLOG, **tls)
        if self.picker is not None and self.config.pick is not None:
            await self.picker.start(self.config.pick, shared=self.worker is not None)

    # -- reload -----------------------------------------------------------------------------

    async def apply_config(self, config: Config) -> None:
        """Brings another configuration into force."""
        async with self._reloading:
            await self.discovery.follow(config)
            await self._reload(config)

    async def _follow_addresses(self) -> None:
        """Reloads the configuration in force after a change of addresses."""
        while True:
            await self.discovery.changed()
            try:
                async with self._reloading:
                    await self._reload(self.config)
            except Exception:
                log.exception("addresses changed, but the new endpoints could not be applied")

    async def _reload(self, wanted: Config) -> None:
        """Builds the new Runtime in a thread, then swaps it in within one turn of the loop."""
        new = await asyncio.to_thread(self._build_runtime, wanted.with_discovered(self.discovery.found))
        while self.queue.dispatch_pending:  # noqa: ASYNC110 - its decision names endpoints of the fleet before the swap
            await asyncio.sleep(0)
        unused = {*self.runtime.current.connections.values()} - {*new.connections.values()}
        self._swap(new)
        for connections in unused:
            await connections.close()

    def _build_runtime(self, wanted: Config) -> Runtime:
        new = build_warm_runtime(wanted, self.runtime.current)
        return new if self.keyring is None else new.with_stored_keys(self.keyring.known)

    def _swap(self, new: Runtime) -> None:
        """Puts `new` in force by one assignment, then tells components with learned or derived state."""
        replaced = new.replaced_routes(self.runtime.current)
        self.runtime.current = new
        routes = new.routes.all
        self.fleet.reload(new.pools.values())
        self.estimator.reload(tokenizers(new.config))
        self.queue.reload(replaced)
        self.proxy.dispatcher.reload(routes)
        if self.http_server is not None:
            self.http_server.max_body = new.config.defaults.max_body
        self.cache_warming.reload()
        self.metrics.promise(routes)
        self.on_screen.refine(budgets(routes))
        self._watch_endpoints()
        self._watch_kv_events()
        if self.telemetry is not None:
            self.telemetry.reload(served_endpoints(new.upstreams))

    def reopen_logs(self) -> None:
        """Called on SIGHUP: `logrotate` has renamed the files."""
        if self.access_log is not None:
            self.access_log.reopen()

    async def _swap_keys(self, stored: Sequence[Key]) -> None:
        """Called when the stored keys have changed. Thousands take tens of milliseconds: in a thread."""
        async with self._reloading:
            self.runtime.current = await asyncio.to_thread(self.runtime.current.with_stored_keys, stored)

    def _watch_endpoints(self) -> None:
        watched = {
            id: PollTarget(upstream.connections, upstream.backend, upstream.pool, self._model_of(upstream))
            for id, upstream in self.runtime.current.upstreams.items()
        }
        self.monitor.watch(watched, self.config.defaults.scrape)

    def _model_of(self, upstream: Upstream) -> str:
        """The model to be served there; empty: any, as callers ask for."""
        return "" if upstream.pool == self.config.passthrough else upstream.model

    def _build_kv_events(self) -> KvEvents | None:
        if not (sources := self.config.kv_events()):
            return None
        from gateway.fleet.kv_event_listener import KvEvents

        return KvEvents(self.fleet, sources)

    def _watch_kv_events(self) -> None:
        if self.kv_events is not None:
            self.kv_events.listen(self.config.kv_events())
        elif (kv_events := self._build_kv_events()) is not None:
            self.kv_events = kv_events
            kv_events.start()

    # -- stop -------------------------------------------------------------------------------

    async def stop(self, grace: float = 0.0, wait: float = 0.0) -> None:
        """Not ready at once; after `wait` s no new connections; after `grace` s more, running requests are aborted."""
        self.proxy.draining = True
        await self._until(lambda: False, wait)
        if self._server is not None:
            self._server.close()
        await self._until(lambda: not self.recorder.live, grace)
        self.queue.close()
        self.metrics.loop_lag.close()
        if self.http_server is not None:
            await self._abort_requests(self.http_server)
        if self.picker is not None:
            await self.picker.stop(HANDLER_GRACE)
        if self._admin_runner is not None:
            await self._admin_runner.cleanup()
        if self._following_addresses is not None:
            self._following_addresses.cancel()
        for component in (self.discovery, self.cache_warming, self.witness_probes, self.monitor, self.answers):
            await component.close()
        for optional_component in (
            self.learned_keeper,
            self.certificate,
            self.kv_events,
            self.replicas,
            self.keyring,
            self.shared_quotas,
            self.redis,
        ):
            if optional_component is not None:
                await optional_component.close()
        if self.worker is not None:
            await self.worker.peers.close()
        for connections in self.runtime.current.connections.values():
            await connections.close()
        self.estimator.close()
        if self.telemetry is not None:
            await self.telemetry.close()
        if self.access_log is not None:
            self.access_log.close()

    async def _until(self, over: Callable[[], bool], seconds: float) -> None:
        ends = monotonic() + seconds
        while not over() and monotonic() < ends and not self.force_stop:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _abort_requests(self, http_server: HttpServer) -> None:
        """Requests without an answer yet get an error reply; streams end unfinished."""
        await asyncio.sleep(0)  # requests that waited in the queue are about to answer
        if self.recorder.live:
            log.warning("shutdown grace expired: aborting %d running requests", self.recorder.live)
        self.proxy.stopping = True
        await http_server.shutdown(HANDLER_GRACE)


def served_endpoints(upstreams: Mapping[str, Upstream]) -> dict[str, ServedEndpoint]:
    """Span attributes of each endpoint."""
    from gateway.observe.otel.spans import PROVIDERS, ServedEndpoint

    found = {}
    for endpoint, upstream in upstreams.items():
        address, kind = upstream.connections.address, upstream.backend.kind
        found[endpoint] = ServedEndpoint(PROVIDERS.get(kind, kind), upstream.model, address.host, address.port)
    return found
