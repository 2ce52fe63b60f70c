"""The life of a request as a straight line, `Proxy.serve` and then `Proxy.race`; docs/life-of-a-request.md walks along
the same steps.

Attempts may fail and be retried until the first token; from then on, bytes are relayed on arrival. In all cases the
caller gets an answer and the operator a Record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from backends.interface import Operation
from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError, internal, stopped
from gateway.api.dialects import model_list, model_object
from gateway.api.paths import MODEL, MODELS, canonical
from gateway.api.request_headers import request_id_of
from gateway.api.same_origin import ASKED_METHOD
from gateway.core.hooks import Ask, Hooked, Plans, SidePath, SocketPath
from gateway.downstream.answer_headers import gateway_headers
from gateway.downstream.http_request import HttpRequest
from gateway.downstream.limits import SMALL_BODY
from gateway.observe.record import RequestOutcome, Stage
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from gateway.observe.trace_context import Tracer
from gateway.refusals import not_found, origin_refused, outcome_of, reject_unplaced, wrong_method
from gateway.request_steps import Decider, RequestReader
from gateway.runtime import RuntimeHolder
from gateway.scheduler import QueueTimeout, RequestQueue
from gateway.strict_json import encode
from gateway.upstream.answer import Relay
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.race import Race
from gateway.upstream.routed_request import RoutedRequest, Upstream
from policies.routes.route import Route
from policies.types import Decision, Placement

log = logging.getLogger("firsttoken")

ALIASES = {"/rerank": Operation.RERANK, "/v2/rerank": Operation.RERANK, "/score": Operation.SCORE}
OPERATIONS = {operation.value: operation for operation in Operation} | ALIASES
LABELS = {operation: operation.name.lower() for operation in Operation}


Aside = Callable[[HttpRequest, Tenant, RequestTimeline], Awaitable[None]]  # writes an answer, or raises ApiError


@dataclass(slots=True, kw_only=True, eq=False)
class Proxy:
    """Answers every request of the data port."""

    runtime: RuntimeHolder
    decider: Decider
    reader: RequestReader
    queue: RequestQueue
    dispatcher: Dispatcher
    recorder: Recorder
    tracer: Tracer | None = None
    draining: bool = False  # each answer is the last of its connection
    side_paths: Mapping[str, SidePath] = field(default_factory=dict)
    socket_paths: Mapping[str, SocketPath] = field(default_factory=dict)
    methods: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by path; set by `attach`
    stopping: bool = False  # a task cancelled now is cancelled by the gateway, not by the caller

    def attach(self, parts: Sequence[Hooked]) -> None:
        """Let parts hang on requests, and serve paths of their own. Called once, when all are built."""
        self.plans.attach(parts)
        self.side_paths = {path: side for part in parts for path, side in part.side_paths.items()}
        self.socket_paths = {path: served for part in parts for path, served in part.socket_paths.items()}
        self.methods = {**METHODS, **{path: side.methods for path, side in self.side_paths.items()}}

    @property
    def plans(self) -> Plans:
        return self.reader.plans

    async def handle(self, http: HttpRequest) -> None:
        """Route by path. An unknown path never gets further than this."""
        if self.draining:
            http.keep_alive = False
        if http.path not in self.methods:
            http.path, http.model = canonical(http.path)
        if (cors := self.runtime.current.cors) is not None:
            http.lines = cors.lines(http.headers)
        operation = OPERATIONS.get(http.path)
        if operation is not None and http.method == "POST":
            await self.infer(http, operation)
        elif (refusal := http.fault or self.precheck(http)) is not None:
            http.refuse(refusal)
        elif http.method == "OPTIONS":
            self.preflight(http)
        elif (side := self.side_paths.get(http.path)) is not None:
            await self.aside(http, side.operation, side.answer)
        elif http.websocket is not None and http.path in self.socket_paths:
            await self.websocket(http, self.socket_paths[http.path])
        else:
            GETS[http.path](self, http)

    def precheck(self, http: HttpRequest) -> ApiError | None:
        """The reason to refuse a request by the head alone, before the body has arrived."""
        if http.path not in self.methods:
            http.path, http.model = canonical(http.path)
        if offers_websocket(http) and (socket := self.socket_paths.get(http.path)) is not None:
            return socket.precheck(http)
        if (methods := self.methods.get(http.path)) is None:
            return not_found(http.path)
        if (
            http.method == "OPTIONS"
            and ASKED_METHOD in http.headers
            and (cors := self.runtime.current.cors) is not None
        ):
            return None if cors.allows(http.headers.get("origin", "")) else origin_refused()
        if http.method not in methods:
            return wrong_method(methods)
        if http.path in PROBES:
            return None
        if http.path in OPERATIONS and has_large_body(http):
            return self.precheck_key(http)
        return self.precheck_caller(http)

    def precheck_caller(self, http: HttpRequest) -> ApiError | None:
        """The reason to refuse a caller by the key alone."""
        try:
            self.reader.authorize(http)
        except ApiError as refusal:
            return refusal
        return None

    def precheck_key(self, http: HttpRequest) -> ApiError | None:
        """The same, and the limits of the key."""
        try:
            tenant = self.reader.authorize(http)
        except ApiError as refusal:
            return refusal
        checked = (check(tenant) for check in self.plans.door(self.runtime.current).check)
        return next(filter(None, checked), None)

    async def websocket(self, http: HttpRequest, socket: SocketPath) -> None:
        try:
            await socket.serve(http)
        except ApiError as refusal:
            http.refuse(refusal)

    async def aside(self, http: HttpRequest, operation: str, answer: Aside) -> None:
        """Answer a request other than inference, and emit a Record. The request counts against its key."""
        with self.recorder.timeline(http.arrival) as timeline:
            timeline.identified(request_id_of(http.headers), operation, None)
            try:
                tenant = self.reader.authorize(http)
                timeline.record.tenant = tenant.name
                door = self.plans.door(self.runtime.current)
                for enter in door.enter:
                    enter(http, tenant, timeline)
                if http.fault is not None:
                    raise http.fault
                for claim in door.aside:
                    await claim(http, tenant, timeline)
                await answer(http, tenant, timeline)
            except ApiError as refusal:
                end = RequestOutcome.UNAVAILABLE if refusal.status >= 500 else RequestOutcome.REFUSED
                self.refuse(http, refusal, timeline, end)
            except asyncio.CancelledError:
                if http.answering or not self.stopping:
                    raise
                self.refuse(http, stopped(), timeline, RequestOutcome.CUT)
            except Exception:
                self.internal_error(http, timeline)

    def upstream_of(self, http: HttpRequest, routes: Sequence[Route], endpoint: str) -> Upstream:
        """An endpoint of these routes as the caller uses it."""
        runtime = self.runtime.current
        upstreams, pool = runtime.upstreams, runtime.upstreams[endpoint].pool
        route = next(route for route in routes if pool in route.pools)
        for sends in self.plans.of(runtime, route, Operation.RESPONSES).sends:
            upstreams = sends(http, upstreams)
        return upstreams[endpoint]

    async def infer(self, http: HttpRequest, operation: Operation) -> None:
        """Write an answer and emit a Record in all cases."""
        with self.recorder.timeline(http.arrival) as timeline:
            trace = None if self.tracer is None else self.tracer.trace(http.headers)
            timeline.identified(request_id_of(http.headers), LABELS[operation], trace)
            ask = Ask(http, operation, timeline, self.runtime.current)
            try:
                if (routed := await self.serve(ask)) is not None:
                    await self.race(ask, routed)
            except QueueTimeout as timeout:
                self.refuse(http, timeout, timeline, RequestOutcome.SHED)
            except ApiError as refusal:
                self.refuse(http, refusal, timeline)
            except asyncio.CancelledError:
                if http.answering or not self.stopping or http.writer.transport.is_closing():  # the caller left
                    raise
                self.refuse(http, stopped(), timeline, RequestOutcome.CUT)
            except Exception:
                self.internal_error(http, timeline)
            finally:
                if http.comments is not None:
                    http.comments.stop()
                    http.comments = None

    async def serve(self, ask: Ask) -> RoutedRequest | None:
        """HttpRequest -> InferenceRequest -> RoutedRequest; None: it is answered already. Raises ApiError."""
        http, timeline, reader = ask.http, ask.timeline, self.reader
        ask.tenant = tenant = reader.authorize(http)
        timeline.record.tenant = tenant.name
        door = self.reader.plans.door(ask.runtime)
        for enter in door.enter:
            enter(http, tenant, timeline)
        if http.fault is not None:
            raise http.fault
        timeline.stamps.append((Stage.READ, monotonic()))
        await reader.parse(ask)
        timeline.stamps.append((Stage.PARSE, monotonic()))
        for parsed in door.parsed:
            parsed(ask)
        reader.find_route(ask)
        timeline.routed(ask.request, ask.plan.route)
        for read in ask.plan.read:
            await read(ask)
        ask.request.caller = reader.caller(http, tenant)
        await reader.estimate(ask)
        for admit in ask.plan.admit:
            await admit(ask)
        for answer in ask.plan.answer:
            if await answer(ask):
                return None
        timeline.stamps.append((Stage.ADMIT, monotonic()))
        decision = await self.decided(ask)
        if decision.outcome is not Placement.PLACE:
            for unplaced in ask.plan.unplaced:
                if unplaced(ask, decision):
                    return None
            reject_unplaced(decision)
        return self.routed(ask, decision)

    async def decided(self, ask: Ask) -> Decision:
        """Wait in the queue; after a reload without a place yet, once more by the new route. Raises ApiError."""
        entered_at = ask.timeline.stamps[-1][1]
        decision = await self.place(ask, entered_at)
        while decision is None or (decision.chosen is None and ask.runtime is not self.runtime.current):
            ask.runtime = self.runtime.current
            await self.reroute(ask)
            decision = await self.place(ask, entered_at)
        ask.timeline.decided(decision)
        ask.timeline.stamps.append((Stage.DECIDE, monotonic()))
        return decision

    def routed(self, ask: Ask, decision: Decision) -> RoutedRequest:
        current = self.runtime.current  # of the fleet that the decision, just made, has chosen from
        plan, upstreams = ask.plan, current.upstreams
        if ask.runtime is not current:  # a reload, while the request waited, may have changed how its pool is asked
            plan = self.reader.plans.made(current, ask.plan.route, ask.operation)
        for sends in plan.sends:
            upstreams = sends(ask.http, upstreams)
        for placed in ask.plan.placed:
            placed(ask)
        config = ask.runtime.config
        return RoutedRequest(
            request=ask.request,
            route=ask.plan.route,
            estimate=ask.estimate,
            decision=decision,
            timeline=ask.timeline,
            upstreams=upstreams,
            first_token_limit=config.defaults.first_token,
            limit_is_meant=config.first_token_is_meant,
            limits_are_meant=config.first_tokens_are_meant,
            model=ask.named.model,
            servers=ask.plan.servers if not ask.named.model else ask.runtime.servers(ask.named.model),
            cache_group=ask.tenant.cache_group,
            path=ask.http.path,
            masked_pools=current.masked_pools,
            idle=config.defaults.stream_idle,
            judged=bool(ask.plan.judge),
            rewrite=ask.rewrite,
        )

    async def race(self, ask: Ask, routed: RoutedRequest) -> None:
        """Relay an answer. Raises ApiError before the first token."""
        race = Race(self.dispatcher, routed, ask.relay or Relay(ask.http), ask.plan)
        try:
            await race.run()
        finally:
            for ended in ask.plan.ended:
                ended(ask, race)

    async def place(self, ask: Ask, entered_at: float) -> Decision | None:
        """Decide in the queue, and note the hold rules, however the wait ends."""
        queued, decision = self.queue.queued(ask.request, ask.plan.route, ask.estimate, ask.tenant), None
        try:
            decision = await self.queue.decide(queued, entered_at)
        finally:
            if decision is None or queued.held_s:
                ask.timeline.held(monotonic() if decision is None else decision.at, queued.held_s)
        return decision

    async def reroute(self, ask: Ask) -> None:
        """Route and estimate a request without a place when a reload has put another Runtime in force. Raises ApiError
        (404) if no route takes the model any more."""
        request, headers = ask.request, ask.http.headers
        self.reader.find_route(ask)
        ask.timeline.routed(request, ask.plan.route)
        request.headers = {name: headers[name] for name in ask.runtime.wanted_headers if name in headers}
        request.unfit, request.translated = {}, {}
        request.cache_groups = {}
        await self.reader.estimate(ask)

    def refuse(
        self, http: HttpRequest, refusal: ApiError, timeline: RequestTimeline, end: RequestOutcome | None = None
    ) -> None:
        """Write an error reply with the same headers as an answer."""
        end = end or outcome_of(refusal, timeline.record.decision)
        timeline.refused(refusal.status, refusal.logged, end, monotonic())
        http.refuse(refusal, gateway_headers(timeline, monotonic()), timeline.record.request_id)
        refusal.__traceback__ = None  # breaks the reference cycle through the frames

    def internal_error(self, http: HttpRequest, timeline: RequestTimeline) -> None:
        """Reply 500 for a bug of the gateway, the exception in hand. An answer already begun is cut off: an error there
        would be text."""
        log.exception("internal error on request %s", timeline.record.request_id)
        if http.answering:
            timeline.finished(RequestOutcome.INTERNAL, monotonic())
            http.writer.transport.abort()
        else:
            self.refuse(http, internal(timeline.record.request_id), timeline, RequestOutcome.INTERNAL)

    def preflight(self, http: HttpRequest) -> None:
        """A browser asks whether a page may send a request. It sends no key with the question."""
        cors = self.runtime.current.cors
        assert cors is not None  # by `precheck`
        http.respond(200, b"", cors.preflight(http.headers, self.methods[http.path]))

    def models(self, http: HttpRequest) -> None:
        """List the names open to the caller's key: routes, aliases, models of pools."""
        tenant = self.reader.authorize(http)
        runtime = self.runtime.current
        windows = {name: runtime.context_window(name, tenant) for name in runtime.routes.listed(tenant)}
        http.respond(200, encode(model_list(windows, http.headers)))

    def model(self, http: HttpRequest) -> None:
        """Describe the model in the path, if the caller may use the model."""
        tenant, runtime = self.reader.authorize(http), self.runtime.current
        try:
            runtime.routes.admit(tenant, runtime.routes.match(http.model, tenant).route, http.model)
        except ApiError as refusal:
            http.refuse(refusal)
        else:
            window = runtime.context_window(http.model, tenant)
            http.respond(200, encode(model_object(http.model, window, http.headers)))

    def health(self, http: HttpRequest) -> None:
        http.respond(200, b'{"status":"alive"}')

    def ready(self, http: HttpRequest) -> None:
        if self.draining:
            http.respond(503, b'{"status":"draining"}')
        elif not self.decider.any_usable(monotonic()):
            http.respond(503, b'{"status":"no usable endpoint"}')
        else:
            http.respond(200, b'{"status":"ready"}')


PROBES = {"/health": Proxy.health, "/ready": Proxy.ready}  # for anyone: kubelet names the address of a pod as Host
GETS = {MODELS: Proxy.models, MODEL: Proxy.model, **PROBES}
METHODS = {**dict.fromkeys(OPERATIONS, ("POST",)), **dict.fromkeys(GETS, ("GET", "HEAD"))}


def offers_websocket(http: HttpRequest) -> bool:
    return http.method == "GET" and http.headers.get("upgrade", "").lower() == "websocket"


def has_large_body(http: HttpRequest) -> bool:
    """By its head. A small body is read to the end, so that a refusal does not close the connection."""
    return "transfer-encoding" in http.headers or int(http.headers.get("content-length", 0)) > SMALL_BODY
