"""`firsttoken top`: a running gateway in a terminal, read through the admin port alone.

Rules:
- Figures are differences between two polls. A poll is three small GETs.
- A URL without any answer is an error (exit code 2). A gateway that becomes unreachable is reported and polled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from time import sleep, strftime, time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.top_tables import frame, gateway_view, route_views
from gateway.config.config_errors import ConfigError

PATIENCE = 5.0  # s to wait for an answer of the gateway
WIDTH = 130  # columns, for an output without a width
SLOWEST = 8  # requests


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
            console.print(_frame(args.admin, first, look(args.admin)))
            return 0
    except Gone as gone:
        raise ConfigError([f"{args.admin}: this is not the admin port of a running gateway: {gone}"]) from None
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, screen=True) as screen:
            _watch(args, first, lambda shown: screen.update(shown, refresh=True), live=True)
    else:
        _watch(args, first, console.print, live=False)
    return 0


def _watch(args: argparse.Namespace, before: Look, show: Any, *, live: bool) -> None:
    """Outside a terminal a repeated message is printed once."""
    shown: RenderableType = Text(f"{args.admin}: the first figures come in {args.interval:g} s")
    away = ""
    show(shown)
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
            away = away or str(gone)
            continue
        shown, before, away = _frame(args.admin, before, now), now, ""
        show(shown)


def _frame(admin: str, before: Look, now: Look) -> RenderableType:
    title = f"{admin}  {strftime('%H:%M:%S')}"
    whole, routes = gateway_view(before.figures, now.figures), route_views(before.figures, now.figures)
    return frame(title, whole, routes, now.fleet, now.slowest, time())


def look(admin: str) -> Look:
    """Raises Gone."""
    figures = _read(admin, "/routes")
    if not (isinstance(figures, dict) and "routes" in figures):
        raise Gone("it says something else")
    return Look(figures, _read(admin, "/fleet"), _read(admin, f"/requests?slowest={SLOWEST}"))


def _read(admin: str, path: str) -> Any:
    try:
        with urlopen(f"{admin.rstrip('/')}{path}", timeout=PATIENCE) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise Gone(f"HTTP {error.code}") from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise Gone(error.reason if isinstance(error, URLError) else error) from None
