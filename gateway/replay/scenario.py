"""What a trace is played on, and how it follows from a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.simulated.profiles import PROFILES, ApiProfile, Profile
from gateway.config.models import Config
from gateway.config.pool_section import PoolSection as PoolConfig
from gateway.config.pool_section import endpoint_id
from gateway.replay.sim_fleet import Fault
from gateway.replay.traces import Arrival, TraceError
from policies.routes.route import Route
from policies.types import FOREVER, Pool

ENGINE, API = "8b-h100", "api"  # where the configuration does not say
OURS, REFERENCE, POOLED = "ours", "reference", "pooled:"
YARDSTICKS = ("round_robin", "least_request", "prefix_hash", "lmetric", "token_load", "argmin_ttft")
COMPARABLE = ("least_request", "lmetric", "token_load", "argmin_ttft")  # their scores mean the same in every pool
SCORERS = (OURS, *YARDSTICKS, *(POOLED + name for name in COMPARABLE), REFERENCE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`profiles` by endpoint id. `scorer`: one of SCORERS; `ours` leaves every route as it is configured."""

    pools: tuple[Pool, ...]
    routes: Mapping[str, Route]
    profiles: Mapping[str, Profile]
    faults: tuple[Fault, ...] = ()
    hung: float = 0.0  # share of requests that an engine takes and never answers
    first_token: float = 120.0  # s that an attempt may be silent, and that a request may be held
    scorer: str = OURS
    workers: int = 1  # processes of the gateway
    replicas: int = 1  # gateways on several machines, of one process each
    news: float | None = 0.002  # s that what they tell each other is on its way; None: they do not

    @property
    def clairvoyant(self) -> bool:
        return self.scorer == REFERENCE

    @property
    def patience(self) -> float:
        """Seconds that a request is held, or an attempt may be silent; what was possible needs none of it."""
        return FOREVER if self.clairvoyant else self.first_token

    @property
    def pooled(self) -> bool:
        return self.scorer.startswith(POOLED)

    def with_scorer(self, scorer: str) -> Scenario:
        """The same with a yardstick, or the clairvoyant reference, in place of the brain."""
        if scorer not in SCORERS:
            raise ValueError(f"no scorer '{scorer}'; there are {', '.join(SCORERS)}")
        if scorer in (OURS, REFERENCE):
            return replace(self, scorer=scorer)
        inner = {"scorer": scorer.removeprefix(POOLED), "hedge": "off"}
        routes = {name: route.model_copy(update=inner) for name, route in self.routes.items()}
        return replace(self, routes=routes, scorer=scorer)


def setting_of(config: Config) -> Scenario:
    """The pools and routes of a configuration, with a simulated machine for every endpoint.

    A pool whose machines are APIs is one to the decision too, whatever dialect it speaks.
    """
    profiles = {name: profile for pool in config.pools for name, profile in _profiles(pool, config.pools[pool])}
    apis = {name.partition("/")[0] for name, profile in profiles.items() if isinstance(profile, ApiProfile)}
    pools = tuple(replace(pool, local=pool.local and pool.name not in apis) for pool in config.fleet())
    return Scenario(
        pools, dict(config.routes), profiles, first_token=config.defaults.first_token, workers=config.server.workers
    )


def _profiles(name: str, pool: PoolConfig) -> Iterable[tuple[str, Profile]]:
    """An endpoint's own profile, else its pool's, else by kind."""
    own = {endpoint.url: endpoint.profile for endpoint in pool.endpoints}  # a name that has several counts as one
    for url in pool.urls:
        chosen = own.get(url) or pool.profile or (ENGINE if pool.kind.local else API)
        yield endpoint_id(name, url), PROFILES[chosen]


def without_profile(config: Config) -> dict[str, str]:
    """Pools whose machines had to be guessed, and as what."""
    return {
        name: ENGINE if pool.kind.local else API
        for name, pool in config.pools.items()
        if pool.profile is None and not (pool.endpoints and all(endpoint.profile for endpoint in pool.endpoints))
    }


def routed(arrivals: Sequence[Arrival], setting: Scenario, route: str | None) -> list[Arrival]:
    """Every arrival on a route: the one named, the trace's own, or the only one there is."""
    names = list(setting.routes)
    if route is not None and route not in names:
        raise TraceError(f"there is no route '{route}'; there are {', '.join(names)}")
    if route is None and len(names) == 1:
        route = names[0]
    chosen = [arrival if route is None else replace(arrival, route=route) for arrival in arrivals]
    known = [arrival for arrival in chosen if arrival.route in setting.routes]
    if not known:
        raise TraceError(f"no request of the trace names one of the routes {', '.join(names)}; write ROUTE=TRACE")
    return known
