"""Checks between sections: references resolve, and no port is open by accident.

Each check yields problems with the path of the value to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

from gateway.config.config_errors import Path, Problem, did_you_mean
from gateway.config.models import PASSTHROUGH, Config

Check = Callable[[Config], Iterator[Problem]]

PUBLISHERS = ("vllm", "sglang")  # backends with KV cache events


def problems(config: Config) -> list[Problem]:
    """All problems of a configuration with valid sections."""
    return [problem for check in CHECKS for problem in check(config)]


def something_to_serve(config: Config) -> Iterator[Problem]:
    if not config.pools:
        yield Problem((), "no pools: add pools:, or one more --config that has them")
    if not config.routes and config.passthrough is None:
        yield Problem((), "no routes: add routes: (policies/presets has one for each workload) or passthrough: POOL")


def route_names(config: Config) -> Iterator[Problem]:
    for name, route in config.routes.items():
        if route.name != name:
            yield Problem(("routes", name, "name"), "the key is the route's name; remove this")


def tiers(config: Config) -> Iterator[Problem]:
    for name, route in config.routes.items():
        for i, tier in enumerate(route.tiers):
            yield from _known_pool(config, tier.pool, ("routes", name, "tiers", i))


def models(config: Config) -> Iterator[Problem]:
    """Only a passthrough pool needs no model name."""
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
        hint = "add keys:, or listen on 127.0.0.1 (or set server.open: true behind your own authentication)"
        yield Problem(("server", "listen"), f"{server.listen}: open mode is for loopback only: {hint}")
    if server.listen == server.admin and server.listen.port:
        yield Problem(("server", "admin"), f"{server.admin} is the same as server.listen; use another port")


def kv_events(config: Config) -> Iterator[Problem]:
    for name, pool in config.pools.items():
        for i, endpoint in enumerate(pool.endpoints):
            path = ("pools", name, "endpoints", i, "kv_events")
            if endpoint.kv_events is None:
                continue
            if pool.backend not in PUBLISHERS:
                yield Problem(path, f"{pool.backend} servers publish no KV events; remove this")
            elif find_spec("zmq") is None:
                yield Problem(path, "requires a package that is not installed: pip install 'firsttoken[kvevents]'")


def telemetry(config: Config) -> Iterator[Problem]:
    path, otlp = ("telemetry", "otlp"), config.telemetry.otlp
    if otlp is None:
        return
    if otlp.endswith(("/v1/traces", "/v1/metrics")):
        yield Problem(path, f"the gateway appends the path of each signal; write {otlp.rpartition('/v1/')[0]}")
    if not _installed("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        yield Problem(path, "requires packages that are not installed: pip install 'firsttoken[otel]'")


def state(config: Config) -> Iterator[Problem]:
    if config.state.redis is not None and find_spec("redis") is None:
        yield Problem(("state", "redis"), "requires a package that is not installed: pip install 'firsttoken[redis]'")
    if config.state.redis is None and config.state.keys == "redis":
        yield Problem(("state", "keys"), "requires Redis: add state.redis, or remove this")


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
            yield Problem(("keys", i, field), f"duplicate of keys[{first}]; names and digests must be unique")
