"""Rules of a route that change prompts so that their prefix stays the same from turn to turn (`routes.R.repair`).

Rules:
- Nothing is changed unless the route names the rule: `policies.prefix_doctor.break_class.RepairRule`.
- `strip_cch` removes Claude Code's line (`gateway.tokenize.prefix_breakers`) wherever a line of the system prompt
  begins with it, towards servers that read the line too.
- `sort_tools` sorts tool definitions by name: the same set, each as it was written. A `cache_control` stays at its
  place in the list, as it says how much of the list is cached. Where it would come to a tool with `defer_loading`,
  which the API refuses, the list is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec import Raw

from backends.interface import Operation
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.strict_json import MAX_DEPTH, UNREADABLE, element, encode, members
from gateway.tokenize.prefix_breakers import ANYWHERE, without_breakers
from gateway.wiring import Core
from policies.prefix_doctor.break_class import RepairRule

_MARK = "cache_control"


class Repairs(Part):
    def __init__(self, core: Core) -> None:
        self._decider = core.decider

    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(read=self.repair) if plan.route.repair else NO_HOOKS

    async def repair(self, ask: Ask) -> None:
        """Change the body by the rules of the route, and parse it again where one did."""
        request, http = ask.request, ask.http
        raw, done = await self._decider.off_loop(request.size, repaired, ask.operation, http.body, ask.route.repair)
        if not done:
            return
        http.body, wanted = raw, frozenset(request.headers)
        ask.request = found = await self._decider.parse(
            ask.operation, raw, http.headers, request.arrival, request.request_id, wanted
        )
        found.caller = request.caller
        found.prompt_changes = tuple(dict.fromkeys((*found.prompt_changes, *done)))
        ask.timeline.prompt_changed(found.prompt_changes)


def repaired(operation: Operation, raw: bytes, rules: Iterable[RepairRule]) -> tuple[bytes, tuple[str, ...]]:
    """The body after the rules, and the names of the rules that changed the body."""
    done = list[str]()
    for rule in RepairRule:
        if rule in rules and (changed := _REPAIRS[rule](operation, raw)) is not raw:
            raw = changed
            done.append(rule.value)
    return raw, tuple(done)


def _sort_tools(operation: Operation, raw: bytes) -> bytes:
    try:
        body = members(raw)
        tools = body.get("tools")
        if type(tools) is not list:
            return raw
        ordered = _in_order(tools)
    except UNREADABLE:
        return raw
    return raw if ordered is tools else encode({**body, "tools": ordered})


def _in_order(tools: list[Any]) -> list[Any]:
    """`tools` itself where these are sorted, or hold what is no tool."""
    found = [element(tool, MAX_DEPTH - 2) if isinstance(tool, Raw) else tool for tool in tools]
    if not all(isinstance(tool, dict) for tool in found):
        return tools
    places = sorted(range(len(found)), key=lambda i: _name(found[i]))
    if places == list(range(len(found))):
        return tools
    if not any(_MARK in tool for tool in found):
        return [tools[i] for i in places]
    if any(_MARK in tool and found[i].get("defer_loading") for tool, i in zip(found, places, strict=True)):
        return tools
    unmarked = [{name: value for name, value in found[i].items() if name != _MARK} for i in places]
    return [
        {**tool, _MARK: marked[_MARK]} if _MARK in marked else tool
        for tool, marked in zip(unmarked, found, strict=True)
    ]


def _name(tool: Mapping[str, Any]) -> tuple[str, str]:
    """Of a function in each dialect; tools of a provider have a type alone. Sorting keeps the order of equal names."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or ""), str(tool.get("type") or "")


_REPAIRS: Mapping[RepairRule, Callable[[Operation, bytes], bytes]] = {
    RepairRule.STRIP_CCH: partial(without_breakers, lines=ANYWHERE),
    RepairRule.SORT_TOOLS: _sort_tools,
}
