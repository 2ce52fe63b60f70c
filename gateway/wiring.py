"""Core: the objects that route, fail over, stream and record, without any part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic, time
from typing import TypeVar

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from gateway.admin.gateway_admin import GatewayAdmin
from gateway.config.endpoint_section import Discovered
from gateway.config.models import Config
from gateway.core.part import Part
from gateway.data_port import DataPort
from gateway.downstream.limits import Intake
from gateway.fleet.endpoint_poll import PollTarget
from gateway.fleet.monitor import Monitor
from gateway.observe.metrics.request_metrics import RequestMetrics, budgets
from gateway.observe.metrics.scrape_collectors import EndpointCollector, GatewayCollector, Registry
from gateway.observe.metrics.series import histogram
from gateway.observe.record_columns import RECORD
from gateway.observe.recorder import Recorder
from gateway.proxy import Proxy
from gateway.request_steps import Decider, RequestReader
from gateway.runtime import Runtime, RuntimeHolder, build_runtime, build_warm_runtime, tokenizers
from gateway.scheduler import RequestQueue
from gateway.server_certificate import ServerCertificate
from gateway.tokenize.estimator import Estimator
from gateway.upstream.dispatcher import Dispatcher
from gateway.worker_context import WorkerContext
from policies.attempts.budgets import RetryBudget
from policies.fleet.fleet import Fleet
from policies.fleet.peers import CombinedPeers, PeerLink
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue_parts import queue_parts
from policies.routes.route import Route

T = TypeVar("T")


class Core:
    """Objects of a gateway process, and the configuration in force. `worker`: context of this worker; None: a single
    process. Parts attach hooks, collectors and readers (`Part`)."""

    def __init__(self, config: Config, worker: WorkerContext | None = None) -> None:
        self.worker = worker
        self.runtime = RuntimeHolder(build_runtime(config.with_discovered(Discovered())))
        self._parts: Sequence[Part] = ()
        self._offered: dict[type, object] = {}
        self._reloading = asyncio.Lock()
        self._build_decisions()
        self._build_observers()
        self._build_ports(config)

    # -- build ------------------------------------------------------------------------------

    def _build_decisions(self) -> None:
        self.fleet = Fleet(self.runtime.current.pools.values(), unix_offset=time() - monotonic())
        self.estimator = Estimator(tokenizers(self.config), self.fleet.view.token_scale)
        shared = None if self.worker is None else self.worker.peers
        self.monitor = Monitor(self.fleet, shared=shared, routes=self.routes)
        self.fleet.request_learning = self.monitor.learn_soon
        self.decider = Decider(self.estimator, self.fleet)
        self.queue = RequestQueue(
            self.fleet,
            patience=lambda: self.config.defaults.first_token,
            new_scheduler=lambda: QueueScheduler(queue_parts()),
        )
        self.dispatcher = Dispatcher(
            self.fleet,
            RetryBudget(),
            on_dispatched=self.queue.on_dispatched,
            saturated=lambda: self.queue.saturated,
        )

    def _build_observers(self) -> None:
        """Every Record goes to all sinks of the recorder; Prometheus reads the registry."""
        self.registry = Registry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = RequestMetrics(self.registry, self.routes(), self.runtime.current.served_labels())
        self.recorder = Recorder((self.decider.learn,), [self.metrics], self.metrics.loop_lag)
        self.metrics.flush = self.recorder.flush
        self.metrics.loop_lag.on_beat = self.fleet.on_beat
        self.fleet.on_cache_lost = self.recorder.slow.on_cache_lost
        self.on_screen = histogram("firsttoken_ttft_on_screen_seconds", budgets(self.routes()))
        engines = self.monitor.loads, self.monitor.engine_loads, self.monitor.engine_rates, self.fleet.view.rtts
        self.registry.register(EndpointCollector(self.fleet.view.pool_of, *engines))
        self.registry.register(
            GatewayCollector(
                self.routes,
                lambda: self.runtime.current.pools,
                promises=self.monitor.lost_promises,
                depth=self.queue.depth,
                live=lambda: self.recorder.live,
            )
        )
        self.registry.register(self.on_screen)
        self.registry.register(self.monitor.ejections)

    def _build_ports(self, config: Config) -> None:
        self.proxy = Proxy(
            runtime=self.runtime,
            decider=self.decider,
            reader=RequestReader(self.runtime, self.decider, self.dispatcher.operations),
            queue=self.queue,
            dispatcher=self.dispatcher,
            recorder=self.recorder,
        )
        self.admin = GatewayAdmin(
            registry=self.registry,
            recorder=self.recorder,
            decider=self.decider,
            operations=self.dispatcher.operations,
            queue=self.queue,
            runtime=self.runtime,
            on_screen=self.on_screen,
        )
        self.intake = Intake(config.server.max_connections, config.server.max_body_bytes)
        self.registry.register(self.intake)
        self.data_port = DataPort(self.proxy, self.intake, self._certificate(config))
        if self.data_port.certificate is not None:
            self.registry.register(self.data_port.certificate)

    def _certificate(self, config: Config) -> ServerCertificate | None:
        if self.worker is not None:
            return self.worker.certificate
        return None if config.server.tls is None else ServerCertificate(config.server.tls)

    # -- parts ------------------------------------------------------------------------------

    def attach(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.proxy.attach(parts)
        for part in parts:
            RECORD.add(part.columns)
            for collector in part.collectors:
                self.registry.register(collector)
            self.recorder.annotators += part.annotators
            self.recorder.batch_sinks += part.readers
            self.admin.pool_members.append(part.pool_members)

    def offer(self, resource: object) -> None:
        """Let parts later in the list find a resource by its type."""
        self._offered[type(resource)] = resource

    def find(self, kind: type[T]) -> T | None:
        found = self._offered.get(kind)
        return found if isinstance(found, kind) else None

    def join(self, peers: PeerLink) -> None:
        """Share endpoint loads with further processes."""
        before = self.fleet.peers
        self.fleet.peers = peers if before is None else CombinedPeers(before, peers)
        self.fleet.request_publish = self.monitor.publish_soon

    @property
    def is_leader(self) -> bool:
        """This process runs singleton jobs."""
        return self.worker is None or self.worker.is_leader

    # -- configuration in force -------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.runtime.current.config

    def routes(self) -> tuple[Route, ...]:
        return self.runtime.current.routes.all

    async def apply(self, config: Config) -> None:
        """Brings another configuration into force."""
        async with self._reloading:
            for part in self._parts:
                await part.follow(config)
            await self._reload(config, mended=True)

    async def refresh(self) -> None:
        """Reloads the configuration in force: a part completes it in another way, and no setting has changed."""
        async with self._reloading:
            await self._reload(self.config, mended=False)

    async def extend(self) -> None:
        """Has the parts extend the Runtime in force again."""
        async with self._reloading:
            self.runtime.current = await asyncio.to_thread(self._extended, self.runtime.current)

    async def _reload(self, wanted: Config, *, mended: bool) -> None:
        """Build the new Runtime in a thread, then swap Runtimes within one turn of the event loop."""
        new, replaced = await asyncio.to_thread(self._build_runtime, wanted)
        while self.queue.dispatch_pending:  # noqa: ASYNC110 - its decision names endpoints of the fleet before the swap
            await asyncio.sleep(0)
        unused = {*self.runtime.current.connections.values()} - {*new.connections.values()}
        self._swap(new, replaced, mended=mended)
        for connections in unused:
            await connections.close()

    def _build_runtime(self, wanted: Config) -> tuple[Runtime, frozenset[str]]:
        """The next Runtime, and the routes that it replaces: thousands are compared in a tenth of a second or more."""
        before = self.runtime.current
        wanted = wanted.with_discovered(Discovered())
        for part in self._parts:
            wanted = part.completed(wanted)
        new = self._extended(build_warm_runtime(wanted, before))
        return new, new.replaced_routes(before)

    def _extended(self, runtime: Runtime) -> Runtime:
        for part in self._parts:
            runtime = part.extended(runtime)
        return runtime

    def _swap(self, new: Runtime, replaced: frozenset[str], *, mended: bool) -> None:
        """Puts `new` in force by one assignment, then tells objects with learned or derived state."""
        self.runtime.current = new
        routes = new.routes.all
        self.fleet.reload(new.pools.values(), mended=mended)
        self.estimator.reload(tokenizers(new.config))
        self.queue.reload(replaced)
        self.dispatcher.reload(routes)
        self.data_port.reload(new.config.defaults.max_body)
        self.metrics.reload(routes, new.served_labels())
        self.on_screen.refine(budgets(routes))
        self._watch_endpoints()
        for part in self._parts:
            part.reload()

    def _watch_endpoints(self) -> None:
        watched, upstreams = {}, self.runtime.current.upstreams
        for id, upstream in upstreams.items():
            model = "" if upstream.pool == self.config.passthrough else upstream.model  # empty: any, as callers ask for
            watched[id] = PollTarget(upstream.connections, upstream.backend, upstream.pool, model)
        self.fleet.on_networks({id: upstream.connections for id, upstream in upstreams.items()})
        self.monitor.watch(watched, self.config.defaults.scrape)

    # -- start and stop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._watch_endpoints()

    async def close(self) -> None:
        """No request is in progress any more."""
        if self.data_port.certificate is not None:
            await self.data_port.certificate.close()
        await self.dispatcher.waker.close()
        await self.monitor.close()
        for connections in self.runtime.current.connections.values():
            await connections.close()
        self.estimator.close()
        self.recorder.flush()
