"""Composition root: builds, starts, reloads and stops a gateway; the only module with concrete classes.

Values of the configuration are built in `gateway.runtime`. OpenTelemetry and ZMQ are optional dependencies, imported
here on use; so is redis-py, by the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from socket import socket
from time import monotonic, time
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from gateway.admin.admin_server import AdminServer
from gateway.admin.gateway_admin import GatewayAdmin
from gateway.admission.key_file import FileKeys
from gateway.admission.keyring import Keyring
from gateway.admission.local_quotas import LocalQuotas
from gateway.admission.redis_keys import RedisKeys
from gateway.cache_warming import CacheWarming
from gateway.cluster.gossip import new_group
from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config, Key
from gateway.data_port import DataPort
from gateway.decider import Decider
from gateway.downstream.limits import Intake
from gateway.fleet.discovery import Discovery
from gateway.fleet.endpoint_poll import PollTarget
from gateway.fleet.learned_keeper import LearnedKeeper, state_store
from gateway.fleet.monitor import Monitor
from gateway.observe.metrics.request_metrics import RequestMetrics, budgets
from gateway.observe.metrics.scrape_collectors import EndpointCollector, GatewayCollector, Registry
from gateway.observe.metrics.series import histogram
from gateway.observe.prefix_doctor import PrefixDoctor
from gateway.observe.recorder import Recorder
from gateway.observe.trace_context import Tracer
from gateway.parts.answers.answer_cache import AnswerCache
from gateway.parts.answers.answer_stores import answer_store
from gateway.parts.caller_keys.caller_keys import CallerKeys
from gateway.parts.comments.stream_comments import Comments
from gateway.parts.counts.count_replies import CountReplies
from gateway.parts.escalation.answer_quality import Escalations
from gateway.parts.quotas.quotas import Admission, Quotas
from gateway.parts.repair.prompt_repairs import Repairs
from gateway.parts.rescue.rescue import Rescues
from gateway.parts.responses.kept_state import KeptState
from gateway.parts.responses.responses_sockets import ResponsesSockets
from gateway.parts.responses.stored_responses import StoredPaths
from gateway.parts.tags.tags import Tags
from gateway.process import ADMIN_KEY, HANDLER_GRACE, LISTEN_KEY, bind, naming, serve_app, url_of
from gateway.proxy import Proxy
from gateway.records.record_logs import RecordLogs
from gateway.redis_state import RedisState
from gateway.request_reader import RequestReader
from gateway.runtime import Runtime, RuntimeHolder, build_runtime, build_warm_runtime, tokenizers
from gateway.scheduler import RequestQueue
from gateway.served_endpoints import served_endpoints
from gateway.server_certificate import ServerCertificate
from gateway.tokenize.estimator import Estimator
from gateway.upstream.dispatcher import Dispatcher
from gateway.witness_probes import WitnessProbes
from gateway.worker_context import WorkerContext
from policies.attempts.budgets import RetryBudget
from policies.fleet.fleet import Fleet
from policies.fleet.peers import CombinedPeers
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue_parts import queue_parts
from policies.routes.route import Route
from policies.types import Pool

if TYPE_CHECKING:
    from gateway.fleet.kv_event_listener import KvEvents
    from gateway.observe.otel.telemetry import Telemetry
    from gateway.picker.picker_service import PickerServer


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
        self.registry.register(self.discovery)
        self._reloading = asyncio.Lock()

    # -- build ------------------------------------------------------------------------------

    def _build_decisions(self) -> None:
        self.fleet = Fleet(self.runtime.current.pools.values(), unix_offset=time() - monotonic())
        self.estimator = Estimator(tokenizers(self.config), self.fleet.view.token_scale)
        shared = None if self.worker is None else self.worker.peers
        self.monitor = Monitor(self.fleet, shared=shared, routes=self._routes)
        self.decider = Decider(self.estimator, self.fleet)
        self.queue = RequestQueue(
            self.fleet,
            patience=lambda: self.config.defaults.first_token,
            new_scheduler=lambda: QueueScheduler(queue_parts()),
        )

    def _build_observers(self, config: Config) -> None:
        """Every Record goes to all sinks of the recorder; Prometheus reads the registry."""
        self.registry = Registry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = RequestMetrics(self.registry, self._routes(), self.runtime.current.served_labels())
        doctor = PrefixDoctor(lambda pool: self.runtime.current.price_of(pool), self.fleet.view.prefill_seconds)
        learners, lag = (self.decider.learn,), self.metrics.loop_lag
        self.recorder = Recorder(learners, [self.metrics], lag, doctor)
        self.metrics.flush = self.recorder.flush
        self.fleet.on_cache_lost = self.recorder.slow.on_cache_lost
        self.record_logs = RecordLogs(config, self.worker)
        self.recorder.batch_sinks += self.record_logs.sinks
        self.registry.register(self.record_logs)
        self.telemetry: Telemetry | None = None
        self.on_screen = histogram("firsttoken_ttft_on_screen_seconds", budgets(self._routes()))
        if config.telemetry.otlp is not None:
            from gateway.observe.otel.telemetry import Telemetry

            self.telemetry = Telemetry(config.telemetry.otlp, served_endpoints(self.runtime.current.upstreams))
            self.recorder.batch_sinks.append(self.telemetry)
            self.registry.register(self.telemetry)
        engines = self.monitor.loads, self.monitor.engine_loads, self.monitor.engine_rates, self.fleet.view.rtts
        self.registry.register(EndpointCollector(self.fleet.view.pool_of, *engines))
        self.registry.register(
            GatewayCollector(
                self._routes,
                self._pools,
                promises=self.monitor.lost_promises,
                depth=self.queue.depth,
                live=lambda: self.recorder.live,
                replicas=self._replicas,
            )
        )
        self.registry.register(self.on_screen)
        self.registry.register(self.monitor.ejections)

    def _build_shared_state(self, config: Config) -> None:
        """State shared with other workers, and with other replicas through Redis."""
        worker = self.worker
        self.redis: RedisState | None = None
        self.keyring: Keyring | None = None
        self.fleet.peers = None if worker is None else worker.peers
        if config.state.redis is not None:
            group = new_group() if worker is None else worker.group
            url, namespace = config.state.redis.get_secret_value(), config.state.namespace
            self.redis = RedisState(url, namespace, config.server.workers, group, self.fleet.view.knows)
            self.registry.register(client := self.redis.client)
            replicas = self.redis.replicas
            self.fleet.peers = replicas if worker is None else CombinedPeers(worker.peers, replicas)
            if config.state.keys == "redis":
                stored = RedisKeys(client.call, client.url, client.timeout, namespace)
                self.keyring = Keyring(stored, self._swap_keys, self._keys_of_file)
                client.on_up(self.keyring.check_soon)
        if config.state.keys == "dir" and config.state.dir is not None:
            self.keyring = Keyring(FileKeys(config.state.dir), self._swap_keys, self._keys_of_file)
        self.answers = answer_store(config.state)
        is_leader = worker is None or worker.is_leader
        self.learned_keeper: LearnedKeeper | None = None
        if (store := state_store(config.state, None if self.redis is None else self.redis.client)) is not None:
            self.learned_keeper = LearnedKeeper(store, self.fleet, self.runtime, is_leader)
            self.registry.register(self.learned_keeper)
            self.monitor.limit_log.on_begin = self.learned_keeper.save_soon
        if self.fleet.peers is not None:
            self.fleet.request_publish = self.monitor.publish_soon

    def _replicas(self) -> int:
        """Live gateways, including this gateway."""
        return 1 if self.redis is None else self.redis.replicas.count()

    def _build_servers(self, config: Config) -> None:
        quotas: Quotas = LocalQuotas() if self.worker is None else self.worker.quotas
        quotas = quotas if self.redis is None else self.redis.quotas
        self.cache_warming = CacheWarming(self.fleet, self.estimator, self.runtime)
        self.witness_probes = WitnessProbes(self.fleet, self.estimator, self.runtime)
        dispatcher = Dispatcher(
            self.fleet,
            RetryBudget(),
            on_dispatched=self.queue.on_dispatched,
            saturated=lambda: self.queue.saturated,
        )
        self.rescues = Rescues(self.fleet, dispatcher.run)
        self.escalations = Escalations(self.runtime.current.routes.all)
        self.answer_cache = AnswerCache(self.answers, config.state.answer_bytes)
        self.proxy = Proxy(
            runtime=self.runtime,
            decider=self.decider,
            reader=RequestReader(self.runtime, self.decider, dispatcher.operations),
            queue=self.queue,
            dispatcher=dispatcher,
            recorder=self.recorder,
            tracer=None if self.telemetry is None else Tracer(config.telemetry.traces),
        )
        self.admission = Admission(quotas, self.decider, self.recorder, self.registry)
        self.sockets = ResponsesSockets(self.proxy)
        self.proxy.attach(
            [
                *(Tags(), self.admission, Repairs(self.decider), KeptState(self.decider), CallerKeys(self.runtime)),
                *(Comments(), CountReplies(), self.answer_cache, self.cache_warming),
                *(StoredPaths(self.proxy), self.sockets, self.rescues, self.escalations),
            ]
        )
        self.admin = GatewayAdmin(
            registry=self.registry,
            recorder=self.recorder,
            decider=self.decider,
            queue=self.queue,
            runtime=self.runtime,
            cache_warming=self.cache_warming,
            on_screen=self.on_screen,
            stored_keys=lambda: () if self.keyring is None else self.keyring.known,
        )
        self.admin_app = AdminServer(self.admin).app()
        self.history = self.admin.history if self.worker is None else None  # of workers: by who answers for all
        self.intake = Intake(config.server.max_connections, config.server.max_body_bytes)
        self.registry.register(self.intake)
        self.data_port = DataPort(self.proxy, self.intake, self._certificate(config))
        if self.data_port.certificate is not None:
            self.registry.register(self.data_port.certificate)
        self.picker = self._build_picker(config)
        self._admin_runner: web.AppRunner | None = None

    def _build_picker(self, config: Config) -> PickerServer | None:
        if config.pick is None:
            return None
        from gateway.picker.llm_d_metrics import LlmDMetrics
        from gateway.picker.picker import Picker
        from gateway.picker.picker_service import PickerServer, PickerService

        self.registry.register(LlmDMetrics(self.fleet.view.pool_of, self.monitor.loads, self._routes, self.queue.depth))
        service = PickerService(
            Picker(self.runtime, self.decider, self.queue, config.pick, self.proxy.dispatcher.waker),
            self.recorder,
            max_body=lambda: self.config.defaults.max_body,
            is_ready=lambda: not self.proxy.draining and self.decider.any_usable(monotonic()),
            intake=self.intake,
        )
        return PickerServer(service, self.intake)

    def _certificate(self, config: Config) -> ServerCertificate | None:
        if self.worker is not None:
            return self.worker.certificate
        return None if config.server.tls is None else ServerCertificate(config.server.tls)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.runtime.current.config

    def _pools(self) -> Mapping[str, Pool]:
        return self.runtime.current.pools

    def _routes(self) -> tuple[Route, ...]:
        return self.runtime.current.routes.all

    # -- start ------------------------------------------------------------------------------

    async def start(self, before_open: Callable[[], None] = lambda: None) -> None:
        """Listens on new sockets; calls `before_open` when everything is loaded, before the first caller. Raises
        OSError if a port is taken."""
        server = self.config.server
        with ExitStack() as stack:
            data = None
            if self.config.opens_data_port:
                with naming(server.listen, LISTEN_KEY):
                    data = stack.enter_context(bind(server.listen))
                self.url = url_of(data, server.listen.host, tls=self.data_port.certificate is not None)
            with naming(server.admin, ADMIN_KEY):
                admin = stack.enter_context(bind(server.admin))
            self.admin_url = url_of(admin, server.admin.host)
            await self.prepare(admin)
            before_open()
            await self.open(data)
            stack.pop_all()  # closed by the servers from now on

    async def prepare(self, admin: socket) -> None:
        """Starts everything but the data port."""
        self.estimator.warm()
        self._admin_runner = await serve_app(self.admin_app, admin)
        if self.worker is not None:
            await self.worker.peers.start(self.fleet.view.knows)
        self._watch_endpoints()
        if self.worker is None or self.worker.is_leader:
            self.cache_warming.start()
        optional = self.kv_events, self.telemetry, self.redis, self.keyring, self.history
        for component in (*optional, self.answers):
            if component is not None:
                component.start()
        if self.config.is_dynamic:
            await self.apply_config(self.config)
        if self.learned_keeper is not None:
            await self.learned_keeper.start()
        self.discovery.start(self._apply_addresses)

    async def open(self, data: socket | None) -> None:
        """Opens the ports of callers: the data port, unless `data` is None, and that of the picker."""
        self.metrics.loop_lag.on_beat = self.fleet.on_beat
        self.metrics.loop_lag.start(asyncio.get_running_loop())
        if data is not None:
            await self.data_port.open(data, self.config.defaults.max_body)
        if self.picker is not None and self.config.pick is not None:
            await self.picker.start(self.config.pick, shared=self.worker is not None)

    # -- reload -----------------------------------------------------------------------------

    async def apply_config(self, config: Config) -> None:
        """Brings another configuration into force."""
        async with self._reloading:
            await self.discovery.follow(config)
            await self._reload(config, mended=True)

    async def _apply_addresses(self) -> None:
        """Reloads the configuration in force, after a change of addresses."""
        async with self._reloading:
            await self._reload(self.config, mended=False)

    async def _reload(self, wanted: Config, *, mended: bool) -> None:
        """Builds the new Runtime in a thread, then swaps it in within one turn of the loop. `mended` False: found
        addresses have changed, and no setting."""
        new, replaced = await asyncio.to_thread(self._build_runtime, wanted.with_discovered(self.discovery.found))
        while self.queue.dispatch_pending:  # noqa: ASYNC110 - its decision names endpoints of the fleet before the swap
            await asyncio.sleep(0)
        unused = {*self.runtime.current.connections.values()} - {*new.connections.values()}
        self._swap(new, replaced, mended=mended)
        for connections in unused:
            await connections.close()

    def _build_runtime(self, wanted: Config) -> tuple[Runtime, frozenset[str]]:
        """The next Runtime, and the routes that it replaces: thousands are compared in a tenth of a second or more."""
        before = self.runtime.current
        new = build_warm_runtime(wanted, before)
        if self.keyring is not None:
            new = new.with_stored_keys(self.keyring.known)
        return new, new.replaced_routes(before)

    def _swap(self, new: Runtime, replaced: frozenset[str], *, mended: bool) -> None:
        """Puts `new` in force by one assignment, then tells components with learned or derived state."""
        self.runtime.current = new
        routes = new.routes.all
        self.fleet.reload(new.pools.values(), mended=mended)
        self.estimator.reload(tokenizers(new.config))
        self.queue.reload(replaced)
        self.proxy.dispatcher.reload(routes)
        self.rescues.reload()
        self.escalations.reload(routes)
        self.data_port.reload(new.config.defaults.max_body)
        self.cache_warming.reload()
        if self.keyring is not None:
            self.keyring.check_soon()
        self.metrics.reload(routes, new.served_labels())
        self.on_screen.refine(budgets(routes))
        self._watch_endpoints()
        self._watch_kv_events()
        if self.telemetry is not None:
            self.telemetry.reload(served_endpoints(new.upstreams))

    def reopen_logs(self) -> None:
        """Called on SIGHUP: `logrotate` has renamed the files. Records of ended requests are in the renamed ones."""
        self.recorder.flush()
        self.record_logs.reopen()

    async def _swap_keys(self, stored: Sequence[Key]) -> None:
        """Called when the stored keys have changed. Thousands take tens of milliseconds: in a thread."""
        async with self._reloading:
            self.runtime.current = await asyncio.to_thread(self.runtime.current.with_stored_keys, stored)

    def _keys_of_file(self) -> Sequence[Key]:
        return self.config.keys

    def _watch_endpoints(self) -> None:
        watched = {}
        for id, upstream in self.runtime.current.upstreams.items():
            model = "" if upstream.pool == self.config.passthrough else upstream.model  # empty: any, as callers ask for
            watched[id] = PollTarget(upstream.connections, upstream.backend, upstream.pool, model)
        self.fleet.on_networks({id: upstream.connections for id, upstream in self.runtime.current.upstreams.items()})
        self.monitor.watch(watched, self.config.defaults.scrape)

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
        self.data_port.close()
        if self.picker is not None:
            self.picker.close()
        await self._until(lambda: not self.recorder.live, grace)
        self.queue.close()
        self.metrics.loop_lag.close()
        await self.data_port.abort()
        if self.picker is not None:
            await self.picker.stop(HANDLER_GRACE)
        if self._admin_runner is not None:
            await self._admin_runner.cleanup()
        components = (
            *(self.proxy.dispatcher.waker, self.discovery, self.cache_warming, self.witness_probes),
            *(self.monitor, self.answers),
            *(self.history, self.learned_keeper, self.data_port.certificate, self.kv_events),
            *(self.keyring, self.redis, None if self.worker is None else self.worker.peers),
            *self.runtime.current.connections.values(),
        )
        for component in components:
            if component is not None:
                await component.close()
        self.estimator.close()
        self.recorder.flush()
        if self.telemetry is not None:
            await self.telemetry.close()
        self.record_logs.close()

    async def _until(self, over: Callable[[], bool], seconds: float) -> None:
        ends = monotonic() + seconds
        while not over() and monotonic() < ends and not self.force_stop:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
