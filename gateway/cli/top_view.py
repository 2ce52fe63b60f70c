"""Keys of `firsttoken top`: they change the order and the filter of the tables, or end the command."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from time import sleep

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
