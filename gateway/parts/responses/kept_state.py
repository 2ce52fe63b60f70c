"""Routes requests that refer to state kept by an endpoint: responses, conversations, message threads.

Such a request goes to the endpoint with the state, under the backend's own ids; ids in the answer are sealed. Encrypted
reasoning returns to the pool of its maker, but does not pin a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from backends.http.connection_pool import BackendAddress
from backends.interface import Operation
from gateway.admission.auth import Tenant
from gateway.api.dialects import RESPONSES_OPERATIONS
from gateway.config.pool_section import PoolSection
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.parts.responses.state_answer import StateAnswer
from gateway.parts.responses.state_ids import Home, StateIds, open_request, seal_key
from gateway.parts.responses.threads import ThreadAnswer, has_thread, not_found, open_thread, unsupported
from gateway.runtime import Runtime
from gateway.wiring import Core
from policies.routes.route import Route
from policies.types import Decision


class KeptState(Part):
    def __init__(self, core: Core) -> None:
        self._decider = core.decider

    def on(self, plan: RoutePlan) -> Hooks:
        if plan.operation in RESPONSES_OPERATIONS:
            return Hooks(read=self.open_responses)
        if plan.operation is not Operation.MESSAGES:
            return NO_HOOKS
        if not keeps_threads(plan.runtime, plan.route):
            return Hooks(read=refuse_thread_at_once, fit=refuse_thread)
        return Hooks(read=self.open_thread, unplaced=begin_anew)

    async def open_responses(self, ask: Ask) -> None:
        """Raises ApiError for state that is unknown."""
        request, ids = ask.request, state_ids(ask.runtime, ask.tenant)
        ask.rewrite = partial(StateAnswer, ids)
        opened = await self._decider.off_loop(request.size, open_request, request.body, ids, homes(ask))
        request.body, request.pinned = opened.body, opened.pinned
        request.readers, request.has_turn_state = opened.readers, opened.has_turns

    async def open_thread(self, ask: Ask) -> None:
        """Raises ApiError for a thread that is unknown."""
        request = ask.request
        if not has_thread(request):
            return
        ids = state_ids(ask.runtime, ask.tenant)
        ask.rewrite = partial(ThreadAnswer, ids)
        request.body, request.pinned = await self._decider.off_loop(
            request.size, open_thread, request.body, ids, ask.runtime.endpoints(ask.route)
        )


def homes(ask: Ask) -> Mapping[str, Home]:
    """By id of an endpoint that the route may use."""
    runtime, route = ask.runtime, ask.route
    pools = {one.id: pool for pool in route.pools for one in runtime.pools[pool].endpoints}
    made = {pool: runtime.maker(ask.named.model, pool) for pool in route.pools}
    return {id: Home(pools[id], made[pools[id]]) for id in runtime.endpoints(route)}


async def refuse_thread_at_once(ask: Ask) -> None:
    """Before the body is translated and comments may begin the answer. Raises ApiError."""
    refuse_thread(ask)


def refuse_thread(ask: Ask) -> None:
    """Raises ApiError for a thread, which the route cannot keep."""
    if has_thread(ask.request):
        raise unsupported()


def begin_anew(ask: Ask, decision: Decision) -> bool:
    """Raises ApiError after which the client begins the thread anew, at another endpoint."""
    if ask.request.pinned and has_thread(ask.request):
        raise not_found()
    return False


def state_ids(runtime: Runtime, tenant: Tenant) -> StateIds:
    """Seals and opens the tenant's ids of state at backends."""
    secret = runtime.config.state.cache_secret
    return StateIds(seal_key(secret.get_secret_value().encode() if secret else tenant.digest, tenant.name))


def keeps_threads(runtime: Runtime, route: Route) -> bool:
    """All pools of the route are the API that keeps message threads, and hide no count of cached tokens."""
    pools = [runtime.config.pools[pool] for pool in route.pools]
    return runtime.masked_pools.isdisjoint(route.pools) and all(map(is_anthropics_own, pools))


def is_anthropics_own(section: PoolSection) -> bool:
    """True for Anthropic's own API, which refuses unknown members; other servers of the dialect ignore such members."""
    hosts = (f".{BackendAddress.parse(url).host}" for url in section.urls)
    return section.backend == "anthropic" and all(host.endswith(".anthropic.com") for host in hosts)
