"""Notes of `firsttoken check`: valid settings with an easily overlooked effect. The exit code stays 0.

A note is certain: where the effect depends on what the configuration does not say, there is no note.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from ipaddress import ip_address

from backends.http.connection_pool import BackendAddress
from backends.scrubbing import SHORTEST, is_secret
from backends.server_profiles import PROFILES, EngineProfile, Profile
from gateway.config.field_types import authority, is_ip
from gateway.config.models import Config
from gateway.config.name_conflicts import models_hidden_from_passthrough, unreachable_passthrough
from gateway.config.pool_section import CONTINUING, PoolSection
from gateway.lost_promises import LostPromises
from policies.latency.ttft_predictor import EnginePredictor, PrefillWork
from policies.routes.route import Route

FASTEST_API = 0.01  # s: a round trip within a region, and a step of a small model
PRIVATE_NAMES = ("localhost", "local", "internal", "lan", "svc", "home.arpa", "test")  # endings; RFC 6761, 6762, 8375
_FIRST_TOKEN = PrefillWork(prompt_tokens=1, uncached=1, queued_tokens=0.0, pairs=0.5, running=0.0)
_BY_FORECAST = ("latency", "completion", "throughput")  # orders of tiers in which a region plays no part
_UNITS = ((3600, "h"), (60, "m"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def notes(config: Config) -> list[str]:
    """Notes on a configuration, each a line."""
    of_pools = (_placeholders, _open_keys, _shared_servers, _shared_events)
    of_names = (unreachable_passthrough, models_hidden_from_passthrough)
    of_times = (_ttfts, _limits_of_first_tokens, _totals, _tpots)
    checks = (_admin, _cache_secret, *of_pools, *of_names, *of_times, _rescues, _costs, _prices, _regions)
    return [f"note: {line}" for check in checks for line in check(config)]


# --------------------------------------------------------------------------- server and state


def _admin(config: Config) -> Iterator[str]:
    if not config.server.admin.loopback:
        but = "" if config.server.admin_key is None else ", but for /keys"
        yield f"server.admin {config.server.admin} requires no key{but}; keep it on a private network"


def _cache_secret(config: Config) -> Iterator[str]:
    is_grouped = any(key.cache_group for key in config.keys)  # stored keys are not known here
    if is_grouped and config.state.keys != "config" and config.state.cache_secret is None:
        yield (
            "stored keys that share a cache_group need state.cache_secret: without it every key that joins or"
            " leaves the group empties its caches"
        )


# --------------------------------------------------------------------------- pools


def _placeholders(config: Config) -> Iterator[str]:
    for name, pool in config.pools.items():
        if any(key and not is_secret(key) for key in pool.keys):
            yield (
                f"a key of pool {name} is taken for a placeholder, being shorter than {SHORTEST} characters: it is not"
                " masked in error messages of the servers"
            )


def _open_keys(config: Config) -> Iterator[str]:
    for name, pool in config.pools.items():
        for url in pool.urls if any(map(is_secret, pool.keys)) else ():
            address = BackendAddress.parse(url)
            if not address.tls and _is_public(address.host):
                yield f"pool {name} sends its key to {authority(url)} without encryption; write https"


def _shared_events(config: Config) -> Iterator[str]:
    """Servers or ranks that share a KV event address: their cache contents would be mixed up."""
    by_url: dict[str, dict[tuple[str, int | None], str]] = defaultdict(dict)
    for id, address in config.kv_events().items():
        for key, url in (("kv_events", address.kv_events), ("kv_replay", address.kv_replay)):
            if url is not None:
                by_url[f"{key} {url}"].setdefault((address.server, address.dp_rank), id)
    for url, endpoints in by_url.items():
        if len(endpoints) > 1:
            yield (
                f"{' and '.join(endpoints.values())} have one {url}, and each is taken to hold what the other holds; "
                "each server, and each data-parallel rank, publishes at an address of its own (vLLM: port + rank)"
            )


def _is_public(host: str) -> bool:
    if is_ip(host):
        return ip_address(host).is_global
    name = host.lower().rstrip(".")
    return "." in name and not name.endswith(tuple(f".{ending}" for ending in PRIVATE_NAMES))


def _shared_servers(config: Config) -> Iterator[str]:
    """An API serves its models apart from each other; an engine does not."""
    pools = defaultdict[tuple[str, object], dict[str, None]](dict)  # names, by server
    for name, pool in config.pools.items():
        model = None if pool.kind.local else pool.model
        for address in config.addresses_of(name).values():
            server = authority(address.url, address.ip)
            for credential in pool.credentials:
                rest = BackendAddress.parse(address.url).api, address.dp_rank, credential, model
                pools[server, rest][name] = None
    for (server, _), names in pools.items():
        if len(names) > 1:
            yield f"{server} is a server of pools {' and '.join(names)}: its load is modelled for each of them apart"


# --------------------------------------------------------------------------- routes


def _ttfts(config: Config) -> Iterator[str]:
    """TTFT budgets that no idle server of the route meets, even for a prompt of one token."""
    for route in config.all_routes:
        least = min(_first_token_alone(config.pools[pool]) for pool in route.pools)
        if route.ttft is not None and route.ttft.budget < least:
            yield (
                f"no server makes the ttft of route {route.name}: at rest the fastest of its pools is expected to take"
                f" {duration(round(least, 4))}, and the budget is {duration(route.ttft.budget)}"
            )


def _limits_of_first_tokens(config: Config) -> Iterator[str]:
    """Budgets above a limit of the file, which ends an attempt before the budget is over."""
    general = config.defaults.first_token if config.first_token_is_meant else None
    for route in config.all_routes:
        for name in dict.fromkeys(route.pools) if route.ttft is not None else ():
            own = config.pools[name].first_token
            limit, key = (general, "defaults.first_token") if own is None else (own, f"first_token of pool {name}")
            if limit is not None and route.ttft is not None and limit < route.ttft.budget:
                yield (
                    f"{key} is {duration(limit)}, below the ttft of route {route.name}, {duration(route.ttft.budget)}: "
                    f"its attempts at {name} end there, and a prompt that takes longer is refused; raise or remove it"
                )


def _first_token_alone(pool: PoolSection) -> float:
    """TTFT in seconds of the fastest idle server, by profile or by the default prior."""
    if profiles := _profiles(pool):
        return min(
            profile.overhead + profile.tpot_alone if isinstance(profile, EngineProfile) else profile.ttft
            for profile in profiles
        )
    return EnginePredictor().point_estimate(_FIRST_TOKEN, 0.0) if pool.kind.local else FASTEST_API


def _totals(config: Config) -> Iterator[str]:
    """Budgets of the whole answer that leave no time for a second token at the profiles of all pools."""
    for route in config.all_routes:
        whole = [
            _first_token_alone(pool) + alone
            for pool in map(config.pools.__getitem__, route.pools)
            if (alone := _tpot_alone(pool)) is not None
        ]
        if route.total is not None and len(whole) == len(route.pools) and route.total.budget < min(whole):
            took, budget = duration(round(min(whole), 4)), duration(route.total.budget)
            yield (
                f"no tier keeps the total of route {route.name}: two tokens take {took} by the profiles of its pools,"
                f" and the budget is {budget}"
            )


def _tpots(config: Config) -> Iterator[str]:
    for promise in LostPromises().update(config.all_routes, lambda pool: _tpot_alone(config.pools[pool]), 0.0):
        alone, budget = duration(round(promise.alone, 4)), duration(promise.budget)
        yield (
            f"no engine of pool {promise.pool} keeps the tpot of route {promise.route}: an answer alone takes {alone}"
            f" per token by its profile, and the budget is {budget}"
        )


def _tpot_alone(pool: PoolSection) -> float | None:
    return min((profile.tpot_alone for profile in _profiles(pool)), default=None)


def _profiles(pool: PoolSection) -> list[Profile]:
    """Of all servers; empty where the configuration does not name the profile of each."""
    names = [endpoint.profile or pool.profile for endpoint in pool.endpoints] or [pool.profile]
    known = [PROFILES[name] for name in names if name is not None]
    return known if len(known) == len(names) else []


def _rescues(config: Config) -> Iterator[str]:
    for route in config.all_routes:
        pools = [config.pools[name] for name in dict.fromkeys(route.pools)]
        if route.rescue == "off":
            continue
        if not any(pool.backend in CONTINUING for pool in pools):
            yield f"rescue of route {route.name} never acts: only servers of {', '.join(CONTINUING)} continue an answer"
        elif not _has_peers(config, route):
            yield f"rescue of route {route.name} never acts: there is no second endpoint to continue an answer"


def _has_peers(config: Config, route: Route) -> bool:
    """An endpoint that stands for several servers may have any number."""
    pools = dict.fromkeys(route.pools)
    several = any(endpoint.is_dynamic for pool in pools for endpoint in config.pools[pool].endpoints)
    return several or sum(len(config.addresses_of(pool)) for pool in pools) > 1


def _costs(config: Config) -> Iterator[str]:
    for route in config.all_routes:
        if (external := route.limits.external) is not None and external.usd_per_hour is not None:
            limit = f"limits.external.usd_per_hour of route {route.name}"
            for name in dict.fromkeys(route.pools):
                if not (config.pools[name].kind.local or _has_price(config.pools[name])):
                    yield f"{limit} never acts at pool {name}, which has no price"
    for key in config.keys:
        routes = [route for route in config.all_routes if key.routes is None or route.name in key.routes]
        priced = any(_has_price(config.pools[pool]) for route in routes for pool in route.pools)
        if key.monthly_cost_usd is not None and not priced:
            yield f"monthly_cost_usd of key {key.name} never limits: no pool of its routes has a price"


def _prices(config: Config) -> Iterator[str]:
    unknown = [name for name, pool in config.pools.items() if pool.lacks_price]
    if unknown:
        yield (
            f"answers of {', '.join(unknown)} cost nothing here: no price of theirs is known; write price, in USD per"
            " million tokens"
        )


def _regions(config: Config) -> Iterator[str]:
    for route in config.all_routes:
        if not route.prefers_region or route.region is None:
            continue
        pools = map(config.pools.__getitem__, dict.fromkeys(route.pools))
        known = {endpoint.region for pool in pools for endpoint in pool.endpoints}
        named = route.region.prefer if isinstance(route.region.prefer, tuple) else ()
        for name in sorted({*named} - known):
            yield f"region.prefer of route {route.name} names {name}, where none of its endpoints is"
        if route.prefer in _BY_FORECAST:
            yield f"prefer: {route.prefer} of route {route.name} chooses by the forecast, whatever region.prefer says"


def _has_price(pool: PoolSection) -> bool:
    return pool.price_in_force.at_most(1, 1) > 0


def duration(seconds: float) -> str:
    """0.8 -> `800ms`: the largest unit with a whole number, or a number of at least 1."""
    for size, unit in _UNITS:
        amount = round(seconds / size, 6)
        if amount >= 1 and (amount == int(amount) or size <= 1):
            return f"{amount:g}{unit}"
    return f"{seconds:g}s"
