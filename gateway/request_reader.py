"""Steps of a request before the queue: key, body, route, estimate."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admission.auth import ANYONE, Tenant
from gateway.api.operation_fit import OperationFit
from gateway.core.hooks import Ask, Plans
from gateway.decider import Decider
from gateway.downstream.http_request import HttpRequest, caller_address
from gateway.runtime import RuntimeHolder


@dataclass(slots=True, eq=False)
class RequestReader:
    """`operations`: translates bodies for pools of other dialects."""

    runtime: RuntimeHolder
    decider: Decider
    operations: OperationFit
    plans: Plans = field(default_factory=Plans)

    def authorize(self, http: HttpRequest) -> Tenant:
        """Raises ApiError for a caller without right: a web page where no key is required, or a wrong key."""
        runtime = self.runtime.current
        if runtime.same_origin is not None:
            runtime.same_origin.check(http.headers, http.writer.transport)
        return runtime.keys.tenant(http.headers) if runtime.keys.required else ANYONE

    def caller(self, http: HttpRequest, tenant: Tenant) -> str:
        return caller_address(http.writer.transport) if tenant is ANYONE else tenant.name

    async def parse(self, ask: Ask) -> None:
        """Raises ApiError."""
        http = ask.http
        if http.model:
            http.body = await self.decider.with_model(http.body, http.model)
        wanted, request_id = ask.runtime.wanted_headers, ask.timeline.record.request_id
        ask.request = await self.decider.parse(ask.operation, http.body, http.headers, http.arrival, request_id, wanted)

    def find_route(self, ask: Ask) -> None:
        """The route of the caller's name. Raises ApiError (404) where there is none that the key may use: before the
        timeline knows the route, whose name would be in the headers of the refusal."""
        routes, headers, model = ask.runtime.routes, ask.http.headers, ask.request.model
        ask.named = routes.match(model, ask.tenant, headers)
        if ask.tenant.routes is not None:
            routes.admit(ask.tenant, ask.named.route, model, headers)
        ask.plan = self.plans.of(ask.runtime, ask.named.route, ask.operation)

    async def estimate(self, ask: Ask) -> None:
        """Translate the body for pools of other dialects; estimate the prompt for every pool."""
        request, route, runtime, model = ask.request, ask.plan.route, ask.runtime, ask.named.model
        if model or not self.operations.is_plain(request, ask.plan.fitted, ask.http.body):
            work = self.operations.work(request, route, runtime.servers(model), ask.http.body)
            if work is not None:
                await self.decider.off_loop(request.size, work)
        for fit in ask.plan.fit:
            fit(ask)
        ask.estimate = await self.decider.estimate(request, route, ask.tenant)
        ask.timeline.estimated(request, route, ask.estimate)
