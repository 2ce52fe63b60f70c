"""Finds model names that two parts of a configuration claim: routes, aliases, and models of pools.

Of two equal names only one is ever reached, and of two patterns only equal ones hide each other (see
`policies.routes.model_names`): so a pattern that can never match is one of these conflicts.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.config_errors import Path, Problem, dotted
from gateway.config.models import PASSTHROUGH, Config
from policies.routes.model_names import ANY, own_names


def names(config: Config) -> Iterator[Problem]:
    """A problem for each name that is claimed again; its text names the first place."""
    first: dict[str, Path] = {}
    for name, path in _claims(config):
        if (other := first.setdefault(name, path)) is path:
            continue
        if path[:2] == other and path[0] == "routes":
            yield Problem(path, f"'{name}' is the name of the route itself; remove it")
        else:
            yield Problem(path, f"'{name}' never gets here: it is the name of {_place(other)}; keep one")
    yield from _model_routes(config)


def _model_routes(config: Config) -> Iterator[Problem]:
    """A key, a metric or a limit of a route would be of two routes. With `*` among its models, the pool claims it."""
    for pool, route in config.model_routes.items():
        if route.name in config.routes and ANY not in config.pools[pool].models:
            text = f"'{route.name}' is the name of the route of all models of pool {pool}; choose another"
            yield Problem(("routes", route.name), text)


def unreachable_passthrough(config: Config) -> Iterator[str]:
    """A note: an alias takes every name before the passthrough does."""
    taker = next((route.name for route in config.routes.values() if ANY in route.aliases), None)
    if config.passthrough is not None and taker is not None:
        yield f"passthrough never acts: the alias '*' of route {taker} takes every name"


def models_hidden_from_passthrough(config: Config) -> Iterator[str]:
    """A note for each model that a pool lists, and that a key for the passthrough may not use."""
    taken = {name for route in config.named_routes.values() for name in (route.name, *route.aliases)}
    listed = own_names({pool: config.pools[pool].models for pool in config.model_routes})
    for key in config.keys:
        for model, pool in listed.items():
            route = config.model_routes[pool].name
            if PASSTHROUGH in (key.routes or ()) and route not in (key.routes or ()) and model not in taken:
                yield (
                    f"key {key.name} may use passthrough, and gets a 404 for {model}, which is a model of pool {pool}:"
                    f" add {route} to its routes"
                )


def _claims(config: Config) -> Iterator[tuple[str, Path]]:
    """Names with their places, in the order in which a request's model is compared with these."""
    for name in config.routes:
        yield name, ("routes", name)
    for route in config.routes.values():
        for i, alias in enumerate(route.aliases):
            yield alias, ("routes", route.name, "aliases", i)
    for pool, section in config.pools.items():
        for i, model in enumerate(section.models):
            yield f"{pool}/{model}", ("pools", pool, "models", i)
    for pool, section in config.pools.items():
        for adapter in {} if section.adapters is None else dict.fromkeys(section.adapters.names):
            if adapter not in config.routes:
                yield adapter, ("pools", pool, "adapters", adapter)


def _place(path: Path) -> str:
    section, name, *rest = path
    if not rest:
        return f"route {name}"
    return f"a model of pool {name} ({dotted(path)})" if section == "pools" else dotted(path)
