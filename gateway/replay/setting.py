"""From a configuration to what a trace is played on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from backends.simulated.profiles import PROFILES, ApiProfile, Profile
from gateway.config.models import Config
from gateway.config.pool import Pool, endpoint_id
from gateway.replay.player import Setting
from gateway.replay.traces import Arrival, TraceError

ENGINE, API = "8b-h100", "api"  # where the configuration does not say


def setting_of(config: Config) -> Setting:
    """The pools and routes of a configuration, with a simulated machine for every endpoint."""
    profiles = {name: profile for pool in config.pools for name, profile in _profiles(pool, config.pools[pool])}
    return Setting(config.fleet(), dict(config.routes), profiles)


def _profiles(name: str, pool: Pool) -> Iterable[tuple[str, Profile]]:
    """An endpoint's own profile, else its pool's, else by kind."""
    own = {endpoint.url: endpoint.profile for endpoint in pool.endpoints}
    for url in pool.urls:
        chosen = own.get(url) or pool.profile or (ENGINE if pool.kind.local else API)
        yield endpoint_id(name, url), PROFILES[chosen]


def without_profile(config: Config) -> list[str]:
    """Pools whose machines had to be guessed."""
    return [
        name
        for name, pool in config.pools.items()
        if pool.profile is None and not all(endpoint.profile for endpoint in pool.endpoints)
    ]


def as_api(setting: Setting) -> Setting:
    """Pools whose machine is an API are no engines to the decision either."""
    apis = {name.partition("/")[0] for name, profile in setting.profiles.items() if isinstance(profile, ApiProfile)}
    return replace(setting, pools=tuple(replace(p, local=p.local and p.name not in apis) for p in setting.pools))


def routed(arrivals: Sequence[Arrival], setting: Setting, route: str | None) -> list[Arrival]:
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
