"""The door for one request: hooks of parts, in the order of a request, and the plan of a route that holds them.

Rules:
- A plan is made once for a route and an operation under a Runtime, and holds the hooks that want it. A request pays for
  these and for no other part: there is no flag on its path.
- Hooks of one kind run in the order of the parts. A hook raises ApiError to refuse the request.
- A hook reads the Ask and sets in it what its own comment names, nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from backends.interface import Operation
from gateway.admission.auth import ANYONE, Tenant
from gateway.admission.route_table import RoutedName
from gateway.api.inference_request import InferenceRequest
from gateway.downstream.http_request import HttpRequest
from gateway.observe.timeline import RequestTimeline
from gateway.runtime import Runtime
from gateway.upstream.answer_hooks import Judge, Recover
from gateway.upstream.race import Race
from gateway.upstream.relay import Relay
from gateway.upstream.upstream import Upstream
from policies.routes.route import Route
from policies.types import Decision, PromptEstimate


@dataclass(slots=True, eq=False)
class Ask:
    """A request on its way: each step sets what it has found, for all steps after it. `runtime` is kept to the end,
    unless a reload finds the request without a place."""

    http: HttpRequest
    operation: Operation
    timeline: RequestTimeline
    runtime: Runtime
    tenant: Tenant = ANYONE
    request: InferenceRequest = field(init=False)  # parsed
    named: RoutedName = field(init=False)  # its route
    plan: RoutePlan = field(init=False)  # of that route
    estimate: PromptEstimate = field(init=False)
    relay: Relay | None = None  # the caller's socket, where a part has put its own in place

    @property
    def route(self) -> Route:
        return self.plan.route


@dataclass(frozen=True, slots=True)
class Hooks:
    """Of a part, for the requests of a plan. None: not wanted."""

    # The request is parsed and has its route. May change `request` and the body.
    read: Callable[[Ask], Awaitable[None]] | None = None
    # Bodies for pools of other dialects are made, once more after a reload. May set `unfit` and `cache_groups` of the
    # request.
    fit: Callable[[Ask], None] | None = None
    # The key is within its limits. Answers the request itself: True. May set `relay`.
    answer: Callable[[Ask], Awaitable[bool]] | None = None
    # The decision has placed the request nowhere. Answers the request itself: True. May raise a refusal of its own.
    unplaced: Callable[[Ask, Decision], bool] | None = None
    # The request has a place, and nothing is sent yet.
    placed: Callable[[Ask], None] | None = None
    # The upstreams as a caller uses them.
    sends: Callable[[HttpRequest, Mapping[str, Upstream]], Mapping[str, Upstream]] | None = None
    # Judges a whole answer, as the caller would read it: its shortcoming, for which that of another pool is preferred.
    judge: Judge | None = None
    # Keeps the answer of a request from its first token on, and has others write the rest where it breaks.
    recover: Recover | None = None
    # The race for its answer is over, however it ended.
    ended: Callable[[Ask, Race], None] | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A route as requests of one operation use it."""

    runtime: Runtime
    route: Route
    operation: Operation
    read: tuple[Callable[[Ask], Awaitable[None]], ...] = ()
    fit: tuple[Callable[[Ask], None], ...] = ()
    answer: tuple[Callable[[Ask], Awaitable[bool]], ...] = ()
    unplaced: tuple[Callable[[Ask, Decision], bool], ...] = ()
    placed: tuple[Callable[[Ask], None], ...] = ()
    sends: tuple[Callable[[HttpRequest, Mapping[str, Upstream]], Mapping[str, Upstream]], ...] = ()
    judge: tuple[Judge, ...] = ()
    recover: tuple[Recover, ...] = ()
    ended: tuple[Callable[[Ask, Race], None], ...] = ()


On = Callable[[RoutePlan], Hooks]  # of a part: the hooks that a plan, which has none yet, gets from it


class Plans:
    """The plans of the Runtime that was asked for last, each made at its first request: routes may be thousands."""

    def __init__(self, parts: Iterable[On] = ()) -> None:
        self._parts = tuple(parts)
        self._runtime: Runtime | None = None
        self._known: dict[tuple[str, Operation], RoutePlan] = {}

    def of(self, runtime: Runtime, route: Route, operation: Operation) -> RoutePlan:
        if runtime is not self._runtime:
            self._runtime, self._known = runtime, {}
        key = route.name, operation
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._made(RoutePlan(runtime, route, operation))
        return known

    def _made(self, bare: RoutePlan) -> RoutePlan:
        wanted = [on(bare) for on in self._parts]
        chains = {each.name: tuple(filter(None, (getattr(hooks, each.name) for hooks in wanted))) for each in _KINDS}
        return RoutePlan(bare.runtime, bare.route, bare.operation, **chains)


_KINDS = fields(Hooks)
