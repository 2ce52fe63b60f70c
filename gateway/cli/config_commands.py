"""Commands on a configuration file: `firsttoken check`, `schema` and `keys`.

`check`: counts, routes and notes of a valid configuration, and budgets against the profile in `state.dir`; with --live
its endpoints too. `keys`: adds, revokes and lists API keys in the store of a configuration. A new key is printed once:
only the SHA-256 is stored. `list` shows neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from gateway.admission.key_store import MAX_KEYS, StoredKeys, StoreFull
from gateway.admission.new_keys import SETTINGS, InvalidKey, in_file, is_hidden, new_key, operator_store
from gateway.cli.tables import aligned
from gateway.cluster.redis_client import Unavailable
from gateway.config import schema as schemas
from gateway.config.config_errors import ConfigError, nearest
from gateway.config.kept_facts import left_files
from gateway.config.loading import load, load_without_secrets
from gateway.config.models import Config, Key
from gateway.config.notes import duration, notes
from gateway.part_list import CONFIG
from policies.routes.route import Route, Tier, Ttft

T = TypeVar("T")

COLUMNS = ("name", "routes", "requests/min", "tokens/min", "at a time", "USD/month", "cache group", "weight")


def check(args: argparse.Namespace) -> int:
    """Raises ConfigError if the configuration is invalid, if a budget is infeasible by the profile in `state.dir`, or
    with --live if an endpoint is not as configured."""
    if not args.live and (args.no_tokens or args.timeout is not None):
        raise ConfigError(["firsttoken: --no-tokens and --timeout belong to --live: add --live"])
    if args.no_secrets and (args.live or not args.files):
        raise ConfigError(["firsttoken: --no-secrets reads files alone: name them, and leave --live out"])
    config, unset = _read(args)
    if config is None:
        print(f"ok, but for values that nothing can stand for: set the variables of {', '.join(unset)}")
        return 0
    print(report(config))
    for line in left_files():
        print(f"note: {line}")
    if unset:
        print(f"note: not checked, as the variable is not set: {', '.join(unset)}")
    if config.state.dir is not None:
        from gateway.cli.live.known_profile import check_budgets

        for note in check_budgets(config):
            print(note)
    if args.live:
        from gateway.cli.live.live_check import TIMEOUT, live_check

        live_check(config, tokens=not args.no_tokens, timeout=args.timeout or TIMEOUT)
    return 0


def _read(args: argparse.Namespace) -> tuple[Config | None, Sequence[str]]:
    """The configuration, and keys whose variables are not set."""
    if args.no_secrets:
        return load_without_secrets(args.files, os.environ, CONFIG)
    return load(args.files, os.environ, CONFIG), ()


def report(config: Config) -> str:
    """Several lines, the verdict first."""
    counts = {"pool": len(config.pools), "endpoint": len(config.urls()), "route": len(config.named_routes)}
    verdict = "ok: " + ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    rows = [_route_row(route.name, route) for route in (*config.named_routes.values(), *config.model_routes.values())]
    if config.passthrough_route is not None:
        rows.append(_route_row("(any other)", config.passthrough_route))
    table = aligned([("route", "workload", "ttft", "tpot", "total", "tiers"), *rows])
    return "\n".join([verdict, *table, *notes(config)])


def _route_row(name: str, route: Route) -> tuple[str, ...]:
    ttft = _ttft(route.ttft) if route.ttft else "-"
    tpot, total = (duration(limit.budget) if limit else "-" for limit in (route.tpot, route.total))
    return name, route.workload, ttft, tpot, total, " > ".join(map(_tier, route.tiers))


def _ttft(ttft: Ttft) -> str:
    growth = f" + {duration(ttft.per_1k_tokens)} per 1k tokens" if ttft.per_1k_tokens else ""
    return f"{duration(ttft.budget)}{growth} at {ttft.target * 100:g}%"


def _tier(tier: Tier) -> str:
    pool = f"{tier.pool}:{tier.adapter}" if tier.adapter else tier.pool
    if tier.when is None:
        return pool
    conditions = (f"{name} {str(condition).lower()}" for name, condition in tier.when.model_dump().items())
    return f"{pool} ({', '.join(conditions)})"


def schema(args: argparse.Namespace) -> int:
    print(json.dumps(schemas.schema(CONFIG), indent=2))
    return 0


# ---------------------------------------------------------------- keys


def keys(args: argparse.Namespace) -> int:
    """Raises ConfigError for every mistake of the operator."""
    config = load(args.files, os.environ, CONFIG)
    if config.state.keys == "config":
        text = "a gateway would look there in its file alone: write state: {dir: ..., keys: dir}, or redis"
        raise ConfigError([f"state.keys is 'config'; {text}"])
    store = operator_store(config.state)
    if args.action == "add":
        text, key = _key(config, args)
        if not _asked(store.add(key)):
            raise ConfigError([f"there is a key '{key.name}' already; revoke it first"])
        print(text)
        print("firsttoken: this is the only time that the key is shown", file=sys.stderr)
    elif args.action == "revoke":
        if not _asked(store.revoke(args.name)):
            if in_file(config, args.name):
                raise ConfigError([f"the key '{args.name}' is in the configuration file: delete it there"])
            names = _asked(store.read()).by_name
            raise ConfigError([f"there is no key '{args.name}'{nearest(args.name, names)}"])
        print(f"revoked {args.name}")
    else:
        stored = _asked(store.read())
        print("\n".join(aligned([COLUMNS, *map(_key_row, stored.keys)])))
        for name in _invalid(config, stored):
            text = "is refused: the configuration file has or had its name, or it was revoked; revoke it"
            print(f"firsttoken: the stored key '{name}' {text}", file=sys.stderr)
    return 0


def _invalid(config: Config, stored: StoredKeys) -> list[str]:
    return [key.name for key in stored.keys if key.sha256 in stored.refused or is_hidden(config, key)]


def _key_row(key: Key) -> tuple[str, ...]:
    routes = None if key.routes is None else ",".join(key.routes)
    cells = (key.name, routes, *(getattr(key, name) for name in SETTINGS[1:]))
    return tuple("-" if cell is None else str(cell) for cell in cells)


def _key(config: Config, args: argparse.Namespace) -> tuple[str, Key]:
    if in_file(config, args.name):
        raise ConfigError([f"there is a key '{args.name}' in the configuration file; take another name"])
    routes = None if args.routes is None else [name.strip() for name in args.routes.split(",")]
    try:
        return new_key(config, args.name, {"routes": routes, **{name: getattr(args, name) for name in SETTINGS[1:]}})
    except InvalidKey as error:
        problems = [f"--{setting.replace('_', '-').replace('.', '-')}: {text}" for setting, text in error.problems]
        raise ConfigError(problems) from None


def _asked(question: Coroutine[Any, Any, T]) -> T:
    """Raises ConfigError."""
    try:
        return asyncio.run(question)
    except StoreFull:
        raise ConfigError([f"there are {MAX_KEYS} keys; revoke some"]) from None
    except Unavailable as error:
        raise ConfigError([str(error)]) from None
