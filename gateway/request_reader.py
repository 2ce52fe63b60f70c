"""Steps of a request before the queue: key, route, stored state, estimate."""

from __future__ import annotations

from dataclasses import dataclass

from backends.interface import Operation
from gateway.admission.auth import ANYONE, Tenant
from gateway.admission.caller_keys import NO_KEY, caller_key, key_missing
from gateway.admission.route_table import RoutedName
from gateway.api import responses_dialect, threads
from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import OperationFit
from gateway.api.state_ids import open_request
from gateway.decider import Decider
from gateway.downstream.http_request import HttpRequest, caller_address
from gateway.runtime import Runtime, RuntimeHolder
from policies.routes.route import Route
from policies.types import PromptEstimate

STATEFUL = frozenset({*responses_dialect.OPERATIONS, Operation.MESSAGES})  # may refer to state of an endpoint


@dataclass(slots=True, eq=False)
class RequestReader:
    """`operations`: translates bodies for pools of other dialects."""

    runtime: RuntimeHolder
    decider: Decider
    operations: OperationFit

    def authorize(self, http: HttpRequest) -> Tenant:
        """Raises ApiError for a caller without right: a web page where no key is required, or a wrong key."""
        runtime = self.runtime.current
        if runtime.same_origin is not None:
            runtime.same_origin.check(http.headers, http.writer.transport)
        return runtime.keys.tenant(http.headers) if runtime.keys.required else ANYONE

    def caller(self, http: HttpRequest, tenant: Tenant) -> str:
        return caller_address(http.writer.transport) if tenant is ANYONE else tenant.name

    async def parse(
        self, http: HttpRequest, operation: Operation, request_id: str, runtime: Runtime
    ) -> InferenceRequest:
        """Raises ApiError."""
        if http.model:
            http.body = await self.decider.with_model(http.body, http.model)
        wanted = runtime.wanted_headers
        return await self.decider.parse(operation, http.body, http.headers, http.arrival, request_id, wanted)

    def named_route(self, http: HttpRequest, request: InferenceRequest, runtime: Runtime, tenant: Tenant) -> RoutedName:
        """The route of the caller's name. Raises ApiError (404) where there is none that the key may use: before the
        timeline knows the route, whose name would be in the headers of the refusal."""
        named = runtime.routes.match(request.model, tenant, http.headers)
        if tenant.routes is not None:
            runtime.routes.admit(tenant, named.route, request.model, http.headers)
        return named

    async def open_state(self, request: InferenceRequest, runtime: Runtime, route: Route, tenant: Tenant) -> None:
        """Find the endpoint with the state that a request of a STATEFUL operation refers to. Raises ApiError for state
        that is unknown, and for a thread that the route cannot keep."""
        has_thread = threads.has_thread(request)
        if request.operation not in responses_dialect.OPERATIONS and not has_thread:
            return
        if has_thread and not runtime.keeps_threads(route):
            raise threads.unsupported()
        opened = threads.open_thread if has_thread else open_request
        request.state_ids = runtime.state_ids(tenant)
        request.body, request.pinned = await self.decider.off_loop(
            request.size, opened, request.body, request.state_ids, runtime.endpoints(route)
        )

    async def estimate(
        self,
        http: HttpRequest,
        request: InferenceRequest,
        runtime: Runtime,
        route: Route,
        tenant: Tenant,
    ) -> PromptEstimate:
        """Translate the body for pools of other dialects; estimate the prompt for every pool."""
        if request.operation not in runtime.native[route.name] or self.operations.lacking:
            await self.decider.off_loop(request.size, self.operations.fit, request, route, runtime.operations)
        if runtime.caller_keys:
            self._fit_caller_key(http, request, runtime, route, tenant)
        return await self.decider.estimate(request, route, tenant)

    def _fit_caller_key(
        self, http: HttpRequest, request: InferenceRequest, runtime: Runtime, route: Route, tenant: Tenant
    ) -> None:
        """Keep the caches of the caller's own key apart; without one, leave out the pools that take it. Raises ApiError
        (401) where no other pool is left."""
        taking, key = runtime.caller_keys.intersection(route.pools), caller_key(http.headers, runtime.keys)
        if key is not None:
            request.own_caches = dict.fromkeys(taking, key.cache_group(tenant.cache_group))
        elif taking:
            if taking.issuperset(route.pools):
                raise key_missing(runtime.keys)
            request.unfit = {**request.unfit, **dict.fromkeys(taking, NO_KEY)}
