"""Tables of `firsttoken top` and its keys, from the replies of the admin port.

Rules:
- The gateway computes all figures. Units are milliseconds, as in the replies.
- A table that is wider than the screen loses whole columns, in a given order, before a cell is cut.

Keys change the order and the filter of the tables, or end the command.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from time import sleep, strftime, time
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from gateway.cli.foreground import has_keyboard

ESCAPE, ERASE, ENTER = "\x1b", ("\x7f", "\b"), ("\r", "\n")
LONGEST = 40  # characters of a filter
NOW = "now"  # the last 10 s
WINDOWS = (NOW, "5m", "1h")
KEYS = "q quit   w window: {window}   s sort: {sort}   / filter: {filter}"


class Sort(StrEnum):
    """Orders of routes and endpoints."""

    CONFIGURED = "configured"
    WORST = "worst"  # lowest attainment first; endpoints that are down first, then the slowest by their prediction
    TRAFFIC = "traffic"  # most requests first
    NAME = "name"


@dataclass(frozen=True, slots=True)
class View:
    """Order and filter of the tables. `filter`: text within a name of a route, pool, endpoint or request, any case."""

    sort: Sort = Sort.CONFIGURED
    filter: str = ""
    window: str = NOW
    typing: bool = False  # keys are text of the filter
    ended: bool = False

    def after(self, key: str) -> View:
        """The view after a key: one character, or the sequence of a special key."""
        if self.typing:
            return self._after_typed(key)
        if key in ("q", "Q"):
            return replace(self, ended=True)
        if key == "s":
            orders = list(Sort)
            return replace(self, sort=orders[(orders.index(self.sort) + 1) % len(orders)])
        if key == "w":
            return replace(self, window=WINDOWS[(WINDOWS.index(self.window) + 1) % len(WINDOWS)])
        if key == ESCAPE:
            return replace(self, filter="")
        return replace(self, typing=True) if key == "/" else self

    def _after_typed(self, key: str) -> View:
        if key in ENTER:
            return replace(self, typing=False)
        if key == ESCAPE:
            return replace(self, typing=False, filter="")
        if key in ERASE:
            return replace(self, filter=self.filter[:-1])
        return replace(self, filter=(self.filter + key)[:LONGEST]) if len(key) == 1 and key.isprintable() else self

    def shows(self, *names: str) -> bool:
        return any(self.filter.lower() in name.lower() for name in names)

    @property
    def help(self) -> str:
        """The line below the tables."""
        return KEYS.format(
            window=self.window, sort=self.sort, filter=f"{self.filter}{'_' if self.typing else ''}" or "none"
        )


class Keyboard:
    """Keys pressed at the terminal of standard input, read without Enter. Without a terminal there are none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def wait(self, seconds: float) -> list[str]:
        """Keys, as soon as there are any; none after the time."""
        if self._fd is None:
            sleep(seconds)
            return []
        if not select.select([self._fd], [], [], seconds)[0]:
            return []
        text = os.read(self._fd, 256).decode(errors="ignore")
        if not text:  # the terminal has gone
            self._fd = None
        return [text] if text.startswith(ESCAPE) else list(text)


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """The keyboard; the terminal is left as it was."""
    if not has_keyboard():
        yield Keyboard(None)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


TROUBLE = {"fails": "red", "sheds": "red", "late": "red", "recovered": "yellow"}
STATES = {"up": "green", "probing": "yellow", "down": "red", "asleep": "blue", "draining": "blue"}
ROUTES = (
    *("route", "met", "goodput", "req/s", "p50", "p95", "p99", "budget", "TPOT", "stall", "hit"),
    *("held", "shed/s", "failed/s", "answered by"),
)
INCIDENTS = ("incident", "route", "cause", "time over", "since", "for example")
ENDPOINTS = ("endpoint", "state", "in flight", "ahead", "running", "waiting", "KV", "actual/predicted", "< p90", "seen")
SLOWEST = ("slowest lately", "route", "endpoint", "TTFT", "budget", "most of it in", "id")
LEFT = {
    "cause",
    "incident",
    "for example",
    "route",
    "answered by",
    "endpoint",
    "state",
    "slowest lately",
    "most of it in",
    "id",
}
DROPPED = {  # of a table without room, in this order
    ROUTES: ("stall", "TPOT", "hit", "goodput", "p99", "answered by", "p50", "held", "failed/s"),
    INCIDENTS: ("for example", "time over", "since"),
    ENDPOINTS: ("seen", "actual/predicted", "running", "< p90", "ahead"),
    SLOWEST: ("endpoint", "budget", "most of it in"),
}
GAP = 2  # columns beside a cell
Row = tuple[RenderableType, ...]


NO_VERDICTS: Mapping[str, Any] = {"summary": "", "routes": ()}


@dataclass(frozen=True, slots=True)
class Look:
    """The replies of the admin port at one moment."""

    figures: Mapping[str, Any]  # GET /windows
    fleet: Sequence[Mapping[str, Any]]
    slowest: Sequence[Mapping[str, Any]]
    incidents: Sequence[Mapping[str, Any]] = ()  # the worst first
    verdicts: Mapping[str, Any] = field(default_factory=lambda: NO_VERDICTS)  # GET /verdicts


# ---------------------------------------------------------------- tables


def frame(admin: str, now: Look, view: View, width: int) -> RenderableType:
    """All tables, at most `width` columns wide where their names allow it."""
    summary = gateway_summary(now.figures["gateway"])
    shown = [entry for entry in now.fleet if view.shows(entry["endpoint"]["id"])]
    endpoints = ordered(shown, view.sort, ENDPOINT_ORDERS)
    slowest = [one for one in now.slowest if view.shows(one["route"], one["endpoint"], one["request_id"])]
    incidents = [one for one in now.incidents if view.shows(one["route"], one["culprit"], one["request_id"])]
    routes = [route for route in now.figures["routes"] if view.shows(route["route"], *route["figures"]["pools"])]
    parts: list[RenderableType] = [
        Text(f"{admin}  {strftime('%H:%M:%S')}   {summary}{_span(now.figures)}"),
        *_verdicts(now.verdicts, view),
        *_incidents(incidents, width),
        fitting(ROUTES, map(route_row, ordered(routes, view.sort, ROUTE_ORDERS)), width),
        fitting(ENDPOINTS, map(_endpoint, endpoints), width),
    ]
    parts += [Text(f"{entry['endpoint']['id']}: {entry['why']}", "yellow") for entry in endpoints if entry["why"]]
    if slowest:
        parts.append(fitting(SLOWEST, map(_slow, slowest), width))
    return Group(*parts)


def gateway_summary(after: Mapping[str, Any]) -> str:
    """The gateway itself, in a line. The longest stall of the event loop is known by a bucket's bound."""
    parts = [f"{after['in_progress']:.0f} in progress"] if "in_progress" in after else []
    bounds, counts = after["loop_lag_ms"]["le"], after["loop_lag_ms"]["counts"]
    if seen := [i for i, count in enumerate(counts) if count]:
        lag = f"under {bounds[seen[-1]]:g} ms" if seen[-1] < len(bounds) else "over 1 s"
        stalls = after["loop_stalls"]
        late = f"{stalls:.0f} {'stall' if stalls == 1 else 'stalls'}" if stalls else "no stall"
        parts.append(f"loop lag {lag}, {late}")
    members = [(after[f"{name}s"], name) for name in ("worker", "replica") if f"{name}s" in after]
    parts += [f"{count:.0f} {name}{'s' if count != 1 else ''}" for count, name in members]
    if "redis_up" in after:
        parts.append(f"redis {'up' if after['redis_up'] else 'DOWN'}")
    return " · ".join(parts)


def fitting(names: tuple[str, ...], rows: Iterable[Row], width: int) -> Table:
    """The table without the columns for which there is no room."""
    cells = list(rows)
    needed = {
        name: max(cell_len(name), *(cell_len(str(row[at])) for row in cells), 0) + GAP for at, name in enumerate(names)
    }
    for name in DROPPED[names]:
        if sum(needed.values()) > width:
            del needed[name]
    kept = [at for at, name in enumerate(names) if name in needed]
    return text_table(tuple(needed), [tuple(row[at] for at in kept) for row in cells])


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


Orders = Mapping[Sort, Callable[[Any], tuple[float | str, ...]]]
ROUTE_ORDERS: Orders = {
    Sort.WORST: lambda route: (_met(route), -(route["figures"]["ttft_ms"]["p95"] or 0.0)),
    Sort.TRAFFIC: lambda route: (-route["figures"]["requests_per_s"],),
    Sort.NAME: lambda route: (route["route"],),
}
ENDPOINT_ORDERS: Orders = {
    Sort.WORST: lambda entry: (entry["load"]["health"] == "up", -entry["error"][1] if entry["samples"] else inf),
    Sort.TRAFFIC: lambda entry: (-entry["load"]["in_flight"], -entry["load"]["ahead"]),
    Sort.NAME: lambda entry: (entry["endpoint"]["id"],),
}


def _met(route: Mapping[str, Any]) -> float:
    """The share that met the TTFT budget; of a route without any it is above all others."""
    met: float | None = route["figures"]["met"]
    return 2.0 if met is None else met


def ordered(entries: Sequence[Any], sort: Sort, orders: Orders) -> Sequence[Any]:
    return entries if sort is Sort.CONFIGURED else sorted(entries, key=orders[sort])


def _span(figures: Mapping[str, Any]) -> str:
    if figures["window"] == NOW:
        return ""
    known = f", of which {age(figures['covered_s'])} are known"
    return f"   window {figures['window']}{'' if figures['covered_s'] >= 0.98 * figures['window_s'] else known}"


def route_row(route: Mapping[str, Any]) -> Row:
    seen, budget, grows = route["figures"], route["ttft_budget_ms"], route["ttft_budget_grows"]
    p50, p95, p99 = seen["ttft_ms"].values()
    late = budget is not None and p95 is not None and p95 > budget and not grows
    short = seen["met"] is not None and route["ttft_target"] is not None and seen["met"] < route["ttft_target"]
    return (
        Text(route["route"]),
        Text(share(seen["met"]), "red" if short else ""),
        share(seen["goodput"]),
        f"{seen['requests_per_s']:.1f}",
        ms(p50),
        Text(ms(p95), "red" if late else ""),
        ms(p99),
        f"{ms(budget)}+" if grows else ms(budget),
        ms(seen["tpot_p95_ms"]),
        ms(seen["longest_gap_p95_ms"]),
        share(seen["hit"]),
        f"{route['held']:.0f}",
        f"{seen['shed_per_s']:.1f}",
        f"{seen['failed_per_s']:.1f}",
        Text("  ".join(f"{pool} {part:.0%}" for pool, part in seen["pools"].items())),
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


def _verdicts(found: Mapping[str, Any], view: View) -> list[RenderableType]:
    """The summary, and a line for each route that has trouble."""
    troubled = [one for one in found["routes"] if one["state"] in TROUBLE and view.shows(one["route"])]
    lines = [
        Text(f"• {one['text']}{'  ' if one['mend'] else ''}{one['mend']}", TROUBLE[one["state"]]) for one in troubled
    ]
    return [Text(found["summary"], "bold" if troubled else "green"), *lines] if found["summary"] else []


def _incidents(found: Sequence[Mapping[str, Any]], width: int) -> list[RenderableType]:
    """A table, and what was seen of the worst with its mend; nothing where all is well."""
    if not found:
        return []
    worst = found[0]
    told = Text(f"seen: {worst['evidence']}\nmend: {worst['mend']}", "red" if worst["failed"] else "")
    return [fitting(INCIDENTS, map(_incident, found), width), told]


def _incident(found: Mapping[str, Any]) -> Row:
    return (
        Text(found["headline"], "red" if found["failed"] else ""),
        Text(found["route"]),
        Text(found["cause"]),
        ms(found["over_ms"]) if found["late"] else "–",
        f"{age(time() - found['since'])} ago",
        Text(found["request_id"]),
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
