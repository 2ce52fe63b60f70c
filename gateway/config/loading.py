"""Configuration files and environment variables -> a valid Config, or a ConfigError.

Steps: read, merge, validate each section, check between sections. The problems of all files are reported together, in
the order of the lines; none that follows from another one alone. The last step runs if every section is valid.

Without a file, API keys in the environment are the configuration: every API with a key becomes a pool whose models are
asked for as POOL/MODEL, and the first one receives all other requests, model names unchanged.

Reload: `server`, `state` and `telemetry` are fixed at start-up, all other sections take effect at once. No file may
contain that combination, so all checks run again. Differences are reported by path, without values: possible secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from backends.catalog import KINDS
from gateway.config.config_errors import ConfigError, Problem, SourceLocation, did_you_mean, dotted
from gateway.config.config_errors import Path as KeyPath
from gateway.config.field_types import authority
from gateway.config.kept_facts import use_kept
from gateway.config.models import SMALLEST_FILE, Config
from gateway.config.name_conflicts import names
from gateway.config.schema import messages
from gateway.config.yaml_source import Document, merge, put, read, unreadable
from policies.routes.route import Route, Tier

FIXED_AT_START = ("server", "state", "telemetry", "records")
COMBINED = SourceLocation("config, with server, state, telemetry and records as at start-up")
PUBLISHERS = ("vllm", "sglang")  # backends with KV cache events
PLACEHOLDERS = ("https://unset.invalid", "redis://unset.invalid", "0" * 64, "127.0.0.1:1", "1", "1s", "-")
_ABSENT = object()


def load(paths: Sequence[Path], environ: Mapping[str, str], kind: type[Config] = Config) -> Config:
    """Files in order, each merged over the previous ones; without files, the environment. `kind`: with the keys of
    parts."""
    document = reduce(merge, _documents(paths, environ)) if paths else _from_environment(environ)
    _use_facts(document)
    return validated(document, kind)


def validated(document: Document, kind: type[Config] = Config) -> Config:
    """Raises ConfigError. `x-...` sections belong to the operator and are ignored."""
    config, found = _checked(document, kind)
    if config is None or document.problems or found:
        raise _error(found, document)
    return config


def load_without_secrets(
    paths: Sequence[Path], environ: Mapping[str, str], kind: type[Config] = Config
) -> tuple[Config | None, list[str]]:
    """The configuration with a placeholder for each variable that is not set, and the keys of these; None where no
    placeholder fits. Raises ConfigError for every problem besides."""
    document = reduce(merge, _documents(paths, environ, any_variable=True))
    _use_facts(document)
    config, found = _checked(document, kind)
    if document.problems or found:
        raise _error(found, document)
    return config, sorted(map(dotted, document.unset))


def _use_facts(document: Document) -> None:
    """Newer facts of `state.dir` hold before the sections are checked, which may name a model of theirs."""
    state = document.data.get("state")
    folder = state.get("dir") if isinstance(state, dict) else None
    use_kept(folder if isinstance(folder, str) else None)


def _checked(document: Document, kind: type[Config]) -> tuple[Config | None, list[Problem]]:
    """The configuration, if every section is valid, and problems of known values. Unset variables are tried with
    several placeholders, so that an unset key hides no other problem."""
    for placeholder in PLACEHOLDERS:
        config, found = _validated(document, kind)
        known = [problem for problem in found if not document.is_unknown(problem.path)]
        wrong = [path for path in document.unset if any(each.path[: len(path)] == path for each in found)]
        if config is not None or known or not wrong:
            break
        for path in wrong:
            put(document.data, path, placeholder)
    return config, known


def _validated(document: Document, kind: type[Config]) -> tuple[Config | None, list[Problem]]:
    """The configuration, if every section is valid, and all problems of its values."""
    try:
        config = kind.model_validate({k: value for k, value in document.data.items() if not k.startswith("x-")})
    except ValidationError as error:
        raised = [each for each in error.errors() if not (document.lost and each["type"] == "missing")]
        return None, messages(raised, document, kind)
    return config, [] if document.lost else problems(config)


def _documents(paths: Sequence[Path], environ: Mapping[str, str], any_variable: bool = False) -> list[Document]:
    return [_document(path, environ, any_variable) for path in paths]


def _document(path: Path, environ: Mapping[str, str], any_variable: bool) -> Document:
    try:
        return read(path.read_text("utf-8"), str(path), environ, any_variable)
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"{path}: not UTF-8 text at byte {error.start}"
    return unreadable(SourceLocation(str(path)), problem)


def _error(problems: Iterable[Problem], document: Document) -> ConfigError:
    located = [(document.location(problem.path), problem) for problem in problems]
    lines = document.problems + [(location, problem.at(location)) for location, problem in located]
    files = ["config", *document.files, *(location.file for location, _ in lines)]
    lines.sort(key=lambda pair: (files.index(pair[0].file), pair[0].line))
    return ConfigError([line for _, line in lines])


def _from_environment(environ: Mapping[str, str]) -> Document:
    document = Document()
    pools: dict[str, Any] = {}
    known = [
        (name, kind.base_url or environ.get(f"{name.upper()}_BASE_URL"))
        for name, kind in KINDS.items()
        if kind.needs_key
    ]
    names = [name for name, base_url in known if base_url]
    for name in names:
        if not environ.get(f"{name.upper()}_API_KEY"):
            continue
        pools[name] = {"backend": name, "models": ["*"]}
        for key in ("api_key", "base_url"):
            variable, path = f"{name.upper()}_{key.upper()}", ("pools", name, key)
            if value := environ.get(variable):
                pools[name][key] = value
                document.locations[path] = SourceLocation(f"environment variable {variable}")
                document.raw[path] = f"${{{variable}}}"
    if not pools:
        variables = ", ".join(f"{name.upper()}_API_KEY" for name in names)
        raise ConfigError(
            [f"no --config, and none of {variables} is set: name a file, set a key, or try `firsttoken demo`"]
        )
    document.data.update(pools=pools, passthrough=next(iter(pools)))
    return document


@dataclass(frozen=True, slots=True)
class Change:
    """`config` takes effect. `changed`: paths of its differences; `restart`: paths of the other differences."""

    config: Config
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


def change(before: Config, wanted: Config) -> Change:
    """Raises ConfigError if the effective configuration would be invalid."""
    config = wanted.model_copy(update={name: getattr(before, name) for name in FIXED_AT_START})
    if config != wanted and (found := problems(config)):
        raise ConfigError([problem.at(COMBINED) for problem in found])
    paths = [*_differences(before.model_dump(), wanted.model_dump(), ()), *_renewed(before, wanted)]
    return Change(
        config,
        tuple(dotted(path) for path in paths if path[0] not in FIXED_AT_START),
        tuple(dotted(path) for path in paths if path[0] in FIXED_AT_START),
    )


def _renewed(before: Config, wanted: Config) -> Iterator[KeyPath]:
    """Pools with replaced certificate files of the same name, and pools with a changed price by the facts."""
    for name, pool in wanted.pools.items():
        known = before.pools.get(name)
        if known is None:
            continue
        if known.price == pool.price and known.price_in_force != pool.price_in_force:
            yield "pools", name, "price"
        if known.tls is None or pool.tls is None:
            continue
        if known.tls.model_dump() == pool.tls.model_dump() and known.tls.files != pool.tls.files:
            yield "pools", name, "tls"


def _differences(before: object, after: object, path: KeyPath) -> Iterator[KeyPath]:
    """Paths of the innermost different values."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield path
        return
    for name in dict.fromkeys([*before, *after]):
        yield from _differences(before.get(name, _ABSENT), after.get(name, _ABSENT), (*path, name))


def problems(config: Config) -> list[Problem]:
    """All problems of a configuration with valid sections."""
    checks = (routes, names, kv_events, state, records, keys, listening, telemetry, schemas)
    return [problem for check in checks for problem in check(config)]


def routes(config: Config) -> Iterator[Problem]:
    """Names, pools and models of routes. Only a passthrough pool needs no model name."""
    if not config.pools:
        yield Problem((), "no pools: add pools:, or one more --config that has them")
    if not config.all_routes:
        yield Problem((), "no routes: add routes: (policies/presets has one for each workload) or passthrough: POOL")
    for name, route in config.routes.items():
        if route.name != name:
            yield Problem(("routes", name, "name"), "the key is the route's name; remove this")
        yield from _one_provider(config, route)
        for i, tier in enumerate(route.tiers):
            yield from _known_pool(config, tier.pool, ("routes", name, "tiers", i))
            yield from _known_adapter(config, tier, ("routes", name, "tiers", i))
            yield from _allowed_region(config, route, tier.pool, ("routes", name, "tiers", i))
    in_tiers = {tier.pool for route in config.routes.values() for tier in route.tiers}
    for name, pool in config.pools.items():
        if name in in_tiers and not pool.model:
            hint = "; of models, a route uses the one that 'model' names" if pool.models else ""
            yield Problem(("pools", name), f"'model' is missing: the name its servers know{hint}")
    if config.passthrough is not None:
        yield from _known_pool(config, config.passthrough, ("passthrough",))


def keys(config: Config) -> Iterator[Problem]:
    known = [route.name for route in config.all_routes]
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
    if server.cors is not None and "*" in server.cors.origins and not config.keyed:
        text = "without keys '*' lets every web page use this gateway; list its origins, or add keys"
        yield Problem(("server", "cors", "origins"), text)
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
        yield Problem(("state", "keys"), "requires Redis: add state.redis, or write keys: dir and state.dir")
    if config.state.answers == "redis" and config.state.redis is None:
        yield Problem(("state", "answers"), "requires Redis: add state.redis, or remove this")
    if config.state.keys == "dir" and config.state.dir is None:
        yield Problem(("state", "keys"), "requires a directory: add state.dir, or remove this")
    if config.server.admin_key is not None and config.state.keys == "config":
        text = "keys are made in state.dir or Redis: add state: {dir: ..., keys: dir}, or remove this"
        yield Problem(("server", "admin_key"), text)


def records(config: Config) -> Iterator[Problem]:
    section, workers = config.records, config.server.workers
    if section is not None and section.size < workers * SMALLEST_FILE:
        text = f"must be at least 16MB for each worker: write {16 * workers}MB or more"
        yield Problem(("records", "size"), text)


def schemas(config: Config) -> Iterator[Problem]:
    for name, route in config.routes.items():
        if "invalid_json" in route.escalate:
            yield from _installed(("routes", name, "escalate"), "schemas", "jsonschema")


def _installed(path: KeyPath, extra: str, *modules: str) -> Iterator[Problem]:
    try:
        missing = not all(find_spec(module) for module in modules)
    except ModuleNotFoundError:  # the package around a module
        missing = True
    if missing:
        what = "a package that is" if len(modules) == 1 else "packages that are"
        yield Problem(path, f"requires {what} not installed: pip install 'firsttoken[{extra}]'")


def _one_provider(config: Config, route: Route) -> Iterator[Problem]:
    """A caller's key is shown to one provider alone."""
    named = ((pool, config.pools[pool]) for pool in route.pools if pool in config.pools)
    hosts = {frozenset(map(authority, pool.urls)): name for name, pool in named if pool.caller_keys}
    if len(hosts) > 1:
        first, second = [*hosts.values()][:2]
        text = f"a caller's key for pool {first} would be sent to the servers of {second} too; make two routes of it"
        yield Problem(("routes", route.name, "tiers"), text)


def _known_adapter(config: Config, tier: Tier, path: KeyPath) -> Iterator[Problem]:
    section = config.pools.get(tier.pool)
    if not tier.adapter or section is None:
        return
    known = () if section.adapters is None else section.adapters.names
    if tier.adapter not in known:
        hint = did_you_mean(tier.adapter, known) or "; add it to the pool's adapters"
        yield Problem((*path, "adapter"), f"pool {tier.pool} has no adapter '{tier.adapter}'{hint}")


def _allowed_region(config: Config, route: Route, pool: str, path: KeyPath) -> Iterator[Problem]:
    """A tier of which `region.only` leaves no endpoint would never be used."""
    if route.region is None or route.region.only is None or pool not in config.pools:
        return
    found = dict.fromkeys(endpoint.region for endpoint in config.pools[pool].endpoints)
    if found.keys().isdisjoint(route.region.only):
        known = [region for region in found if region]
        hint = did_you_mean(route.region.only[0], known) if known else "; its endpoints have no region"
        yield Problem(path, f"region.only ({', '.join(route.region.only)}) leaves no endpoint of pool {pool}{hint}")


def _known_pool(config: Config, name: str, path: KeyPath) -> Iterator[Problem]:
    if name not in config.pools:
        named = next(
            (f"; it is the model of pool '{pool}'" for pool, one in config.pools.items() if one.model == name), ""
        )
        yield Problem(path, f"no pool '{name}'{named or did_you_mean(name, config.pools)}")
