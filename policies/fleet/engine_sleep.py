"""Sleep of an engine, by its own word (vLLM's sleep mode): requests wait there until somebody wakes it."""

from __future__ import annotations

from policies.types import NEVER

WAKE_S = 10.0  # s that a waking takes, until one was timed
STALE_PAGE = 1.0  # s after a waking, in which a page may still tell of the sleep
SLEPT_FOR = 30.0  # s for which the word is believed without another


class EngineSleep:
    """`wake_s`: s that a waking takes."""

    def __init__(self) -> None:
        self.asleep = False
        self.wake_s = WAKE_S
        self._told_at = self._woken_at = NEVER

    def on_told(self, asleep: bool, now: float) -> bool:
        """The engine's own word. Returns whether it has fallen asleep or woken up."""
        if asleep and now - self._woken_at < STALE_PAGE:
            return False
        self._told_at = now
        changed, self.asleep = asleep is not self.asleep, asleep
        return changed

    def on_woken(self, seconds: float, now: float) -> None:
        """It was woken, in so many seconds."""
        self.asleep = False
        self.wake_s, self._woken_at = seconds, now

    def on_unknown(self, now: float) -> None:
        """It tells nothing now."""
        if now - self._told_at > SLEPT_FOR:
            self.asleep = False
