"""`firsttoken top`: a running gateway in a terminal, read through the admin port alone.

Rules:
- Figures are differences between two polls. A poll is three small GETs.
- Counts only grow. A smaller count belongs to a new process, which began at zero: the whole count is new.
- A quantile is interpolated linearly within a bucket, as in Prometheus; beyond the last bound the bound is the
  result. Units are milliseconds, as in the replies.
- A URL without any answer is an error (exit code 2). A gateway that becomes unreachable is reported and polled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import accumulate
from time import sleep, strftime, time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gateway.config.config_errors import ConfigError

PATIENCE = 5.0  # s to wait for an answer of the gateway
WIDTH = 130  # columns, for an output without a width
SHOWN = 8  # slowest requests
STATES = {"up": "green", "probing": "yellow", "down": "red"}
ROUTES = ("route", "req/s", "p50", "p95", "p99", "budget", "met", "held", "shed/s", "failed/s", "answered by")
ENDPOINTS = ("endpoint", "state", "in flight", "ahead", "running", "waiting", "KV", "actual/predicted", "< p90", "seen")
SLOWEST = ("slowest lately", "route", "endpoint", "TTFT", "budget", "most of it in", "id")
LEFT = {"route", "answered by", "endpoint", "state", "slowest lately", "most of it in", "id"}
SHED, FAILED = ("shed",), ("failed", "upstream_broke", "internal", "unavailable")
Counts = Mapping[str, float]
Row = tuple[RenderableType, ...]


class Gone(Exception):
    """The address does not answer, or does not answer like a gateway."""


@dataclass(frozen=True, slots=True)
class Look:
    """The replies of the admin port at one moment."""

    figures: Mapping[str, Any]
    fleet: Sequence[Mapping[str, Any]]
    slowest: Sequence[Mapping[str, Any]]


def top(args: argparse.Namespace) -> int:
    """`args`: admin, interval, once. Runs until Ctrl-C; raises ConfigError."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, no_color=True)
    try:
        first = look(args.admin)
        if args.once:
            sleep(args.interval)
            console.print(frame(args.admin, first, look(args.admin)))
            return 0
    except Gone as gone:
        raise ConfigError([f"{args.admin}: this is not the admin port of a running gateway: {gone}"]) from None
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, screen=True) as screen:
            _watch(args, first, lambda shown: screen.update(shown, refresh=True), live=True)
    else:
        _watch(args, first, console.print, live=False)
    return 0


def _watch(args: argparse.Namespace, before: Look, show: Callable[..., None], *, live: bool) -> None:
    """Outside a terminal a repeated message is printed once."""
    shown: RenderableType = Text(f"{args.admin}: the first figures come in {args.interval:g} s")
    show(shown)
    away = False
    while True:
        sleep(args.interval)
        try:
            now = look(args.admin)
        except Gone as gone:
            text = Text(f"{args.admin} has gone away at {strftime('%H:%M:%S')} and is tried again: {gone}", "bold red")
            if live:
                show(Group(text, shown))
            elif not away:
                show(text)
            away = True
        else:
            shown, before, away = frame(args.admin, before, now), now, False
            show(shown)


def look(admin: str) -> Look:
    """Raises Gone."""
    figures = _read(admin, "/routes")
    if not (isinstance(figures, dict) and "routes" in figures):
        raise Gone("it says something else")
    return Look(figures, _read(admin, "/fleet"), _read(admin, f"/requests?slowest={SHOWN}"))


def _read(admin: str, path: str) -> Any:
    try:
        with urlopen(f"{admin.rstrip('/')}{path}", timeout=PATIENCE) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise Gone(f"HTTP {error.code}") from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise Gone(error.reason if isinstance(error, URLError) else error) from None


def grown(before: Counts, after: Counts) -> Counts:
    return {name: value - was if value >= (was := before.get(name, 0.0)) else value for name, value in after.items()}


def buckets(
    before: Mapping[str, Sequence[float]] | None, after: Mapping[str, Sequence[float]]
) -> tuple[Sequence[float], Sequence[float]]:
    """Upper bounds, and the new counts of each bucket; the last bucket has no bound."""
    bounds, counts = after["le"], after["counts"]
    if before is None or not before["counts"]:
        return bounds, counts
    if before["le"] != bounds:  # another configuration: new and old counts cannot be separated
        return bounds, [0.0] * len(counts)
    since = [now - was for now, was in zip(counts, before["counts"], strict=True)]
    return bounds, counts if min(since) < 0 else since


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """None where nothing was counted."""
    cumulated = list(accumulate(counts))
    if not bounds or not cumulated or not cumulated[-1]:
        return None
    rank = q * cumulated[-1]
    at = next(i for i, total in enumerate(cumulated) if total >= rank and counts[i])
    if at == len(bounds):
        return bounds[-1]
    low, below = (bounds[at - 1], cumulated[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / counts[at]


# ---------------------------------------------------------------- tables


def frame(admin: str, before: Look, now: Look) -> RenderableType:
    """All tables."""
    summary = gateway_summary(before.figures["gateway"], now.figures["gateway"])
    parts: list[RenderableType] = [
        Text(f"{admin}  {strftime('%H:%M:%S')}   {summary}"),
        text_table(ROUTES, route_rows(before.figures, now.figures)),
        text_table(ENDPOINTS, map(_endpoint, now.fleet)),
    ]
    parts += [Text(f"{entry['endpoint']['id']}: {entry['why']}", "yellow") for entry in now.fleet if entry["why"]]
    if now.slowest:
        parts.append(text_table(SLOWEST, map(_slow, now.slowest)))
    return Group(*parts)


def gateway_summary(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The gateway itself, in a line. The longest stall of the event loop is known by a bucket's bound."""
    parts = [f"{after['in_progress']:.0f} in progress"] if "in_progress" in after else []
    bounds, counts = buckets(before["loop_lag_ms"], after["loop_lag_ms"])
    if seen := [i for i, count in enumerate(counts) if count]:
        lag = f"under {bounds[seen[-1]]:g} ms" if seen[-1] < len(bounds) else "over 1 s"
        stalls = grown({"": before["loop_stalls"]}, {"": after["loop_stalls"]})[""]
        late = f"{stalls:.0f} {'stall' if stalls == 1 else 'stalls'}" if stalls else "no stall"
        parts.append(f"loop lag {lag}, {late}")
    parts += [f"{after[name]:.0f} {name}" for name in ("workers", "replicas") if name in after]
    if "redis_up" in after:
        parts.append(f"redis {'up' if after['redis_up'] else 'DOWN'}")
    return " · ".join(parts)


def text_table(names: Sequence[str], rows: Iterable[Row], *, title: str | None = None, wrapped: str = "") -> Table:
    """`wrapped`: the column that may take several lines; any other is shortened where space is scarce."""
    columns = [
        Column(name, justify="left" if name in LEFT else "right", no_wrap=name != wrapped, overflow="ellipsis")
        for name in names
    ]
    table = Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    table.header_style = "bold"
    for row in rows:
        table.add_row(*row)
    return table


def route_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Row]:
    """In the order of the configuration."""
    seconds = max(after["at"] - before["at"], 1e-3)
    known = {route["route"]: route for route in before["routes"]}
    return [_route(known.get(route["route"], {}), route, seconds) for route in after["routes"]]


def _route(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Row:
    outcomes = grown(before.get("requests", {}), after["requests"])
    shed, failed = (sum(outcomes.get(name, 0.0) for name in names) / seconds for names in (SHED, FAILED))
    pools = {pool: count for pool, count in grown(before.get("pools", {}), after["pools"]).items() if pool != "-"}
    judged = grown(before.get("slo", {}).get("ttft", {}), after["slo"]["ttft"])
    met = judged.get("true", 0.0) / sum(judged.values()) if any(judged.values()) else None
    bounds, counts = buckets(before.get("ttft_ms"), after["ttft_ms"])
    p50, p95, p99 = (quantile(bounds, counts, q) for q in (0.5, 0.95, 0.99))
    budget, target = after["ttft_budget_ms"], after["ttft_target"]
    grows = after.get("ttft_budget_grows", False)  # a gateway before the setting does not say
    late = budget is not None and p95 is not None and p95 > budget and not grows
    short = met is not None and target is not None and met < target
    largest_first = sorted(pools.items(), key=lambda item: -item[1])
    return (
        Text(after["route"]),
        f"{sum(outcomes.values()) / seconds:.1f}",
        ms(p50),
        Text(ms(p95), "red" if late else ""),
        ms(p99),
        f"{ms(budget)}+" if grows else ms(budget),
        Text(share(met), "red" if short else ""),
        f"{after['held']:.0f}",
        f"{shed:.1f}",
        f"{failed:.1f}",
        Text("  ".join(f"{pool} {count / sum(pools.values()):.0%}" for pool, count in largest_first if count)),
    )


def _endpoint(entry: Mapping[str, Any]) -> Row:
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


def _slow(record: Mapping[str, Any]) -> Row:
    name, spent = largest_stage(record)
    waited = record["ttft_ms"] if record["ttft_ms"] is not None else record["total_ms"]
    shown = ms(waited) if record["ttft_ms"] is not None else f"none in {ms(waited)}"
    return (
        f"{age(time() - record['wall'])} ago",
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
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
