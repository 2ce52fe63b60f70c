"""`firsttoken check`: counts, routes and notes of a valid configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence

from gateway.config.loading import load
from gateway.config.models import Config
from policies.routes.route import Route, Tier

_UNITS = ((3600, "h"), (60, "m"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def check(args: argparse.Namespace) -> int:
    """Raises ConfigError if the configuration is invalid."""
    print(report(load(args.files, os.environ)))
    return 0


def report(config: Config) -> str:
    """Several lines, the verdict first."""
    pools, endpoints, routes = len(config.pools), len(config.urls()), len(config.routes)
    verdict = f"ok: {_count(pools, 'pool')}, {_count(endpoints, 'endpoint')}, {_count(routes, 'route')}"
    rows = [_row(name, route) for name, route in config.routes.items()]
    if config.passthrough_route is not None:
        rows.append(_row("(any other)", config.passthrough_route))
    table = aligned([("route", "workload", "ttft", "tpot", "total", "tiers"), *rows])
    return "\n".join([verdict, *table, *notes(config)])


def notes(config: Config) -> list[str]:
    """Valid settings with an easily overlooked effect."""
    lines = [f"note: {path} is accepted but has no effect in this version" for path in config.without_effect()]
    if not config.server.admin.loopback:
        lines.append(f"note: server.admin {config.server.admin} requires no key; keep it on a private network")
    if config.state.keys == "redis" and config.state.cache_secret is None:
        lines.append(
            "note: keys in Redis that share a cache_group need state.cache_secret: without it every key that joins or"
            " leaves the group empties its caches"
        )
    return lines


def duration(seconds: float) -> str:
    """0.8 -> `800ms`: the largest unit with a whole number, or a number of at least 1."""
    for size, unit in _UNITS:
        amount = round(seconds / size, 6)
        if amount >= 1 and (amount == int(amount) or size <= 1):
            return f"{amount:g}{unit}"
    return f"{seconds:g}s"


def aligned(rows: Sequence[tuple[str, ...]], left: Collection[int] | None = None) -> list[str]:
    """Rows of a text table. `left`: columns that stand left, None: all; the other columns stand right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if left is None or at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(name: str, route: Route) -> tuple[str, ...]:
    ttft = f"{duration(route.ttft.budget)} at {route.ttft.target * 100:g}%" if route.ttft else "-"
    tpot, total = (duration(limit.budget) if limit else "-" for limit in (route.tpot, route.total))
    return name, route.workload, ttft, tpot, total, " > ".join(map(_tier, route.tiers))


def _tier(tier: Tier) -> str:
    if tier.when is None:
        return tier.pool
    conditions = (f"{name} {str(condition).lower()}" for name, condition in tier.when.model_dump().items())
    return f"{tier.pool} ({', '.join(conditions)})"
