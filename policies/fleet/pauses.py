"""Pauses of this process: stopped by a signal or a debugger, a frozen machine, an event loop that was held up.

Rules:
- A beat is due every few ten milliseconds. An event more than PAUSE after the latest one comes after a pause.
- What was in progress then was not watched: its times are of the pause, and teach nothing of an endpoint. Shorter
  stalls are within the errors that forecasts are made for.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.types import FOREVER, NEVER

PAUSE = 0.5  # s without a beat


class Pauses:
    """`due`: an event later than this comes after a pause that is not noted yet; FOREVER: no beat is awaited."""

    __slots__ = ("_beat_at", "_began", "_ended", "_on_pause", "due")

    def __init__(self, on_pause: Callable[[], None]) -> None:
        self.due = FOREVER
        self._on_pause = on_pause
        self._beat_at = self._began = self._ended = NEVER

    def on_beat(self, now: float) -> None:
        """The event loop runs."""
        if now > self.due:
            self.note(now)
        self._beat_at, self.due = now, now + PAUSE

    def note(self, now: float) -> None:
        """A pause is over."""
        self._began, self._ended = self._beat_at, now
        self.due = FOREVER
        self._on_pause()

    def within(self, since: float, until: float) -> float:
        """Seconds of that time in the latest pause."""
        return max(min(self._ended, until) - max(self._began, since), 0.0)
