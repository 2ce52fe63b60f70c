"""What `firsttoken check` says of a configuration that holds: counts, routes, and what is without effect."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config.models import Config
from policies.routes.route import Route, Tier

_UNITS = ((3600, "h"), (60, "m"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def report(config: Config) -> str:
    """Several lines, the first of which is the verdict."""
    pools, endpoints, routes = len(config.pools), len(config.urls()), len(config.routes)
    verdict = f"ok: {_count(pools, 'pool')}, {_count(endpoints, 'endpoint')}, {_count(routes, 'route')}"
    return "\n".join([verdict, *_table(config), *notes(config)])


def notes(config: Config) -> list[str]:
    """What nobody should be misled about."""
    lines = [f"note: {path} is accepted but not yet acted on by this version" for path in config.not_yet()]
    if not config.server.admin.loopback:
        lines.append(f"note: server.admin {config.server.admin} asks for no key; keep it on a private network")
    if config.state.keys == "redis" and config.state.cache_secret is None:
        lines.append(
            "note: keys in Redis that share a cache_group need state.cache_secret: without it every key that joins or"
            " leaves the group empties its caches"
        )
    return lines


def duration(seconds: float) -> str:
    """0.8 -> `800ms`: the largest unit of which it is a whole number, or at least one."""
    for size, unit in _UNITS:
        amount = round(seconds / size, 6)
        if amount >= 1 and (amount == int(amount) or size <= 1):
            return f"{amount:g}{unit}"
    return f"{seconds:g}s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(config: Config) -> list[str]:
    rows = [_row(name, route) for name, route in config.routes.items()]
    if config.passthrough_route is not None:
        rows.append(_row("(any other)", config.passthrough_route))
    return aligned([("route", "workload", "ttft", "tpot", "total", "tiers"), *rows])


def _row(name: str, route: Route) -> tuple[str, ...]:
    ttft = f"{duration(route.ttft.budget)} at {route.ttft.target * 100:g}%" if route.ttft else "-"
    tpot, total = (duration(limit.budget) if limit else "-" for limit in (route.tpot, route.total))
    return name, route.workload, ttft, tpot, total, " > ".join(_tier(tier) for tier in route.tiers)


def _tier(tier: Tier) -> str:
    if tier.when is None:
        return tier.pool
    tests = (f"{name} {str(test).lower()}" for name, test in tier.when.model_dump().items())
    return f"{tier.pool} ({', '.join(tests)})"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
