"""Plans: a route holds the hooks that want it, in the order of the parts, for as long as its Runtime is in force."""

from __future__ import annotations

from dataclasses import replace

from backends.interface import Operation
from gateway.config.models import Config
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, Plans, RoutePlan
from gateway.runtime import build_runtime
from tests.support.gateways import document, pool

RUNTIME = build_runtime(Config.model_validate(document({"small": pool("http://127.0.0.1:9")})))
ROUTE = RUNTIME.routes.all[0]


def first(ask: Ask) -> None: ...


def second(ask: Ask) -> None: ...


def of_chats(plan: RoutePlan) -> Hooks:
    return Hooks(placed=first) if plan.operation is Operation.CHAT else NO_HOOKS


def of_all(plan: RoutePlan) -> Hooks:
    return Hooks(placed=second)


def test_a_plan_holds_the_hooks_that_want_it_in_the_order_of_the_parts() -> None:
    plans = Plans([of_all, of_chats])
    assert plans.of(RUNTIME, ROUTE, Operation.CHAT).placed == (second, first)
    assert plans.of(RUNTIME, ROUTE, Operation.COMPLETION).placed == (second,)
    assert Plans().of(RUNTIME, ROUTE, Operation.CHAT) == RoutePlan(RUNTIME, ROUTE, Operation.CHAT)


def test_a_plan_is_made_once_for_a_runtime() -> None:
    plans, next_one = Plans([of_all]), replace(RUNTIME)
    made = plans.of(RUNTIME, ROUTE, Operation.CHAT)
    assert plans.of(RUNTIME, ROUTE, Operation.CHAT) is made
    again = plans.of(next_one, ROUTE, Operation.CHAT)
    assert (again is made, again.runtime is next_one) == (False, True)
