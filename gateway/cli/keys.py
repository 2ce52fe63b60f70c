"""`firsttoken keys`: adds, revokes and lists API keys in the Redis of a configuration.

A new key is printed once: only the SHA-256 is stored. `list` shows neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from gateway.cli.check import aligned
from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.loading import load
from gateway.config.models import PASSTHROUGH, Config, Key

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")

KIND = "ft-"  # prefix of every key, so secret scanners recognise leaked keys
PATIENCE = 5.0  # s
COLUMNS = ("name", "routes", "requests/min", "tokens/min", "at a time", "USD/month", "cache group")


def keys(args: argparse.Namespace) -> int:
    """Raises ConfigError for whatever the operator can mend."""
    config = load(args.files, os.environ)
    if config.state.redis is None or config.state.keys != "redis":
        raise ConfigError(
            ["state.keys is not 'redis': a gateway would not look there; write state: {redis: ..., keys: redis}"]
        )
    if args.action == "add":
        return _add(config, args)
    if args.action == "revoke":
        return _revoke(config, args.name)
    return _list(config)


def _add(config: Config, args: argparse.Namespace) -> int:
    from gateway.admission import key_store as keyring

    text = KIND + secrets.token_urlsafe(32)
    key = _key(config, args, text)
    if not _asked(config, lambda redis: keyring.add(redis, key)):
        raise ConfigError([f"there is a key '{key.name}' already; revoke it first"])
    print(text)
    print("firsttoken: this is the only time that the key is shown", file=sys.stderr)
    return 0


def _revoke(config: Config, name: str) -> int:
    from gateway.admission import key_store as keyring

    if any(key.name == name for key in config.keys):
        raise ConfigError([f"the key '{name}' is in the configuration file, not in Redis: delete it there"])
    if not _asked(config, lambda redis: keyring.revoke(redis, name)):
        names = [key.name for key in _asked(config, keyring.all_keys)]
        raise ConfigError([f"there is no key '{name}'{did_you_mean(name, names)}"])
    print(f"revoked {name}")
    return 0


def _list(config: Config) -> int:
    from gateway.admission import key_store as keyring

    rows = [
        tuple(
            "-" if cell is None else str(cell)
            for cell in (
                key.name,
                None if key.routes is None else ",".join(key.routes),
                key.requests_per_minute,
                key.tokens_per_minute,
                key.concurrent_requests,
                key.monthly_cost_usd,
                key.cache_group,
            )
        )
        for key in _asked(config, keyring.all_keys)
    ]
    print("\n".join(aligned([COLUMNS, *rows])))
    return 0


def _key(config: Config, args: argparse.Namespace, text: str) -> Key:
    routes = None if args.routes is None else [name.strip() for name in args.routes.split(",")]
    known = [*config.routes, *([PASSTHROUGH] if config.passthrough else [])]
    for route in routes or ():
        if route not in known:
            raise ConfigError([f"--routes: no route '{route}'{did_you_mean(route, known)}"])
    if any(key.name == args.name for key in config.keys):
        raise ConfigError([f"there is a key '{args.name}' in the configuration file; take another name"])
    limits = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "monthly_cost_usd", "cache_group")
    said = {name: getattr(args, name) for name in limits if getattr(args, name) is not None}
    digest = sha256(text.encode()).hexdigest()
    try:
        return Key.model_validate({"name": args.name, "sha256": digest, "routes": routes, **said})
    except ValidationError as error:
        raise ConfigError(
            [f"--{'-'.join(map(str, one['loc'])).replace('_', '-')}: {one['msg']}" for one in error.errors()]
        ) from None


def _asked(config: Config, ask: Callable[[Redis], Awaitable[T]]) -> T:
    """Raises ConfigError, without the password."""
    from gateway.cluster.redis_client import create_client, error_text
    from gateway.config.redis_url import parse_redis_url

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
