"""Budgets of a configuration against the profile in `state.dir`, which a gateway or `probe` has saved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from gateway.cli.live.live_check import PROMPT_TOKENS
from gateway.cli.live.live_findings import infeasible
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.config.notes import duration
from gateway.fleet.learned_keeper import LearnedKeeper, StateFile
from gateway.runtime import RuntimeHolder, build_runtime
from policies.fleet.fleet import Fleet
from policies.routes.route import Route
from policies.types import MEDIAN, Load


@dataclass(frozen=True, slots=True)
class KnownEndpoint:
    """Seconds at rest: median TTFT of a short prompt, and time per token of an answer alone."""

    pool: str
    id: str
    ttft: float
    tpot: float

    def whole(self, tokens: float) -> float:
        """Seconds of an answer of so many tokens."""
        return self.ttft + tokens * self.tpot


def check_budgets(config: Config) -> list[str]:
    """Notes on `tpot` and `total` budgets that no tier keeps, by the times of idle endpoints and the usual length of
    the route's answers. Raises ConfigError where a budget is below the idle TTFT, for a short prompt, of the best
    endpoint of its route.

    Silent where no profile is known of a pool, or one of too few requests.
    """
    fleet = Fleet(config.fleet())
    known = asyncio.run(_known(config, fleet))
    best = dict[str, tuple[float, str]]()
    for each in known:
        best[each.pool] = min(best.get(each.pool, (each.ttft, each.id)), (each.ttft, each.id))
    if faults := [found.line for found in infeasible(config, best)]:
        raise ConfigError(faults)
    return [line for route in config.all_routes if best.keys() >= {*route.pools} for line in _lost(route, known, fleet)]


async def _known(config: Config, fleet: Fleet) -> list[KnownEndpoint]:
    """Endpoints of which enough is known."""
    assert config.state.dir is not None
    runtime, now = build_runtime(config), monotonic()
    await LearnedKeeper(StateFile(config.state.dir), fleet, RuntimeHolder(runtime)).restore()
    forecasts = {
        endpoint: fleet.view.forecast(endpoint, Load(), PROMPT_TOKENS, 0, now)
        for pool in runtime.pools.values()
        for endpoint in pool.endpoints
    }
    return [
        KnownEndpoint(endpoint.pool, endpoint.id, forecast.p50, fleet.view.statistics(endpoint.id, now).tpot)
        for endpoint, forecast in forecasts.items()
        if forecast.trained
    ]


def _lost(route: Route, known: Sequence[KnownEndpoint], fleet: Fleet) -> Iterator[str]:
    """Notes on the promises of a route that none of its endpoints keeps."""
    able = [each for each in known if each.pool in route.pools]
    fastest = min(able, key=lambda each: each.tpot)
    if route.tpot is not None and fastest.tpot > route.tpot.budget:
        yield (
            f"note: no tier keeps the tpot of route {route.name}: the fastest endpoint, {fastest.id}, has needed"
            f" {duration(round(fastest.tpot, 4))} per token, and the budget is {duration(route.tpot.budget)}"
        )
    lengths = fleet.answer_lengths.quantiles(route.name, route.output_cap(None))
    if route.total is None or not lengths:
        return
    tokens = lengths[MEDIAN]
    soonest = min(able, key=lambda each: each.whole(tokens))
    if soonest.whole(tokens) > route.total.budget:
        yield (
            f"note: no tier keeps the total of route {route.name}: half of its answers have more than {tokens:.0f}"
            f" tokens, which take {duration(round(soonest.whole(tokens), 1))} at {soonest.id}, the soonest, and the"
            f" budget is {duration(route.total.budget)}"
        )
