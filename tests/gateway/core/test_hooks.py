"""Plans: a route holds the hooks that want it, in the order of the parts, for as long as its Runtime is in force."""

from __future__ import annotations

from dataclasses import replace

from backends.interface import Operation
from gateway.config.models import Config
from gateway.core.hooks import NO_DOOR, NO_HOOKS, Ask, Door, DoorPlan, Hooked, Hooks, Plans, RoutePlan
from gateway.runtime import Runtime, build_runtime
from tests.support.gateways import document, pool

RUNTIME = build_runtime(Config.model_validate(document({"small": pool("http://127.0.0.1:9")})))
ROUTE = RUNTIME.routes.all[0]


def first(ask: Ask) -> None: ...


def second(ask: Ask) -> None: ...


class OfChats(Hooked):
    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(placed=first) if plan.operation is Operation.CHAT else NO_HOOKS


class OfAll(Hooked):
    def at_door(self, runtime: Runtime) -> Door:
        return Door(parsed=first) if runtime is RUNTIME else NO_DOOR

    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(placed=second)


def test_a_plan_holds_the_hooks_that_want_it_in_the_order_of_the_parts() -> None:
    plans = Plans([OfAll(), OfChats()])
    assert plans.of(RUNTIME, ROUTE, Operation.CHAT).placed == (second, first)
    assert plans.of(RUNTIME, ROUTE, Operation.COMPLETION).placed == (second,)
    bare = Plans().of(RUNTIME, ROUTE, Operation.CHAT)
    assert bare == RoutePlan(RUNTIME, ROUTE, Operation.CHAT, bare.fitted, bare.servers)


def test_a_plan_is_made_once_for_a_runtime() -> None:
    """So are the hooks of every request."""
    plans, next_one = Plans([OfAll()]), replace(RUNTIME)
    made = plans.of(RUNTIME, ROUTE, Operation.CHAT)
    assert plans.of(RUNTIME, ROUTE, Operation.CHAT) is made
    assert plans.door(RUNTIME) == DoorPlan(parsed=(first,))
    again = plans.of(next_one, ROUTE, Operation.CHAT)
    assert (again is made, again.runtime is next_one) == (False, True)
    assert plans.door(next_one) == DoorPlan()


def test_a_plan_of_a_route_that_a_runtime_may_not_have_is_kept_for_nobody() -> None:
    """A request that waited through a reload has the route of before."""
    plans, next_one = Plans([OfAll()]), replace(RUNTIME)
    made = plans.made(next_one, ROUTE, Operation.CHAT)
    assert (made.runtime is next_one, made.placed) == (True, (second,))
    assert plans.of(next_one, ROUTE, Operation.CHAT) is not made
