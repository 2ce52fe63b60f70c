"""Changes of a scenario, as `--what-if` names them.

main+1           one more engine in the pool, as fast as the pool's last one
chat.ttft=2s     another TTFT budget, which the results are scored by too
chat.first=large another pool first
chat.repair=uuid the log without breaks of prefixes of this class, or of any: chat.repair=all
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from gateway.config.config_errors import did_you_mean
from gateway.records.log_entries import ChosenBreaks
from lab.replay.sim_fleet import Scenario
from policies.prefix_doctor.break_class import BreakClass
from policies.routes.route import Route, seconds
from policies.types import Endpoint

MORE = re.compile(r"(?P<pool>[^=]+)\+(?P<count>[1-9]\d{0,2})")
EVERY = "all"  # classes of breaks
FORMS = "POOL+N, ROUTE.ttft=TIME, ROUTE.first=POOL or ROUTE.repair=CLASS"
Found = TypeVar("Found")
CHANGE = re.compile(r"(?P<route>[^=]+)\.(?P<what>ttft|first|repair)=(?P<value>.+)")


def changed(scenario: Scenario, text: str) -> Scenario:
    """Raises ValueError, which names the mistake."""
    if (found := MORE.fullmatch(text)) is not None:
        return _with_more(scenario, found["pool"], int(found["count"]))
    if (found := CHANGE.fullmatch(text)) is None:
        raise ValueError(f"write {FORMS}, such as main+1 or chat.ttft=2s")
    route = _named(scenario.routes, found["route"], "route")
    value = found["value"]
    if found["what"] == "repair":
        return replace(scenario, repaired=_breaks(route, value))
    new = _with_budget(route, value) if found["what"] == "ttft" else _with_first(route, value)
    return replace(scenario, routes={**scenario.routes, route.name: new})


def _with_more(scenario: Scenario, name: str, count: int) -> Scenario:
    pools = {pool.name: pool for pool in scenario.pools}
    pool = _named(pools, name, "pool")
    last = pool.endpoints[-1]
    added = [Endpoint(f"{name}/more-{number}", name, last.locality) for number in range(1, count + 1)]
    pools[name] = replace(pool, endpoints=(*pool.endpoints, *added))
    profiles = {**scenario.profiles, **{each.id: scenario.profiles[last.id] for each in added}}
    return replace(scenario, pools=tuple(pools.values()), profiles=profiles)


def _with_budget(route: Route, text: str) -> Route:
    if route.ttft is None:
        raise ValueError(f"route {route.name} has no TTFT budget")
    return route.model_copy(update={"ttft": route.ttft.model_copy(update={"budget": seconds(text)})})


def _with_first(route: Route, pool: str) -> Route:
    tiers = {tier.pool: tier for tier in route.tiers}
    first = _named(tiers, pool, f"pool of route {route.name}")
    return route.model_copy(update={"tiers": (first, *(tier for tier in route.tiers if tier is not first))})


def _breaks(route: Route, text: str) -> ChosenBreaks:
    if text == EVERY:
        return ChosenBreaks(route.name)
    return ChosenBreaks(route.name, _named({cls.value: cls for cls in BreakClass}, text, "class of breaks"))


def _named(known: Mapping[str, Found], name: str, kind: str) -> Found:
    if name not in known:
        raise ValueError(f"no {kind} '{name}'{did_you_mean(name, known)}")
    return known[name]
