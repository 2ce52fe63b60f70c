"""The life of a request, as one straight line; docs/life-of-a-request.md walks along it.

Everything before the first token may fail and be mended; everything after is relayed as it
comes. Whatever happens, the caller gets one answer and the operator one Record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from backends.interface import Operation
from gateway.admission.quotas import Admission
from gateway.admission.route_table import admit
from gateway.api import inference_request as ingress
from gateway.api.api_error import ApiError, internal, retry_later, stopped
from gateway.api.inference_request import InferenceRequest
from gateway.api.response_headers import gateway_headers
from gateway.api.strict_json import encode
from gateway.decider import Decider
from gateway.downstream.http_request import HttpRequest
from gateway.fleet.cache_warming import CacheWarming
from gateway.observe.otel.trace_context import Tracer
from gateway.observe.record import RequestOutcome, Stage
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from gateway.runtime import RuntimeHolder
from gateway.scheduler import QueueTimeout, RequestQueue
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import RoutedRequest, attempt_record
from gateway.upstream.upstream_request import UpstreamRequest
from policies.types import Decision, Placement, Price

log = logging.getLogger("firsttoken")

OPERATIONS = {operation.value: operation for operation in Operation}
NOT_FOUND = ApiError(404, "There is nothing at this path.", code="unknown_url")


class Proxy:
    """The data port."""

    def __init__(
        self,
        runtime: RuntimeHolder,
        decider: Decider,
        line: RequestQueue,
        dispatcher: Dispatcher,
        recorder: Recorder,
        upkeep: CacheWarming,
        admission: Admission,
        tracer: Tracer | None = None,
    ) -> None:
        self.runtime = runtime
        self.decider = decider
        self.line = line
        self.dispatcher = dispatcher
        self.recorder = recorder
        self.upkeep = upkeep
        self.admission = admission
        self.tracer = tracer
        self.draining = False
        self.stopping = False  # what is cancelled now, we cancel
        self.gets: dict[str, Callable[[HttpRequest], None]] = {
            "/v1/models": self.models,
            "/health": self.health,
            "/ready": self.ready,
        }

    async def handle(self, http: HttpRequest) -> None:
        """Every request of the data port, by path. Unknown paths never get further than this."""
        if self.draining:
            http.keep_alive = False
        operation = OPERATIONS.get(http.path)
        if operation is not None and http.method == "POST":
            await self.infer(http, operation)
        elif operation is not None:
            http.refuse(_wrong_method("POST"))
        elif (get := self.gets.get(http.path)) is None:
            http.refuse(http.fault or NOT_FOUND)
        elif http.method not in ("GET", "HEAD"):
            http.refuse(_wrong_method("GET"))
        else:
            get(http)

    def precheck(self, http: HttpRequest) -> ApiError | None:
        """Whether its head alone is enough to refuse it, before its body has come."""
        try:
            if http.path in OPERATIONS:
                self.runtime.current.keys.tenant(http.headers.get("authorization"))
        except ApiError as refusal:
            return refusal
        return None

    async def infer(self, http: HttpRequest, operation: Operation) -> None:
        """One Record, one answer."""
        with self.recorder.timeline(http.arrival) as life:
            trace = None if self.tracer is None else self.tracer.trace(http.headers)
            life.identified(ingress.request_id(http.headers), operation.name.lower(), trace)
            try:
                await self.serve(http, operation, life)
            except QueueTimeout as refusal:
                life.held(monotonic(), refusal.limited)
                self.refuse(http, refusal, life, RequestOutcome.SHED)
            except ApiError as refusal:
                self.refuse(http, refusal, life)
            except asyncio.CancelledError:
                if http.begun or not self.stopping:
                    raise
                self.refuse(http, stopped(), life, RequestOutcome.CUT)
            except Exception:
                log.exception("internal error on request %s", life.record.request_id)
                self.internal_error(http, life)

    async def serve(self, http: HttpRequest, operation: Operation, life: RequestTimeline) -> None:
        """The straight line."""
        runtime = self.runtime.current  # kept to the end of the request, whatever is reloaded meanwhile
        tenant = runtime.keys.tenant(http.headers.get("authorization"))
        raw = life.end_stage(Stage.READ, body_of(http))
        parsed = await self.decider.parse(
            operation, raw, http.headers, http.arrival, life.record.request_id, runtime.wanted_headers
        )
        request = life.end_stage(Stage.PARSE, parsed)
        wanted = runtime.routes.match(request.model)
        life.routed(request, wanted, tenant.name)
        estimate = life.end_stage(Stage.ESTIMATE, await self.decider.estimate(request, wanted, tenant))
        route = admit(tenant, wanted, request.model)
        if tenant.limits is not None:
            await self.admission.reserve(tenant, tenant.limits, estimate, runtime.pools, life)
        life.end_stage(Stage.ADMIT, route)
        decision = life.end_stage(Stage.DECIDE, life.decided(await self.line.decide(request, route, estimate, tenant)))
        reject_unplaced(decision)
        job = RoutedRequest(
            request=request,
            route=route,
            estimate=estimate,
            decision=decision,
            life=life,
            upstreams=self.runtime.current.upstreams,  # of the fleet that the decision, just made, has chosen from
            first_token_limit=runtime.config.defaults.first_token,
            passthrough=route is runtime.routes.passthrough,
            cache_group=tenant.cache_group,
        )
        idle, private = runtime.config.defaults.stream_idle, bool(tenant.cache_group)
        relay = Relay(http, life, strip_usage=hide_usage(request), idle=idle, private=private)
        try:
            await self.dispatcher.execute(job, relay)
        finally:
            if relay.begun:
                run = relay.run
                record_winner(run, job, runtime.price(run.attempt.candidate.endpoint))
                self.upkeep.answered(run, job, raw)

    def refuse(
        self, http: HttpRequest, refusal: ApiError, life: RequestTimeline, end: RequestOutcome | None = None
    ) -> None:
        """An error reply, with the same headers as an answer."""
        end = end or end_of(refusal, life.record.decision)
        life.refused(refusal.status, refusal.logged, end, monotonic())
        http.refuse(refusal, gateway_headers(life, monotonic()))
        refusal.__traceback__ = None  # its frames hold what holds it

    def internal_error(self, http: HttpRequest, life: RequestTimeline) -> None:
        """Our bug. Where the answer has begun, an unfinished body is the only honest sign left."""
        if http.begun:
            life.finished(RequestOutcome.INTERNAL, monotonic())
            http.writer.transport.abort()
        else:
            self.refuse(http, internal(life.record.request_id), life, RequestOutcome.INTERNAL)

    # -- the small GETs -----------------------------------------------------------------

    def models(self, http: HttpRequest) -> None:
        """The routes that this key may use, as OpenAI lists models."""
        runtime = self.runtime.current
        try:
            tenant = runtime.keys.tenant(http.headers.get("authorization"))
        except ApiError as refusal:
            return http.refuse(refusal)
        names = [name for name in runtime.routes.by_name if tenant.may_use(name)]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "firsttoken"} for name in names]
        return http.respond(200, encode({"object": "list", "data": data}))

    def health(self, http: HttpRequest) -> None:
        http.respond(200, b'{"status":"alive"}')

    def ready(self, http: HttpRequest) -> None:
        if self.draining:
            http.respond(503, b'{"status":"draining"}')
        elif not self.decider.any_usable(monotonic()):
            http.respond(503, b'{"status":"no usable endpoint"}')
        else:
            http.respond(200, b'{"status":"ready"}')


def body_of(http: HttpRequest) -> bytes:
    """Raises what it is refused for by its framing."""
    if http.fault is not None:
        raise http.fault
    return http.body


def reject_unplaced(decision: Decision) -> None:
    """What the decision did not place is answered at once."""
    if decision.outcome is Placement.SHED:
        message = f"No tier can meet the time-to-first-token budget now: {decision.reason}."
        raise ApiError(
            429,
            message,
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers=retry_later(decision.retry_after),
        )
    if decision.outcome is Placement.UNAVAILABLE:
        message = f"No endpoint is usable now: {decision.reason}."
        raise ApiError(503, message, type="server_error", code="unavailable", headers=retry_later(decision.retry_after))
    if decision.outcome is Placement.UNFIT:
        code = "context_length_exceeded" if "context window" in decision.reason else "no_suitable_tier"
        raise ApiError(400, f"No tier of this route can take the request: {decision.reason}.", code=code)


def end_of(refusal: ApiError, decision: Decision | None) -> RequestOutcome:
    """Whose fault a refusal was."""
    if decision is not None and decision.outcome is Placement.SHED:
        return RequestOutcome.SHED
    if decision is not None and decision.outcome is Placement.UNAVAILABLE:
        return RequestOutcome.UNAVAILABLE
    placed = decision is not None and decision.outcome is Placement.PLACE
    return RequestOutcome.FAILED if placed and refusal.status in (429, *range(500, 600)) else RequestOutcome.REFUSED


def hide_usage(request: InferenceRequest) -> bool:
    """Usage is always asked for upstream; a caller that did not ask must not see it."""
    return request.stream and not request.wants_usage


def record_winner(run: UpstreamRequest, job: RoutedRequest, price: Price) -> None:
    """Note the attempt that won, and end it if it is still open."""
    run.stop_if_open()
    job.life.answered(
        attempt_record(run, job.request.arrival),
        run.report or run.reported(),
        run.tap.times,
        output_tokens=run.output_tokens,
        tpot=run.tpot(),
        price=price,
        blocks=job.estimate.pools[run.attempt.candidate.endpoint.pool].blocks,
    )


def _wrong_method(right: str) -> ApiError:
    return ApiError(405, f"This path takes {right} only.", code="method_not_allowed", headers={"allow": right})
