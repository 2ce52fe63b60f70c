"""Commands on a configuration file: `firsttoken check`, `schema` and `keys`.

`check`: counts, routes and notes of a valid configuration, and budgets against the profile in `state.dir`; with --live
its endpoints too. `keys`: adds, revokes and
lists API keys in the Redis of a configuration. A new key is printed once: only the SHA-256 is stored. `list` shows
neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from gateway.admission import key_store
from gateway.cli.tables import aligned
from gateway.cluster.redis_client import create_client, error_text
from gateway.config import schema as schemas
from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.field_types import parse_redis_url
from gateway.config.loading import load
from gateway.config.models import Config, Key
from gateway.config.notes import duration, notes
from policies.routes.route import Route, Tier, Ttft

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")

KIND = "ft-"  # prefix of every key, so secret scanners recognise leaked keys
PATIENCE = 5.0  # s
COLUMNS = ("name", "routes", "requests/min", "tokens/min", "at a time", "USD/month", "cache group", "weight")
LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "concurrent_requests", "monthly_cost_usd", "cache_group"),
    "weight",
)


def check(args: argparse.Namespace) -> int:
    """Raises ConfigError if the configuration is invalid, if a budget is infeasible by the profile in `state.dir`, or
    with --live if an endpoint is not as configured."""
    config = load(args.files, os.environ)
    if not args.live and (args.no_tokens or args.timeout is not None):
        raise ConfigError(["firsttoken: --no-tokens and --timeout belong to --live: add --live"])
    print(report(config))
    if config.state.dir is not None:
        from gateway.cli.live.known_profile import check_budgets

        check_budgets(config)
    if args.live:
        from gateway.cli.live.live_check import TIMEOUT, live_check

        live_check(config, tokens=not args.no_tokens, timeout=args.timeout or TIMEOUT)
    return 0


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
    print(json.dumps(schemas.schema(), indent=2))
    return 0


# ---------------------------------------------------------------- keys


def keys(args: argparse.Namespace) -> int:
    """Raises ConfigError for every mistake of the operator."""
    config = load(args.files, os.environ)
    if config.state.redis is None or config.state.keys != "redis":
        raise ConfigError(
            ["state.keys is not 'redis': a gateway would not look there; write state: {redis: ..., keys: redis}"]
        )
    if args.action == "add":
        text = KIND + secrets.token_urlsafe(32)
        key = _key(config, args, text)
        if not _asked(config, lambda redis: key_store.add(redis, key)):
            raise ConfigError([f"there is a key '{key.name}' already; revoke it first"])
        print(text)
        print("firsttoken: this is the only time that the key is shown", file=sys.stderr)
    elif args.action == "revoke":
        if any(key.name == args.name for key in config.keys):
            raise ConfigError([f"the key '{args.name}' is in the configuration file, not in Redis: delete it there"])
        if not _asked(config, lambda redis: key_store.revoke(redis, args.name)):
            names = [key.name for key in _asked(config, key_store.all_keys)]
            raise ConfigError([f"there is no key '{args.name}'{did_you_mean(args.name, names)}"])
        print(f"revoked {args.name}")
    else:
        print("\n".join(aligned([COLUMNS, *map(_key_row, _asked(config, key_store.all_keys))])))
    return 0


def _key_row(key: Key) -> tuple[str, ...]:
    routes = None if key.routes is None else ",".join(key.routes)
    cells = (key.name, routes, *(getattr(key, name) for name in LIMITS))
    return tuple("-" if cell is None else str(cell) for cell in cells)


def _key(config: Config, args: argparse.Namespace, text: str) -> Key:
    routes = None if args.routes is None else [name.strip() for name in args.routes.split(",")]
    known = [route.name for route in config.all_routes]
    for route in routes or ():
        if route not in known:
            raise ConfigError([f"--routes: no route '{route}'{did_you_mean(route, known)}"])
    if any(key.name == args.name for key in config.keys):
        raise ConfigError([f"there is a key '{args.name}' in the configuration file; take another name"])
    limits = {name: getattr(args, name) for name in LIMITS}
    digest = sha256(text.encode()).hexdigest()
    try:
        return Key.model_validate({"name": args.name, "sha256": digest, "routes": routes, **limits})
    except ValidationError as error:
        raise ConfigError(
            [f"--{'-'.join(map(str, one['loc'])).replace('_', '-')}: {one['msg']}" for one in error.errors()]
        ) from None


def _asked(config: Config, ask: Callable[[Redis], Awaitable[T]]) -> T:
    """Raises ConfigError, without the password."""
    assert config.state.redis is not None
    url = parse_redis_url(config.state.redis.get_secret_value())

    async def once() -> T:
        client = create_client(url)
        try:
            async with asyncio.timeout(PATIENCE):
                return await ask(client)
        finally:
            await client.aclose()

    try:
        return asyncio.run(once())
    except Exception as error:
        raise ConfigError([f"redis {url.redacted}: {error_text(error, url)}"]) from None
