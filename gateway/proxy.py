"""The life of a request, as one straight line; docs/life-of-a-request.md walks along it.

Everything before the first token may fail and be mended; everything after is relayed as it
comes. Whatever happens, the caller gets one answer and the operator one Record.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from aiohttp import web

from backends.interface import Operation
from gateway import ingress, relay
from gateway.decider import Decider
from gateway.dispatcher import Dispatcher, Job, attempt_record
from gateway.frontend import ClientConnection, reply, respond
from gateway.ingress import InferenceRequest
from gateway.keys import Keys, Tenant
from gateway.line import HeldTooLong, Line
from gateway.observe.record import End, Life, Record, Stage, landmarks
from gateway.observe.recorder import Recorder
from gateway.refusal import Refusal, internal, retry_later
from gateway.replyhead import gateway_headers
from gateway.routes import Routes, admit
from gateway.run import Run
from gateway.strictjson import encode
from gateway.upkeep import Upkeep
from policies.facts import Decision, Outcome, Price
from policies.route import Route

log = logging.getLogger("firsttoken")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
OPERATIONS = {operation.value: operation for operation in Operation}
NOT_FOUND = Refusal(404, "There is nothing at this path.", code="unknown_url")


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_body`: bytes of a request. `stream_idle`: s without a byte before a stream is given up."""

    max_body: int
    stream_idle: float


class Proxy:
    """The data port."""

    def __init__(
        self, keys: Keys, routes: Routes, decider: Decider, line: Line, dispatcher: Dispatcher, recorder: Recorder,
        upkeep: Upkeep, limits: Limits,
    ) -> None:  # fmt: skip
        self.keys, self.routes, self.decider, self.line, self.dispatcher = keys, routes, decider, line, dispatcher
        self.recorder, self.upkeep, self.limits = recorder, upkeep, limits
        self.draining = False
        self.gets: dict[str, Handler] = {"/v1/models": self.models, "/health": self.health, "/ready": self.ready}

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Every request of the data port."""
        connection = http.protocol
        assert isinstance(connection, ClientConnection)
        arrival = connection.begin()
        try:
            return await self.dispatch(http, arrival)
        finally:
            connection.end()

    async def dispatch(self, http: web.BaseRequest, arrival: float) -> web.StreamResponse:
        """By path. Unknown paths never get further than this."""
        path = http.raw_path.partition("?")[0]  # as it was sent: no decoding that could hide another path
        operation = OPERATIONS.get(path)
        if operation is not None:
            return await self.infer(http, operation, arrival) if http.method == "POST" else reply(_wrong_method("POST"))
        get = self.gets.get(path)
        if get is None:
            return reply(NOT_FOUND)
        return await get(http) if http.method in ("GET", "HEAD") else reply(_wrong_method("GET"))

    async def infer(self, http: web.BaseRequest, operation: Operation, arrival: float) -> web.StreamResponse:
        """One Record, one answer."""
        with self.recorder.life(arrival) as life:
            life.record.request_id = ingress.request_id(http.headers)
            life.record.operation = operation.name.lower()
            try:
                return await self.live(http, operation, life)
            except HeldTooLong as refusal:
                life.close(Stage.QUEUE, monotonic())
                return self.refuse(refusal, life, End.SHED)
            except Refusal as refusal:
                return self.refuse(refusal, life)
            except Exception:
                log.exception("internal error on request %s", life.record.request_id)
                return self.apologise(http, life)

    async def live(self, http: web.BaseRequest, operation: Operation, life: Life) -> web.StreamResponse:
        """The straight line."""
        tenant = self.keys.tenant(http.headers.get("authorization"))
        raw = life.note(Stage.READ, await ingress.read(http, self.limits.max_body))
        request = life.note(Stage.PARSE, self.parse(operation, raw, http, life))
        wanted = identify(life.record, request, self.routes.match(request.model), tenant)
        estimate = life.note(Stage.ESTIMATE, await self.decider.estimate(request, wanted, tenant))
        route = life.note(Stage.ADMIT, admit(tenant, wanted, request.model))
        decision = life.note(Stage.DECIDE, life.decided(await self.line.decide(request, route, estimate, tenant)))
        refuse_unplaced(decision)
        passthrough = route is self.routes.passthrough
        job = Job(request, route, estimate, decision, life, passthrough)
        run = await self.dispatcher.open(job)
        try:
            strip, idle = strips(request), self.limits.stream_idle
            return await relay.pump(run, http, life, strip_usage=strip, idle=idle, close=self.draining)
        finally:
            settle(run, life.record, self.decider.price(run))
            life.record.prefix = landmarks(estimate.pools[run.attempt.candidate.endpoint.pool].blocks)
            self.upkeep.answered(run, job, raw, tenant.cache_group)

    def parse(self, operation: Operation, raw: bytes, http: web.BaseRequest, life: Life) -> InferenceRequest:
        return ingress.parse(
            operation, raw, http.headers, life.record.arrival, life.record.request_id, self.decider.wanted_headers
        )

    def refuse(self, refusal: Refusal, life: Life, end: End | None = None) -> web.StreamResponse:
        """An error reply, with the same headers as an answer."""
        record = life.record
        record.status = refusal.status
        record.error = refusal.logged
        life.finished(end or end_of(refusal, record.decision), monotonic())
        response = reply(refusal)
        if self.draining:
            response.force_close()
        for line in gateway_headers(life, monotonic()):
            name, _, value = line.partition(": ")
            response.headers[name] = value
        return response

    def apologise(self, http: web.BaseRequest, life: Life) -> web.StreamResponse:
        """Our bug. Where the answer has begun, an unfinished body is the only honest sign left."""
        begun = life.record.ttft is not None
        response = self.refuse(internal(life.record.request_id), life, End.INTERNAL)
        if begun and http.transport is not None:
            http.transport.abort()
        return response

    # -- the small GETs -----------------------------------------------------------------

    async def models(self, http: web.BaseRequest) -> web.StreamResponse:
        """The routes that this key may use, as OpenAI lists models."""
        try:
            tenant = self.keys.tenant(http.headers.get("authorization"))
        except Refusal as refusal:
            return reply(refusal)
        names = [name for name in self.routes.by_name if tenant.may_use(name)]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "firsttoken"} for name in names]
        return respond(200, encode({"object": "list", "data": data}))

    async def health(self, http: web.BaseRequest) -> web.StreamResponse:
        return respond(200, b'{"status":"alive"}')

    async def ready(self, http: web.BaseRequest) -> web.StreamResponse:
        if self.draining:
            return respond(503, b'{"status":"draining"}')
        if not self.decider.any_usable(monotonic()):
            return respond(503, b'{"status":"no usable endpoint"}')
        return respond(200, b'{"status":"ready"}')


def identify(record: Record, request: InferenceRequest, route: Route, tenant: Tenant) -> Route:
    """Labels and budgets of the Record come from config only: no caller can mint a series."""
    record.route, record.workload, record.tenant, record.stream = (
        route.name,
        route.workload,
        tenant.name,
        request.stream,
    )
    record.ttft_budget = route.ttft.budget if route.ttft else None
    record.tpot_budget = route.tpot_budget(request.tpot_budget)
    record.total_budget = route.total.budget if route.total else None
    return route


def refuse_unplaced(decision: Decision) -> None:
    """What the decision did not place is answered at once."""
    if decision.outcome is Outcome.SHED:
        message = f"No tier can meet the time-to-first-token budget now: {decision.reason}."
        raise Refusal(
            429, message, type="rate_limit_error", code="rate_limit_exceeded",
            headers=retry_later(decision.retry_after),
        )  # fmt: skip
    if decision.outcome is Outcome.UNAVAILABLE:
        message = f"No endpoint is usable now: {decision.reason}."
        raise Refusal(503, message, type="server_error", code="unavailable", headers=retry_later(decision.retry_after))
    if decision.outcome is Outcome.UNFIT:
        code = "context_length_exceeded" if "context window" in decision.reason else "no_suitable_tier"
        raise Refusal(400, f"No tier of this route can take the request: {decision.reason}.", code=code)


def end_of(refusal: Refusal, decision: Decision | None) -> End:
    """Whose fault a refusal was."""
    if decision is not None and decision.outcome is Outcome.SHED:
        return End.SHED
    if decision is not None and decision.outcome is Outcome.UNAVAILABLE:
        return End.UNAVAILABLE
    placed = decision is not None and decision.outcome is Outcome.PLACE
    return End.FAILED if placed and refusal.status in (429, *range(500, 600)) else End.REFUSED


def strips(request: InferenceRequest) -> bool:
    """Usage is always asked for upstream; a caller that did not ask must not see it."""
    return request.stream and not request.wants_usage


def settle(run: Run, record: Record, price: Price) -> None:
    """What the winning attempt found out."""
    run.stop_if_open()
    reported = run.reported()
    record.attempts.append(attempt_record(run, record.arrival))
    record.prompt_tokens_reported, record.cached_tokens_reported = reported.prompt_tokens, reported.cached_tokens
    record.engine_ttft, record.engine_queue = reported.engine_ttft, run.tap.times.queue
    record.output_tokens, record.tpot = run.output_tokens, run.tpot()
    prompt = reported.prompt_tokens if reported.prompt_tokens is not None else record.prompt_tokens_estimated or 0
    record.cost_usd = price.of(prompt, run.output_tokens)


def _wrong_method(right: str) -> Refusal:
    return Refusal(405, f"This path takes {right} only.", code="method_not_allowed", headers={"allow": right})
