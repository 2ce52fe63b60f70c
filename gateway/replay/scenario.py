"""The configuration that a trace is played on: policy, simulated servers, faults, scorer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from backends.simulated.profiles import PROFILES, ApiProfile, Profile
from gateway.config.models import Config
from gateway.config.pool_section import PoolSection, endpoint_id
from gateway.replay.sim_fleet import Fault
from policies.routes.route import Route
from policies.types import FOREVER, Pool

ENGINE, API = "8b-h100", "api"  # profiles where the configuration names none
OURS, REFERENCE, POOLED = "ours", "reference", "pooled:"
BASELINES = ("round_robin", "least_request", "prefix_hash", "lmetric", "token_load", "argmin_ttft")
POOLABLE = ("least_request", "lmetric", "token_load", "argmin_ttft")  # scores that are comparable between pools
SCORERS = (OURS, *BASELINES, *(POOLED + name for name in POOLABLE), REFERENCE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`profiles` by endpoint id. `scorer`: one of SCORERS; `ours` leaves every route as configured."""

    pools: tuple[Pool, ...]
    routes: Mapping[str, Route]
    profiles: Mapping[str, Profile]
    faults: tuple[Fault, ...] = ()
    hung: float = 0.0  # share of requests that an engine accepts and never answers
    first_token: float = 120.0  # s: limit of a silent attempt, and of the time in the queue
    scorer: str = OURS
    workers: int = 1  # gateway processes on one machine
    replicas: int = 1  # gateways on separate machines, one process each
    peer_delay: float | None = 0.002  # s until replicas receive each other's updates; None: never

    @property
    def clairvoyant(self) -> bool:
        return self.scorer == REFERENCE

    @property
    def pooled(self) -> bool:
        return self.scorer.startswith(POOLED)

    @property
    def first_token_limit(self) -> float:
        """Seconds that a request may be queued, or an attempt silent. The reference has no limit."""
        return FOREVER if self.clairvoyant else self.first_token

    def with_scorer(self, scorer: str) -> Scenario:
        """The same scenario with a baseline or the clairvoyant reference in place of the configured policy."""
        if scorer not in SCORERS:
            raise ValueError(f"no scorer '{scorer}'; known: {', '.join(SCORERS)}")
        if scorer in (OURS, REFERENCE):
            return replace(self, scorer=scorer)
        update = {"scorer": scorer.removeprefix(POOLED), "hedge": "off"}
        routes = {name: route.model_copy(update=update) for name, route in self.routes.items()}
        return replace(self, routes=routes, scorer=scorer)


def scenario_from(config: Config) -> Scenario:
    """The pools and routes of a configuration, with a simulated server per endpoint.

    A pool with API profiles is remote to the decision too, whatever its backend kind.
    """
    profiles = dict(item for name, pool in config.pools.items() for item in _profiles(name, pool))
    apis = {name.partition("/")[0] for name, profile in profiles.items() if isinstance(profile, ApiProfile)}
    return Scenario(
        pools=tuple(replace(pool, local=pool.local and pool.name not in apis) for pool in config.fleet()),
        routes=dict(config.routes),
        profiles=profiles,
        first_token=config.defaults.first_token,
        workers=config.server.workers,
    )


def _profiles(name: str, pool: PoolSection) -> Iterator[tuple[str, Profile]]:
    """By endpoint id: the endpoint's own profile, else the pool's, else the default of the backend kind."""
    own = {endpoint.url: endpoint.profile for endpoint in pool.endpoints}  # a resolved host name counts as one server
    for url in pool.urls:
        yield endpoint_id(name, url), PROFILES[own.get(url) or pool.profile or _default_profile(pool)]


def _default_profile(pool: PoolSection) -> str:
    return ENGINE if pool.kind.local else API


def assumed_profiles(config: Config) -> dict[str, str]:
    """Pools without a configured profile, and the profile assumed for them."""
    return {
        name: _default_profile(pool)
        for name, pool in config.pools.items()
        if pool.profile is None and not (pool.endpoints and all(endpoint.profile for endpoint in pool.endpoints))
    }
