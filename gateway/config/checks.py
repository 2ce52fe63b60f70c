"""Checks across sections: names refer to something, and nothing is open by accident.

Each check yields a problem with the path of the wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

from gateway.config.config_errors import Path, Problem, did_you_mean
from gateway.config.models import PASSTHROUGH, Config

Check = Callable[[Config], Iterator[Problem]]

PUBLISHERS = ("vllm", "sglang")  # of cache events


def problems(config: Config) -> list[Problem]:
    """Yields every problem between sections that are each valid."""
    return [problem for check in CHECKS for problem in check(config)]


def something_to_serve(config: Config) -> Iterator[Problem]:
    if not config.pools:
        yield Problem((), "no pools: add pools:, or one more --config that has them")
    if not config.routes and config.passthrough is None:
        yield Problem((), "no routes: add routes: (policies/presets has one for each workload) or passthrough: POOL")


def route_names(config: Config) -> Iterator[Problem]:
    for name, route in config.routes.items():
        if route.name != name:
            yield Problem(("routes", name, "name"), "a route's name is its key; leave this out")


def tiers(config: Config) -> Iterator[Problem]:
    for name, route in config.routes.items():
        for i, tier in enumerate(route.tiers):
            yield from _known_pool(config, tier.pool, ("routes", name, "tiers", i))


def models(config: Config) -> Iterator[Problem]:
    """Only a passthrough can do without the name of a model."""
    asked = {tier.pool for route in config.routes.values() for tier in route.tiers}
    for name, pool in config.pools.items():
        if name in asked and not pool.model:
            yield Problem(("pools", name), "'model' is missing: the name its servers know")


def passthrough(config: Config) -> Iterator[Problem]:
    if config.passthrough is not None:
        yield from _known_pool(config, config.passthrough, ("passthrough",))


def keys(config: Config) -> Iterator[Problem]:
    routes = [*config.routes, *([PASSTHROUGH] if config.passthrough else [])]
    for i, key in enumerate(config.keys):
        for j, route in enumerate(key.routes or ()):
            if route not in routes:
                yield Problem(("keys", i, "routes", j), f"no route '{route}'{did_you_mean(route, routes)}")
    yield from _distinct("name", (key.name for key in config.keys))
    yield from _distinct("sha256", (key.sha256 for key in config.keys))


def listening(config: Config) -> Iterator[Problem]:
    server = config.server
    if not (server.listen.loopback or config.keyed or server.open):
        mend = "add keys:, or listen on 127.0.0.1 (or say server.open: true behind your own authentication)"
        yield Problem(("server", "listen"), f"{server.listen}: open mode is for loopback only: {mend}")
    if server.listen == server.admin and server.listen.port:
        yield Problem(("server", "admin"), f"{server.admin} is where listen is; take another port")


def kv_events(config: Config) -> Iterator[Problem]:
    for name, pool in config.pools.items():
        for i, endpoint in enumerate(pool.endpoints):
            place = ("pools", name, "endpoints", i, "kv_events")
            if endpoint.kv_events is None:
                continue
            if pool.backend not in PUBLISHERS:
                yield Problem(place, f"{pool.backend} servers publish none; leave this out")
            elif find_spec("zmq") is None:
                yield Problem(place, "needs a package that is not here: pip install 'firsttoken[kvevents]'")


def telemetry(config: Config) -> Iterator[Problem]:
    place, otlp = ("telemetry", "otlp"), config.telemetry.otlp
    if otlp is None:
        return
    if otlp.endswith(("/v1/traces", "/v1/metrics")):
        yield Problem(place, f"the gateway adds the path of each signal itself; write {otlp.rpartition('/v1/')[0]}")
    if not _installed("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        yield Problem(place, "needs packages that are not here: pip install 'firsttoken[otel]'")


def state(config: Config) -> Iterator[Problem]:
    if config.state.redis is not None and find_spec("redis") is None:
        yield Problem(("state", "redis"), "needs a package that is not here: pip install 'firsttoken[redis]'")
    if config.state.redis is None and config.state.keys == "redis":
        yield Problem(("state", "keys"), "there is no Redis to keep them: add state.redis, or leave this out")


CHECKS: tuple[Check, ...] = (
    something_to_serve,
    route_names,
    tiers,
    models,
    kv_events,
    passthrough,
    state,
    keys,
    listening,
    telemetry,
)


def _installed(*modules: str) -> bool:
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:
        return False


def _known_pool(config: Config, name: str, path: Path) -> Iterator[Problem]:
    if name not in config.pools:
        yield Problem(path, f"no pool '{name}'{did_you_mean(name, config.pools)}")


def _distinct(field: str, values: Iterable[str]) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for i, value in enumerate(values):
        first = seen.setdefault(value, i)
        if first != i:
            yield Problem(("keys", i, field), f"the same as keys[{first}]; each key is its own")
