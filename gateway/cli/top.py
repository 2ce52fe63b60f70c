"""`firsttoken top`: a running gateway in a terminal, read through the admin port alone.

Rules:
- All figures are the gateway's own, of a window. A poll is six small GETs.
- A URL without any answer is an error (exit code 2). A gateway that becomes unreachable is reported and polled again.
- A key changes the tables at once, from the replies of the last poll; another window is asked for.
"""

from __future__ import annotations

import argparse
import sys
from time import monotonic, sleep, strftime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.foreground import has_keyboard
from gateway.cli.gateway_client import ErrorReply, Gone, ask, not_the_admin_port
from gateway.cli.top_tables import NO_VERDICTS, NOW, Look, Sort, View, frame, keyboard
from gateway.config.config_errors import ConfigError

PATIENCE = 5.0  # s to wait for an answer of the gateway
WIDTH = 130  # columns, for an output without a width
SHOWN = 8  # incidents, and slowest requests
OLDER = "its figures are those of an older version"
SHORTEST, LONGEST = 5, 60  # minutes of the incidents


class Watched:
    """The replies of the last poll, and the view of them."""

    def __init__(self, admin: str, first: Look, view: View) -> None:
        self.view = view
        self.away = ""  # since when, and why; empty: the last poll was answered
        self._admin, self._now = admin, first

    def poll(self) -> None:
        try:
            self._now = look(self._admin, self.view.window)
        except Gone as gone:
            self.away = self.away or f"{self._admin} has gone away at {strftime('%H:%M:%S')} and is tried again: {gone}"
        else:
            self.away = ""

    def tables(self, width: int) -> RenderableType:
        return frame(self._admin, self._now, self.view, width)

    def screen(self, width: int) -> RenderableType:
        """The last tables stay while the gateway is away."""
        parts: list[RenderableType] = [Text(self.away, "bold red")] if self.away else []
        return Group(*parts, self.tables(width), Text(self.view.help, "dim"))


def top(args: argparse.Namespace) -> int:
    """`args`: admin, interval, once, sort, filter. Runs until `q` or Ctrl-C; raises ConfigError."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, no_color=True)
    view = View(Sort(args.sort), args.filter, args.window)
    try:
        first = look(args.admin, view.window)
        if args.once:
            console.print(frame(args.admin, first, view, console.width))
            return 0
    except Gone as gone:
        raise ConfigError([not_the_admin_port(args.admin, gone)]) from None
    watched = Watched(args.admin, first, view)
    if console.is_terminal and (has_keyboard() or not sys.stdin.isatty()):
        _watch_screen(watched, args.interval, console)
    else:
        _watch_text(watched, args.interval, console)
    return 0


def _watch_screen(watched: Watched, interval: float, console: Console) -> None:
    due = monotonic() + interval
    with Live(console=console, auto_refresh=False, screen=True) as screen, keyboard() as keys:
        while not watched.view.ended:
            screen.update(watched.screen(console.width), refresh=True)
            for key in keys.wait(max(due - monotonic(), 0.0)):
                window, watched.view = watched.view.window, watched.view.after(key)
                due = due if watched.view.window == window else 0.0
            if monotonic() >= due:
                watched.poll()
                due = monotonic() + interval


def _watch_text(watched: Watched, interval: float, console: Console) -> None:
    """Tables below each other. A gateway that is away is reported once."""
    console.print(watched.tables(console.width))
    while True:
        sleep(interval)
        reported = watched.away
        watched.poll()
        if not watched.away:
            console.print(watched.tables(console.width))
        elif not reported:
            console.print(watched.away)


def look(admin: str, window: str = NOW) -> Look:
    """Raises Gone."""
    try:
        figures = _read(admin, f"/windows?window={window}")
    except ErrorReply as reply:
        raise Gone(OLDER if reply.status == 400 else reply) from None
    if not (isinstance(figures, dict) and "routes" in figures):
        raise Gone("it says something else")
    if "gateway" not in figures:
        raise Gone(OLDER)
    minutes = min(max(round(figures["window_s"] / 60), SHORTEST), LONGEST)
    incidents = _read(admin, f"/incidents?minutes={minutes}")["incidents"][:SHOWN]
    slowest = _read(admin, f"/requests?slowest={SHOWN}")
    return Look(figures, _read(admin, "/fleet"), slowest, incidents, _verdicts(admin, window))


def _verdicts(admin: str, window: str) -> Any:
    """An older gateway has none."""
    try:
        return _read(admin, f"/verdicts?window={window}")
    except ErrorReply:
        return NO_VERDICTS


def _read(admin: str, path: str) -> Any:
    return ask(admin, path, patience=PATIENCE)
