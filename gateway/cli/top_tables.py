"""A frame of `firsttoken top`, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli.top_deltas import GatewayView, RouteView

STATES = {"up": "green", "probing": "yellow", "down": "red"}
ROUTES = ("route", "req/s", "p50", "p95", "p99", "budget", "met", "held", "shed/s", "failed/s", "answered by")
ENDPOINTS = ("endpoint", "state", "in flight", "ahead", "running", "waiting", "KV", "actual/predicted", "< p90", "seen")
SLOWEST = ("slowest lately", "route", "endpoint", "TTFT", "budget", "most of it in", "id")
LEFT = {"route", "answered by", "endpoint", "state", "slowest lately", "most of it in", "id"}


def frame(
    title: str,
    whole: GatewayView,
    routes: Sequence[RouteView],
    fleet: Sequence[Mapping[str, Any]],
    slowest: Sequence[Mapping[str, Any]],
    now: float,
) -> RenderableType:
    """`now`: Unix time."""
    parts: list[RenderableType] = [Text(f"{title}   {said_of(whole)}"), _table(ROUTES, map(_route, routes))]
    parts.append(_table(ENDPOINTS, map(_endpoint, fleet)))
    parts += [Text(f"{entry['endpoint']['id']}: {entry['why']}", style="yellow") for entry in fleet if entry["why"]]
    if slowest:
        parts.append(_table(SLOWEST, (_slow(record, now) for record in slowest)))
    return Group(*parts)


def said_of(whole: GatewayView) -> str:
    """The gateway itself, in a line."""
    said = whole.said
    parts = [f"{said['in_progress']:.0f} in progress"] if "in_progress" in said else []
    if whole.lag is not None:
        late = f"{whole.stalls} {'stall' if whole.stalls == 1 else 'stalls'}" if whole.stalls else "no stall"
        parts.append(f"loop lag {'over 1 s' if whole.lag == float('inf') else f'under {whole.lag:g} ms'}, {late}")
    parts += [f"{said[name]:.0f} {name}" for name in ("workers", "replicas") if name in said]
    if "redis_up" in said:
        parts.append(f"redis {'up' if said['redis_up'] else 'DOWN'}")
    return " · ".join(parts)


def _table(names: Sequence[str], rows: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _route(view: RouteView) -> tuple[RenderableType, ...]:
    late = view.budget is not None and view.p95 is not None and view.p95 > view.budget
    short = view.attainment is not None and view.target is not None and view.attainment < view.target
    return (
        Text(view.route),
        f"{view.per_second:.1f}",
        ms(view.p50),
        Text(ms(view.p95), "red" if late else ""),
        ms(view.p99),
        ms(view.budget),
        Text(share(view.attainment), "red" if short else ""),
        str(view.held),
        f"{view.shed:.1f}",
        f"{view.failed:.1f}",
        Text("  ".join(f"{pool} {part:.0%}" for pool, part in view.pools.items())),
    )


def _endpoint(entry: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    load, calibration = entry["load"], entry["calibration"]
    low, middle, high = entry["error"]
    state, dissent = load["health"], [w for w, h in entry.get("health_by_worker", {}).items() if h != load["health"]]
    again = f", again in {entry['tried_again_in_s']:.0f} s" if entry["tried_again_in_s"] else ""
    otherwise = f" (not to worker {', '.join(dissent)})" if dissent else ""
    return (
        Text(entry["endpoint"]["id"]),
        Text(f"{state}{again}{otherwise}", STATES.get(state, "")),
        str(load["in_flight"]),
        f"{load['ahead']:.0f}",
        str(load["running"]),
        str(load["waiting"]),
        "–" if entry["scraped_s_ago"] is None else f"{load['kv_usage']:.0%}",
        f"{middle:.2f} ({low:.2f} to {high:.2f})" if entry["samples"] else "–",
        share(calibration["under_p90"] if calibration else None),
        str(entry["samples"]),
    )


def _slow(record: Mapping[str, Any], now: float) -> tuple[RenderableType, ...]:
    name, spent = largest_stage(record)
    waited = record["ttft_ms"] if record["ttft_ms"] is not None else record["total_ms"]
    shown = ms(waited) if record["ttft_ms"] is not None else f"none in {ms(waited)}"
    return (
        f"{age(now - record['wall'])} ago",
        Text(record["route"]),
        Text(record["endpoint"]),
        Text(shown, "red" if record["ttft_met"] is False else ""),
        ms(record["ttft_budget_ms"]),
        f"{name} {ms(spent)}" if name else "",
        Text(record["request_id"]),
    )


def largest_stage(record: Mapping[str, Any]) -> tuple[str, float]:
    """The longest stage before the first token."""
    stages = [(spent, name) for name, spent in record["stages_ms"].items() if name != "stream"]
    spent, name = max(stages, default=(0.0, ""))
    return name, spent


def ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}" if value < 1 else "100%"


def age(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
