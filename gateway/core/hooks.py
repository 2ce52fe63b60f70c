"""The door for one request: hooks of parts, in the order of a request, and the plan of a route that holds them.

Rules:
- A plan is built once per route, operation and Runtime, and holds only the hooks of parts concerned: other parts add no
  cost to a request.
- Hooks of one kind run in the order of the parts. A hook raises ApiError to refuse the request.
- A hook reads the Ask, and sets only the fields named in the hook's comment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from backends.fitting.fit import Concerns
from backends.interface import Operation
from backends.translation.reply_translation import RewrittenAnswer
from gateway.admission.auth import ANYONE, Tenant
from gateway.admission.route_table import RoutedName
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import NO_SERVERS, Servers, fitted_signs
from gateway.downstream.http_request import HttpRequest
from gateway.observe.timeline import RequestTimeline
from gateway.runtime import Runtime
from gateway.upstream.answer import Relay
from gateway.upstream.answer_hooks import Judge, Mend, Recover
from gateway.upstream.race import Race
from gateway.upstream.routed_request import Upstream
from policies.routes.route import Route
from policies.types import Decision, PromptEstimate


@dataclass(slots=True, eq=False)
class Ask:
    """A request in progress: each step sets its results for later steps. `runtime` stays the same to the end, unless a
    reload finds the request not yet placed."""

    http: HttpRequest
    operation: Operation
    timeline: RequestTimeline
    runtime: Runtime
    tenant: Tenant = ANYONE
    request: InferenceRequest = field(init=False)  # parsed
    named: RoutedName = field(init=False)  # its route
    plan: RoutePlan = field(init=False)  # of that route
    estimate: PromptEstimate = field(init=False)
    rewrite: Callable[[str], RewrittenAnswer] | None = None  # of the answer, by the endpoint that holds its state
    relay: Relay | None = None  # replacement for the caller's socket, set by a part

    @property
    def route(self) -> Route:
        return self.plan.route


@dataclass(frozen=True, slots=True)
class Door:
    """Hooks of a part for every request under a Runtime, before its route is known. None: not wanted."""

    # The head of a request with a large body has come: the reason to refuse it.
    check: Callable[[Tenant], ApiError | None] | None = None
    # The key is known, or a fault will refuse the request.
    enter: Callable[[HttpRequest, Tenant, RequestTimeline], None] | None = None
    # As `enter`, for requests other than inference.
    aside: Callable[[HttpRequest, Tenant, RequestTimeline], Awaitable[None]] | None = None
    # The body is parsed.
    parsed: Callable[[Ask], None] | None = None


@dataclass(frozen=True, slots=True)
class Hooks:
    """Hooks of a part for the requests of a plan. None: not wanted."""

    # The request is parsed and has its route. May change `request` and the body, and set `rewrite`.
    read: Callable[[Ask], Awaitable[None]] | None = None
    # Bodies for pools of other dialects are built, and rebuilt after a reload. May set `unfit` and `cache_groups` of
    # the request.
    fit: Callable[[Ask], None] | None = None
    # The prompt is estimated. May set `estimate`.
    admit: Callable[[Ask], Awaitable[None]] | None = None
    # The key may send the request. Answers it itself: True. May set `relay`.
    answer: Callable[[Ask], Awaitable[bool]] | None = None
    # The decision has placed the request nowhere. Answers the request itself: True. May raise a refusal of its own.
    unplaced: Callable[[Ask, Decision], bool] | None = None
    # The request has a place, and nothing is sent yet.
    placed: Callable[[Ask], None] | None = None
    # The upstreams as a caller uses them.
    sends: Callable[[HttpRequest, Mapping[str, Upstream]], Mapping[str, Upstream]] | None = None
    # Judges a whole answer: for an objection another pool is asked.
    judge: Judge | None = None
    # Records an answer from the first token on, and continues a broken answer at another endpoint.
    recover: Recover | None = None
    # A server refuses the request (400, 422). Finds another form of the body for a retry at the same server.
    mend: Mend | None = None
    # The race of attempts is over, with any outcome.
    ended: Callable[[Ask, Race], None] | None = None


NO_DOOR, NO_HOOKS = Door(), Hooks()


@dataclass(frozen=True, slots=True)
class DoorPlan:
    """The hooks of all parts for every request."""

    check: tuple[Callable[[Tenant], ApiError | None], ...] = ()
    enter: tuple[Callable[[HttpRequest, Tenant, RequestTimeline], None], ...] = ()
    aside: tuple[Callable[[HttpRequest, Tenant, RequestTimeline], Awaitable[None]], ...] = ()
    parsed: tuple[Callable[[Ask], None], ...] = ()


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A route for requests of one operation. `fitted`: signs of bodies that a pool may need changed, where callers
    do not name the model; None: a pool always needs a changed body. `servers`: of all pools, for requests of the pools'
    own models."""

    runtime: Runtime
    route: Route
    operation: Operation
    fitted: Concerns | None = None
    servers: Servers = NO_SERVERS
    read: tuple[Callable[[Ask], Awaitable[None]], ...] = ()
    fit: tuple[Callable[[Ask], None], ...] = ()
    admit: tuple[Callable[[Ask], Awaitable[None]], ...] = ()
    answer: tuple[Callable[[Ask], Awaitable[bool]], ...] = ()
    unplaced: tuple[Callable[[Ask, Decision], bool], ...] = ()
    placed: tuple[Callable[[Ask], None], ...] = ()
    sends: tuple[Callable[[HttpRequest, Mapping[str, Upstream]], Mapping[str, Upstream]], ...] = ()
    judge: tuple[Judge, ...] = ()
    recover: tuple[Recover, ...] = ()
    mend: tuple[Mend, ...] = ()
    ended: tuple[Callable[[Ask, Race], None], ...] = ()


@dataclass(frozen=True, slots=True)
class SidePath:
    """A path for requests other than inference. `operation`: label in Records; `answer` may raise ApiError."""

    methods: Sequence[str]
    operation: str
    answer: Callable[[HttpRequest, Tenant, RequestTimeline], Awaitable[None]]


class SocketPath(Protocol):
    """The WebSockets of a path."""

    def precheck(self, http: HttpRequest) -> ApiError | None:
        """The reason to refuse a handshake."""

    async def serve(self, http: HttpRequest) -> None:
        """Serve a WebSocket until closed. Raises ApiError before the handshake."""


class Hooked:
    """A part with hooks for requests, or with paths of its own."""

    side_paths: Mapping[str, SidePath] = {}
    socket_paths: Mapping[str, SocketPath] = {}

    def at_door(self, runtime: Runtime) -> Door:
        return NO_DOOR

    def on(self, plan: RoutePlan) -> Hooks:
        """`plan`: still without hooks."""
        return NO_HOOKS


class Plans:
    """The plans of the Runtime that was asked for last, each made at its first request: routes may be thousands."""

    def __init__(self, parts: Sequence[Hooked] = ()) -> None:
        self._parts = parts
        self._runtime: Runtime | None = None
        self._door = DoorPlan()
        self._known: dict[tuple[str, Operation], RoutePlan] = {}

    def attach(self, parts: Sequence[Hooked]) -> None:
        self._parts, self._runtime = parts, None

    def door(self, runtime: Runtime) -> DoorPlan:
        if runtime is not self._runtime:
            self._follow(runtime)
        return self._door

    def of(self, runtime: Runtime, route: Route, operation: Operation) -> RoutePlan:
        if runtime is not self._runtime:
            self._follow(runtime)
        key = route.name, operation
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self.made(runtime, route, operation)
        return known

    def made(self, runtime: Runtime, route: Route, operation: Operation) -> RoutePlan:
        """Build a plan without caching: the Runtime may have another form of the route."""
        servers = runtime.servers()
        bare = RoutePlan(runtime, route, operation, fitted_signs(operation, route, servers), servers)
        return replace(bare, **_chains([part.on(bare) for part in self._parts]))

    def _follow(self, runtime: Runtime) -> None:
        self._runtime, self._known = runtime, {}
        self._door = DoorPlan(**_chains([part.at_door(runtime) for part in self._parts]))


def _chains(wanted: Sequence[Door] | Sequence[Hooks]) -> dict[str, Any]:
    """By kind, the hooks that are wanted."""
    kinds = [each.name for each in fields(wanted[0])] if wanted else ()
    return {kind: tuple(filter(None, [getattr(hooks, kind) for hooks in wanted])) for kind in kinds}
