"""Budgets of a configuration against the profile in `state.dir`, which a gateway or `probe` has saved."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

from gateway.cli.live.live_check import PROMPT_TOKENS
from gateway.cli.live.live_findings import infeasible
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.fleet.learned_keeper import LearnedKeeper, StateFile
from gateway.runtime import RuntimeHolder, build_runtime
from policies.fleet.fleet import Fleet
from policies.types import Load


def check_budgets(config: Config) -> None:
    """Raises ConfigError where a budget is below the idle TTFT, for a short prompt, of the best endpoint of its route.

    Silent where no profile is known of a pool, or one of too few requests.
    """
    if faults := [found.line for found in infeasible(config, asyncio.run(_fastest(config)))]:
        raise ConfigError(faults)


async def _fastest(config: Config) -> Mapping[str, tuple[float, str]]:
    """Median TTFT, s, and id of the fastest endpoint, by pool."""
    assert config.state.dir is not None
    runtime, fleet, now = build_runtime(config), Fleet(config.fleet()), monotonic()
    await LearnedKeeper(StateFile(config.state.dir), fleet, RuntimeHolder(runtime)).restore()
    best: dict[str, tuple[float, str]] = {}
    for pool in runtime.pools.values():
        for endpoint in pool.endpoints:
            forecast = fleet.forecast(endpoint, Load(), PROMPT_TOKENS, 0, now)
            if forecast.trained:
                found = forecast.p50, endpoint.id
                best[pool.name] = min(best.get(pool.name, found), found)
    return best
