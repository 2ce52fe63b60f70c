"""Checks between sections: references resolve, and no port is open by accident.

Each check yields problems with the path of the value to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from gateway.config.config_errors import Path, Problem, did_you_mean
from gateway.config.models import PASSTHROUGH, Config

PUBLISHERS = ("vllm", "sglang")  # backends with KV cache events


def problems(config: Config) -> list[Problem]:
    """All problems of a configuration with valid sections."""
    return [problem for check in CHECKS for problem in check(config)]


def something_to_serve(config: Config) -> Iterator[Problem]:
    if not config.pools:
        yield Problem((), "no pools: add pools:, or one more --config that has them")
    if not config.routes and config.passthrough is None:
        yield Problem((), "no routes: add routes: (policies/presets has one for each workload) or passthrough: POOL")


def routes(config: Config) -> Iterator[Problem]:
    """Names, pools and models of routes. Only a passthrough pool needs no model name."""
    for name, route in config.routes.items():
        if route.name != name:
            yield Problem(("routes", name, "name"), "the key is the route's name; remove this")
        for i, tier in enumerate(route.tiers):
            yield from _known_pool(config, tier.pool, ("routes", name, "tiers", i))
    in_tiers = {tier.pool for route in config.routes.values() for tier in route.tiers}
    for name, pool in config.pools.items():
        if name in in_tiers and not pool.model:
            yield Problem(("pools", name), "'model' is missing: the name its servers know")
    if config.passthrough is not None:
        yield from _known_pool(config, config.passthrough, ("passthrough",))


def keys(config: Config) -> Iterator[Problem]:
    known = [*config.routes, *([PASSTHROUGH] if config.passthrough else [])]
    seen: dict[tuple[str, str], int] = {}
    for i, key in enumerate(config.keys):
        for j, route in enumerate(key.routes or ()):
            if route not in known:
                yield Problem(("keys", i, "routes", j), f"no route '{route}'{did_you_mean(route, known)}")
        for field in ("name", "sha256"):
            first = seen.setdefault((field, getattr(key, field)), i)
            if first != i:
                yield Problem(("keys", i, field), f"duplicate of keys[{first}]; names and digests must be unique")


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
            if endpoint.kv_events is not None and pool.backend not in PUBLISHERS:
                yield Problem(path, f"{pool.backend} servers publish no KV events; remove this")
            elif endpoint.kv_events is not None:
                yield from _installed(path, "kvevents", "zmq")


def telemetry(config: Config) -> Iterator[Problem]:
    path, otlp = ("telemetry", "otlp"), config.telemetry.otlp
    if otlp is None:
        return
    if otlp.endswith(("/v1/traces", "/v1/metrics")):
        yield Problem(path, f"the gateway appends the path of each signal; write {otlp.rpartition('/v1/')[0]}")
    yield from _installed(path, "otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def state(config: Config) -> Iterator[Problem]:
    if config.state.redis is not None:
        yield from _installed(("state", "redis"), "redis", "redis")
    elif config.state.keys == "redis":
        yield Problem(("state", "keys"), "requires Redis: add state.redis, or remove this")


CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    something_to_serve,
    routes,
    kv_events,
    state,
    keys,
    listening,
    telemetry,
)


def _installed(path: Path, extra: str, *modules: str) -> Iterator[Problem]:
    try:
        missing = not all(find_spec(module) for module in modules)
    except ModuleNotFoundError:  # the package around a module
        missing = True
    if missing:
        what = "a package that is" if len(modules) == 1 else "packages that are"
        yield Problem(path, f"requires {what} not installed: pip install 'firsttoken[{extra}]'")


def _known_pool(config: Config, name: str, path: Path) -> Iterator[Problem]:
    if name not in config.pools:
        yield Problem(path, f"no pool '{name}'{did_you_mean(name, config.pools)}")
